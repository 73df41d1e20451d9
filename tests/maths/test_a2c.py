"""The preset of A2C: PPO with its settings is A2C, step for step, as PyTorch alone computes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_training.algorithms.ppo import PPO, SPEC
from rl_training.data.batch import RolloutBatch
from rl_training.envs.factory import probe_env
from rl_training.experiment.config import load_config
from rl_training.rng import Rng

T, N, GAMMA = 5, 8, 0.99


def make_learner() -> PPO:
    config = load_config("ppo/a2c_cartpole", ["algo_kwargs.hidden_sizes=[16]"])
    learner = SPEC.build(probe_env(config.env_id, {}), config.algo_config, (0,))
    assert isinstance(learner, PPO)
    return learner


def make_rollout(key: int) -> RolloutBatch:
    rng = Rng((key,), "rollout")
    obs, next_obs = rng.normal(T, N, 4), rng.normal(T, N, 4)
    terminated, truncated = rng.uniform(T, N) < 0.1, rng.uniform(T, N) < 0.1
    goes_on = ~(terminated | truncated)[:, :-1]
    next_obs[:, :-1][goes_on] = obs[:, 1:][goes_on]
    return RolloutBatch(
        obs=obs,
        action=rng.integers(2, T, N),
        reward=rng.normal(T, N),
        next_obs=next_obs,
        terminated=terminated,
        truncated=truncated,
    )


class Network(nn.Module):
    """What the learner has, as plain PyTorch."""

    def __init__(self, learner: PPO) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for stacked in (learner.model.actor, learner.model.critic):
            weights = dict(stacked.named_parameters())
            first, last = nn.Linear(4, 16), nn.Linear(16, weights["layers.1.weight"].shape[-1])
            for index, layer in enumerate((first, last)):
                layer.weight.data.copy_(weights[f"layers.{index}.weight"][0].T)
                layer.bias.data.copy_(weights[f"layers.{index}.bias"][0, 0])
            self.parts.append(nn.Sequential(first, nn.Tanh(), last))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.parts[0](obs).log_softmax(-1), self.parts[1](obs).squeeze(-1)


def returns_of(network: Network, rollout: RolloutBatch) -> Tensor:
    """Rewards to the end of episode or rollout, and the value of what comes after, backwards."""
    with torch.no_grad():
        after = network(rollout.next_obs[0])[1].numpy()
    reward, returns = rollout.reward[0].numpy(), np.zeros((T, N), dtype=np.float32)
    for step, env in np.ndindex(T, N):
        time = T - 1 - step
        future = after[time, env]
        if rollout.terminated[0, time, env]:
            future = 0.0
        elif time < T - 1 and not rollout.truncated[0, time, env]:
            future = returns[time + 1, env]
        returns[time, env] = reward[time, env] + GAMMA * future
    return torch.from_numpy(returns)


def a2c_loss(network: Network, rollout: RolloutBatch) -> Tensor:
    returns = returns_of(network, rollout)
    log_probs, value = network(rollout.obs[0])
    log_prob = log_probs.gather(-1, rollout.action[0].unsqueeze(-1)).squeeze(-1)
    policy_loss = -((returns - value).detach() * log_prob).mean()
    loss: Tensor = policy_loss + 0.5 * nn.functional.mse_loss(value, returns)
    return loss


def aligned(learner: PPO) -> list[Tensor]:
    """The learner's parameters in the order and shape of `Network`'s."""
    parts = (learner.model.actor, learner.model.critic)
    tensors = [dict(part.named_parameters()) for part in parts]
    order = [f"layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    held = [own[name].detach()[0].clone() for own in tensors for name in order]
    return [tensor.T if len(tensor) > 1 else tensor[0] for tensor in held]


def test_the_gradient_of_the_one_minibatch_is_that_of_a2c() -> None:
    learner, rollout = make_learner(), make_rollout(1)
    network = Network(learner)
    theirs = torch.autograd.grad(a2c_loss(network, rollout), list(network.parameters()))
    before = aligned(learner)
    # A step of plain gradient descent is the gradient.
    parameters = list(learner.model.parameters())
    loss = learner.loss(learner.prepare(rollout))[0]
    slopes = torch.autograd.grad(loss.sum(), parameters)
    with torch.no_grad():
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.sub_(slope)
    for old, new, slope in zip(before, aligned(learner), theirs, strict=True):
        torch.testing.assert_close(old - new, slope, rtol=1e-3, atol=1e-6)


def test_updates_by_the_preset_are_those_of_a2c_with_rmsprop() -> None:
    learner = make_learner()
    network = Network(learner)
    library = torch.optim.RMSprop(network.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
    for key in range(6):
        rollout = make_rollout(key)
        result = learner.update(rollout)
        assert result.num_gradient_steps == 1
        library.zero_grad()
        torch.autograd.backward(a2c_loss(network, rollout))
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        library.step()
    for ours, theirs in zip(aligned(learner), network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)


def test_nothing_is_ever_clipped() -> None:
    learner = make_learner()
    for key in range(3):
        metrics = learner.update(make_rollout(key)).metrics
        assert metrics["clip_fraction"] == 0.0
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-7)

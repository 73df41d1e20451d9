"""Discrete SAC's update: expectations against NumPy, limits of the temperature, acting."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from helpers.updates import OBS, B, make_constant, parameters_of, same
from rl_training.algorithms.discrete_sac import SPEC, DiscreteSAC, discrete_sac_loss
from rl_training.data.batch import TransitionBatch
from rl_training.envs.factory import probe_env
from rl_training.errors import SpecMismatch
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.actor_with_critics import MLPDiscreteSACModel
from rl_training.rng import Rng

ACTIONS = 4
Array = NDArray[Any]


def make_model(seeds: tuple[int, ...] = (0,)) -> MLPDiscreteSACModel:
    return MLPDiscreteSACModel(OBS, ACTIONS, (16,), rng=Rng(seeds, "networks"))


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> DiscreteSAC:
    return DiscreteSAC(model=make_model(seeds), seeds=seeds, **keywords)


def make_batch(seeds: tuple[int, ...] = (0,)) -> TransitionBatch:
    rng = Rng(seeds, "batch")
    return TransitionBatch(
        obs=rng.normal(B, OBS),
        action=rng.integers(ACTIONS, B),
        reward=rng.normal(B),
        next_obs=rng.normal(B, OBS),
        discount=torch.where(rng.uniform(B) < 0.3, 0.0, 0.9),
    )


def answer(network: nn.Module, obs: Tensor, member: int | None = None) -> Array:
    """What one hidden layer of ReLU and a linear output make of rows `[B, I]`, in NumPy."""
    values = {name: p.detach().double().numpy()[0] for name, p in network.named_parameters()}
    if member is not None:
        values = {name: value[member] for name, value in values.items()}
    x = obs[0].double().numpy() @ values["layers.0.weight"] + values["layers.0.bias"]
    out: Array = np.maximum(x, 0) @ values["layers.1.weight"] + values["layers.1.bias"]
    return out


def policy_of(learner: DiscreteSAC, obs: Tensor) -> Array:
    logits = answer(learner.model.actor, obs)
    weights = np.exp(logits)
    shares: Array = weights / weights.sum(-1, keepdims=True)
    return shares


def test_the_losses_are_those_of_numpy() -> None:
    learner, batch = make_learner(alpha=0.3), make_batch()
    # Other target critics than the current ones, so that a mix-up shows.
    learner.target_critic.load_state_dict(
        MLPDiscreteSACModel(OBS, ACTIONS, (16,), rng=Rng((9,), "networks")).critic.state_dict()
    )
    losses = discrete_sac_loss(learner, batch)
    rows, action = np.arange(B), batch.action[0].numpy()
    after = policy_of(learner, batch.next_obs)
    least = np.minimum(*(answer(learner.target_critic, batch.next_obs, i) for i in (0, 1)))
    value = (after * (least - 0.3 * np.log(after))).sum(-1)
    target = batch.reward[0].double().numpy() + batch.discount[0].double().numpy() * value
    assert losses["target_q_mean"].mean().item() == pytest.approx(target.mean(), rel=1e-4)
    q = [answer(learner.model.critic, batch.obs, i) for i in (0, 1)]
    expected = sum(np.mean((one[rows, action] - target) ** 2) for one in q)
    assert losses["critic_loss"].item() == pytest.approx(expected, rel=1e-4)
    now = policy_of(learner, batch.obs)
    expected = np.mean((now * (0.3 * np.log(now) - np.minimum(*q))).sum(-1))
    assert losses["actor_loss"].item() == pytest.approx(expected, rel=1e-4)
    entropy = -(now * np.log(now)).sum(-1).mean()
    assert losses["entropy"].item() == pytest.approx(entropy, rel=1e-4)


def test_the_gradient_of_the_policy_is_that_of_its_logits_in_closed_form() -> None:
    """d/dlogit_a of pi^T (alpha log pi - Q) is pi_a (c_a - pi^T c) with c = alpha log pi - Q."""
    learner, batch = make_learner(alpha=0.5), make_batch()
    bias = list(learner.model.actor.parameters())[-1]
    gradient = torch.autograd.grad(learner.actor_loss(batch)[0].sum(), bias)[0].flatten()
    now = policy_of(learner, batch.obs)
    q = np.minimum(*(answer(learner.model.critic, batch.obs, i) for i in (0, 1)))
    cost = 0.5 * np.log(now) - q
    expected = (now * (cost - (now * cost).sum(-1, keepdims=True))).mean(0)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-3, atol=1e-6)


def learned_policy(alpha: float) -> Tensor:
    """The policy in one state whose actions are worth 0, 1, 2 and 3, once it has converged."""
    learner = make_learner(alpha=alpha, actor_learning_rate=0.02)
    make_constant(learner.model.actor, [1.0, 0.0, 0.0, 0.0])
    obs = torch.zeros(1, B, OBS)
    worth = torch.arange(4.0).expand(1, 2, B, 4)
    learner.model.all_q_values = lambda *_: worth  # type: ignore[method-assign]
    for _ in range(600):
        learner.actor_optimizer.minimize(
            learner.actor_loss(replace(make_batch(), obs=obs))[0] / max(alpha, 1.0)
        )
    return learner.model.logits(obs)[0, 0].detach().softmax(-1)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_the_best_policy_is_the_boltzmann_distribution_of_q(alpha: float) -> None:
    expected = (torch.arange(4.0) / alpha).softmax(-1)
    torch.testing.assert_close(learned_policy(alpha), expected, atol=0.02, rtol=0.0)


def test_with_a_huge_temperature_the_policy_is_uniform() -> None:
    torch.testing.assert_close(learned_policy(1e4), torch.full((4,), 0.25), atol=0.01, rtol=0.0)


@pytest.mark.parametrize(("bias", "rises"), [([0.0] * ACTIONS, False), ([9.0, 0, 0, 0], True)])
def test_the_temperature_falls_above_the_target_entropy_and_rises_below_it(
    bias: list[float], rises: bool
) -> None:
    learner = make_learner(learning_rate=1e-2)
    make_constant(learner.model.actor, bias)
    before = learner.log_alpha.item()
    learner.update(make_batch())
    assert (learner.log_alpha.item() > before) is rises


def test_the_target_entropy_is_a_share_of_the_largest_unless_it_is_given() -> None:
    assert make_learner().target_entropy == pytest.approx(0.98 * math.log(ACTIONS))
    assert make_learner(target_entropy_share=0.5).target_entropy == pytest.approx(math.log(2))
    assert make_learner(target_entropy=0.1).target_entropy == 0.1


def test_acting_is_greedy_and_exploring_samples_by_the_logits() -> None:
    learner = make_learner()
    make_constant(learner.model.actor, [0.0, math.log(3.0), -50.0, -50.0])
    obs = torch.zeros(1, 4000, OBS)
    assert (learner.act(obs) == 1).all()
    drawn = learner.act(obs, explore=True)
    assert drawn.dtype == torch.int64
    shares = torch.bincount(drawn[0], minlength=ACTIONS) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.25, 0.75, 0.0, 0.0]), atol=0.03, rtol=0.0)


def test_random_actions_are_uniform() -> None:
    drawn = make_learner().random_action(4000)
    shares = torch.bincount(drawn[0], minlength=ACTIONS) / 4000
    torch.testing.assert_close(shares, torch.full((ACTIONS,), 0.25), atol=0.03, rtol=0.0)


def test_a_bandits_values_are_learned() -> None:
    learner = make_learner(alpha=0.01, learning_rate=0.01)
    obs, action = torch.zeros(1, B, OBS), torch.arange(B).remainder(ACTIONS).unsqueeze(0)
    batch = TransitionBatch(
        obs=obs, action=action, reward=action.float(), next_obs=obs, discount=torch.zeros(1, B)
    )
    for _ in range(300):
        learner.update(batch)
    q = learner.model.all_q_values(obs)[0, :, 0]
    torch.testing.assert_close(q, torch.arange(4.0).expand(2, -1), atol=0.05, rtol=0.0)
    assert (learner.act(obs) == 3).all()


def test_an_update_moves_every_network() -> None:
    learner = make_learner()
    networks = (learner.model.actor, learner.model.critic, learner.target_critic)
    before = [parameters_of(network) for network in networks]
    assert set(learner.update(make_batch()).metrics) == set(SPEC.metrics)
    for old, network in zip(before, networks, strict=True):
        assert not same(old, parameters_of(network))


def test_stacked_seeds_equal_single_ones() -> None:
    seeds = (3, 1, 2)
    group = make_learner(seeds)
    singles = [make_learner((seed,)) for seed in seeds]
    for _ in range(4):
        together = group.update(make_batch(seeds)).metrics
        for index, (seed, single) in enumerate(zip(seeds, singles, strict=True)):
            alone = single.update(make_batch((seed,))).metrics
            for name, value in together.tensors.items():
                ours = value[index].mean().item()
                assert ours == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("algo", "other", "task"),
    [
        ("sac", "discrete_sac", "CartPole-v1"),
        ("discrete_sac", "sac", "Pendulum-v1"),
        ("cql", "discrete_cql", "CartPole-v1"),
        ("discrete_cql", "cql", "Pendulum-v1"),
        ("iql", "discrete_iql", "CartPole-v1"),
        ("discrete_iql", "iql", "Pendulum-v1"),
    ],
)
def test_a_task_with_other_actions_is_refused_with_the_method_for_them(
    algo: str, other: str, task: str
) -> None:
    spec = get_algorithm_spec(algo)
    with pytest.raises(SpecMismatch, match=f"; {other} is the same method for them; `rl-training"):
        spec.check_env(probe_env(task, {}), spec.config_class())
    assert get_algorithm_spec(other).counterpart == algo

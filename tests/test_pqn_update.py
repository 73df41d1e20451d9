"""PQN's update: targets by hand and in NumPy, limits of lambda, acting, the network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.updates import parameters_of, same
from rl_training.algorithms.pqn import PQN, SPEC, pqn_loss, pqn_networks
from rl_training.data.batch import RolloutBatch
from rl_training.envs.spec import EnvSpec
from rl_training.rng import Rng

OBS, ACTIONS, T, N = 3, 4, 6, 3
GAMMA = 0.9
TASK = EnvSpec(
    env_id="test",
    obs_shape=(OBS,),
    obs_dtype="float32",
    action_kind="discrete",
    action_shape=(),
    action_dtype="int64",
    num_actions=ACTIONS,
)


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> PQN:
    settings: dict[str, Any] = {"hidden_sizes": (8,), "gamma": GAMMA, "minibatch_size": 9}
    settings |= {"num_steps": T}
    config = PQN.settings_class()(**settings | keywords)
    return PQN(config=config, seeds=seeds, **pqn_networks(TASK, config, Rng(seeds, "networks")))  # type: ignore[arg-type]


def make_rollout(seeds: tuple[int, ...] = (0,)) -> RolloutBatch:
    rng = Rng(seeds, "rollout")
    return RolloutBatch(
        obs=rng.normal(T, N, OBS),
        action=rng.integers(ACTIONS, T, N),
        reward=rng.normal(T, N),
        next_obs=rng.normal(T, N, OBS),
        terminated=rng.uniform(T, N) < 0.2,
        truncated=rng.uniform(T, N) < 0.2,
    )


def best_next(learner: PQN, rollout: RolloutBatch) -> NDArray[Any]:
    """max_a Q(s', a) `[T, N]`."""
    with torch.no_grad():
        q = learner.q_network(rollout.next_obs.flatten(1, 2)).amax(-1)
    values: NDArray[Any] = q.view(T, N).double().numpy()
    return values


def n_step_returns(rollout: RolloutBatch, value: NDArray[Any], start: int, env: int) -> list[float]:
    """Returns of 1, 2, ... steps from here, up to the episode's or the rollout's end."""
    reward = rollout.reward[0].double().numpy()
    terminated, truncated = rollout.terminated[0].numpy(), rollout.truncated[0].numpy()
    returns, total = [], 0.0
    for step in range(start, T):
        total += GAMMA ** (step - start) * reward[step, env]
        future = 0.0 if terminated[step, env] else value[step, env]
        returns.append(total + GAMMA ** (step - start + 1) * future)
        if terminated[step, env] or truncated[step, env]:
            break
    return returns


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_targets_are_the_mean_of_n_step_returns_with_falling_weights(q_lambda: float) -> None:
    """(1 - lambda) sum lambda^(n-1) G^(n), and what is left of the weight on the longest one."""
    learner, rollout = make_learner(q_lambda=q_lambda), make_rollout()
    value, expected = best_next(learner, rollout), np.zeros((T, N))
    for start, env in np.ndindex(T, N):
        returns = n_step_returns(rollout, value, start, env)
        weights = [(1 - q_lambda) * q_lambda**n for n in range(len(returns))]
        weights[-1] = q_lambda ** (len(returns) - 1)
        expected[start, env] = np.dot(weights, returns)
    target = learner.prepare(rollout).target.view(T, N)
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_lambda_zero_is_one_step_q_learning() -> None:
    learner, rollout = make_learner(q_lambda=0.0), make_rollout()
    future = np.where(rollout.terminated[0].numpy(), 0.0, best_next(learner, rollout))
    expected = rollout.reward[0].numpy() + GAMMA * future
    target = learner.prepare(rollout).target.view(T, N)
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_lambda_one_sums_rewards_to_the_end_and_bootstraps_there() -> None:
    learner, never = make_learner(q_lambda=1.0), torch.zeros(1, T, N, dtype=torch.bool)
    rollout = replace(make_rollout(), terminated=never, truncated=never)
    rewards = rollout.reward[0].double().numpy()
    discounts = GAMMA ** np.arange(T)[:, None]
    expected = (discounts * rewards).sum(0) + GAMMA**T * best_next(learner, rollout)[-1]
    target = learner.prepare(rollout).target.view(T, N)[0]
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("q_lambda", [0.65, 1.0])
def test_a_time_limit_has_a_future_and_a_termination_none(q_lambda: float) -> None:
    learner, rollout = make_learner(q_lambda=q_lambda), make_rollout()
    yes, no = torch.ones(1, T, N, dtype=torch.bool), torch.zeros(1, T, N, dtype=torch.bool)
    terminated = learner.prepare(replace(rollout, terminated=yes, truncated=no)).target
    torch.testing.assert_close(terminated.view_as(rollout.reward), rollout.reward)
    both = learner.prepare(replace(rollout, terminated=yes, truncated=yes)).target
    assert torch.equal(both, terminated)
    cut = learner.prepare(replace(rollout, terminated=no, truncated=yes)).target.view(T, N)
    expected = rollout.reward[0].numpy() + GAMMA * best_next(learner, rollout)
    np.testing.assert_allclose(cut.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_no_target_looks_past_the_end_of_an_episode() -> None:
    learner, rollout = make_learner(q_lambda=0.9), make_rollout()
    ends = torch.zeros(1, T, N, dtype=torch.bool)
    ends[:, 2, 0] = True
    rollout = replace(rollout, terminated=torch.zeros_like(ends), truncated=ends)
    later = rollout.reward.clone()
    later[:, 3:, 0] += 100.0
    before, after = (
        learner.prepare(one).target.view(T, N) for one in (rollout, replace(rollout, reward=later))
    )
    assert torch.equal(before[:3, 0], after[:3, 0])
    assert not torch.equal(before[3:, 0], after[3:, 0])
    assert torch.equal(before[:, 1:], after[:, 1:])


def test_the_loss_is_half_of_the_squared_error_of_the_actions_taken() -> None:
    learner, rollout = make_learner(), make_rollout()
    data = learner.prepare(rollout)
    with torch.no_grad():
        q = learner.q_network(data.obs)[0].numpy()
    error = q[np.arange(T * N), data.action[0].numpy()] - data.target[0].numpy()
    losses = pqn_loss(learner, rollout)
    assert losses["loss"].item() == pytest.approx(0.5 * np.mean(error**2), rel=1e-5)
    assert losses["td_error_mean"].item() == pytest.approx(np.mean(np.abs(error)), rel=1e-5)


def test_targets_stay_through_all_epochs_and_the_gradient_is_that_of_q_alone() -> None:
    """One epoch of one minibatch is a step down the gradient of a regression to fixed numbers."""
    sgd: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": None}
    learner = make_learner(update_epochs=1, minibatch_size=T * N, **sgd)
    rollout = make_rollout()
    target = learner.prepare(rollout).target
    parameters = list(learner.q_network.parameters())
    before = parameters_of(learner.q_network)
    q = learner.q_network(rollout.obs.flatten(1, 2))
    taken = q.gather(-1, rollout.action.flatten(1, 2).unsqueeze(-1)).squeeze(-1)
    slopes = torch.autograd.grad(0.5 * (taken - target).square().mean(), parameters)
    learner.update(rollout)
    for old, slope, new in zip(before, slopes, parameters, strict=True):
        torch.testing.assert_close(new.detach(), old - 0.1 * slope, rtol=1e-4, atol=1e-6)


def test_a_bandits_values_are_learned() -> None:
    learner = make_learner(learning_rate=0.01, update_epochs=4, minibatch_size=T * N)
    action = torch.arange(T * N).remainder(ACTIONS).view(1, T, N)
    rollout = replace(
        make_rollout(),
        obs=torch.ones(1, T, N, OBS),
        action=action,
        reward=action.float(),
        terminated=torch.ones(1, T, N, dtype=torch.bool),
    )
    for _ in range(60):
        learner.update(rollout)
    q = learner.q_network(torch.ones(1, 1, OBS))[0, 0].detach()
    torch.testing.assert_close(q, torch.tensor([0.0, 1.0, 2.0, 3.0]), atol=0.1, rtol=0.0)
    assert learner.act(torch.ones(1, 1, OBS)).item() == 3


def test_epsilon_falls_in_a_straight_line_and_is_the_share_of_random_actions() -> None:
    learner = make_learner(epsilon_end=0.2, exploration_fraction=0.5)
    for progress, share in ((0.0, 1.0), (0.25, 0.6), (0.5, 0.2), (0.9, 0.2)):
        learner.set_progress(progress)
        assert learner.share_random.tensor.item() == pytest.approx(share)
        assert learner.schedule_values()["epsilon"] == pytest.approx(share)
    obs = torch.zeros(1, 8000, OBS)
    best = learner.act(obs)[0, 0]
    drawn = learner.act(obs, explore=True)[0]
    shares = torch.bincount(drawn, minlength=ACTIONS) / 8000
    expected = torch.full((ACTIONS,), 0.2 / ACTIONS)
    expected[best] += 0.8
    torch.testing.assert_close(shares, expected, atol=0.02, rtol=0.0)


@pytest.mark.parametrize("count", range(2, 19))
def test_the_ends_of_the_draw_are_the_first_and_the_last_action(count: int) -> None:
    learner = make_learner()
    learner.q_network.action_dim = count
    ends = torch.tensor([[0.0, 0.0], [0.0, 1 - 2**-24]]).unsqueeze(0)
    chosen = learner.epsilon_greedy(torch.zeros(1, 2, OBS), ends, 1.0)
    assert chosen.tolist() == [[0, count - 1]]


@pytest.mark.parametrize("layer_norm", [True, False])
def test_hidden_layers_are_normalised_before_they_are_activated(layer_norm: bool) -> None:
    learner = make_learner(hidden_sizes=(8, 16), layer_norm=layer_norm)
    held = {name: p.detach()[0] for name, p in learner.q_network.named_parameters()}
    assert (len(held) == 10) is layer_norm
    x = make_rollout().obs.flatten(1, 2)[0]
    hidden = x
    for index, norm in enumerate(("encoder.layers.norms.0", "encoder.norm")):
        layer = f"encoder.layers.layers.{index}"
        hidden = hidden @ held[f"{layer}.weight"] + held[f"{layer}.bias"]
        if layer_norm:
            scale, shift = held[f"{norm}.scale"][0], held[f"{norm}.shift"][0]
            hidden = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], scale, shift)
        hidden = hidden.relu()
    expected = hidden @ held["head.weight"] + held["head.bias"]
    torch.testing.assert_close(learner.q_network(x.unsqueeze(0))[0], expected)


def test_an_update_moves_every_parameter_and_counts_its_steps() -> None:
    learner = make_learner(update_epochs=3, minibatch_size=5)
    before = [[p] for p in parameters_of(learner.q_network)]
    result = learner.update(make_rollout())
    assert result.num_gradient_steps == 3 * (T * N // 5)
    assert set(result.metrics) == set(SPEC.metrics)
    after = parameters_of(learner.q_network)
    assert not any(same(old, [new]) for old, new in zip(before, after, strict=True))


def test_stacked_seeds_equal_single_ones() -> None:
    seeds = (3, 1, 2)
    group = make_learner(seeds)
    singles = [make_learner((seed,)) for seed in seeds]
    for _ in range(3):
        together = group.update(make_rollout(seeds)).metrics
        for index, (seed, single) in enumerate(zip(seeds, singles, strict=True)):
            alone = single.update(make_rollout((seed,))).metrics
            for name, value in together.tensors.items():
                ours = value[index].mean().item()
                assert ours == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name

"""Fitted Q evaluation against values known in closed form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.replay.bootstrap import EpisodeBootstrap
from rl_training.errors import ConfigError
from rl_training.ope.fitted_q import Fit, fit_members, member_seeds
from rl_training.ope.fqe import FQE, FQEConfig, ValueUnits, fqe_loss, level

Array = NDArray[Any]
GAMMA = 0.8
QUICK = FQEConfig(
    gamma=GAMMA,
    updates=400,
    members=4,
    batch_size=64,
    hidden_sizes=(32,),
    learning_rate=1e-2,
    tau=0.2,
)
# P[s, a] is the state that action a leads to; a reward is of a state and an action.
TRANSITIONS = np.array([[1, 2], [2, 0], [0, 1]])
REWARDS = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 2.0]])
PLAN = np.array([1, 0, 1])
"""The policy that is evaluated: an action for each state."""


def one_hot(states: Array) -> Array:
    return np.eye(3, dtype=np.float32)[states]


def plan_policy(observations: Array) -> Tensor:
    """`PLAN` as a function of observations, `[n, 1]`."""
    return torch.from_numpy(PLAN[observations.argmax(-1)]).unsqueeze(1)


def any_action(observations: Array) -> Tensor:
    """The only action of tasks with one, `[n, 1]`."""
    return torch.zeros(len(observations), 1, dtype=torch.int64)


def plan_value(gamma: float = GAMMA) -> Array:
    """V of the plan, (I - gamma P)^-1 r."""
    states = np.arange(3)
    moves = np.eye(3)[TRANSITIONS[states, PLAN]]
    value: Array = np.linalg.solve(np.eye(3) - gamma * moves, REWARDS[states, PLAN])
    return value


def walks(episodes: int, steps: int, seed: int = 0) -> OfflineDataset:
    """Random walks in the three states, each cut by a time limit."""
    rng = np.random.default_rng(seed)
    state = rng.integers(3, size=episodes)
    rows = []
    for _ in range(steps):
        action = rng.integers(2, size=episodes)
        after = TRANSITIONS[state, action]
        rows.append((state, action, REWARDS[state, action], after))
        state = after
    states, actions, rewards, successors = (
        np.stack(column, 1).reshape(-1) for column in zip(*rows, strict=True)
    )
    last = np.arange(episodes * steps) % steps == steps - 1
    return OfflineDataset(
        observations=one_hot(states),
        actions=actions.astype(np.int64),
        rewards=rewards.astype(np.float32),
        next_observations=one_hot(successors),
        terminations=np.zeros(len(last), bool),
        truncations=last,
        learner_units=True,
    )


def rounds(*, terminated: bool, episodes: int = 8) -> OfflineDataset:
    """Episodes 0 -> 1 -> 2 -> 0 with reward 1 a step; the last step ends them or is a limit."""
    states = np.tile(np.arange(3), episodes)
    last = states == 2
    return OfflineDataset(
        observations=one_hot(states),
        actions=np.zeros(len(states), np.int64),
        rewards=np.ones(len(states), np.float32),
        next_observations=one_hot((states + 1) % 3),
        terminations=last & terminated,
        truncations=last & (not terminated),
        learner_units=True,
    )


def noisy(episodes: int, seed: int = 0) -> OfflineDataset:
    """One state; each episode of 4 steps has its own reward, normal around 1."""
    reward = np.random.default_rng(seed).normal(1.0, 1.0, episodes)
    last = np.arange(4 * episodes) % 4 == 3
    return OfflineDataset(
        observations=np.ones((4 * episodes, 1), np.float32),
        actions=np.zeros(4 * episodes, np.int64),
        rewards=np.repeat(reward, 4).astype(np.float32),
        next_observations=np.ones((4 * episodes, 1), np.float32),
        terminations=np.zeros(4 * episodes, bool),
        truncations=last,
        learner_units=True,
    )


def test_estimate_is_the_closed_form_value_of_another_policy_than_the_data_s() -> None:
    data = walks(60, 10)
    fit = fit_members(data, plan_policy, 2, QUICK)
    starts = data.observations[data.episode_starts].argmax(-1)
    expected = plan_value()[starts].mean()
    behaviour = data.returns_to_go(GAMMA)[data.episode_starts].mean()
    assert abs(expected - behaviour) > 2, "the data's own value would not pass"
    assert fit.start_values.mean() == pytest.approx(expected, abs=0.3)


@pytest.mark.matrix
@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.99, 0.999, 0.9999])
def test_a_long_horizon_needs_no_more_updates_than_a_short_one(gamma: float) -> None:
    """Reward 1 forever is worth 1 / (1 - gamma); a plan in three states, what it solves to."""
    config = FQEConfig(**dict(QUICK) | {"gamma": gamma})
    forever = fit_members(rounds(terminated=False), any_action, 1, config)
    np.testing.assert_allclose(forever.start_values, 1 / (1 - gamma), rtol=0.01)
    data = walks(60, 10)
    fit = fit_members(data, plan_policy, 2, config)
    starts = data.observations[data.episode_starts].argmax(-1)
    expected = plan_value(gamma)[starts].mean()
    assert fit.start_values.mean() == pytest.approx(expected, rel=0.05, abs=0.2)


def test_terminations_shorten_a_long_horizon() -> None:
    """Reward 1 a step, and an end in one of three: worth 3 where gamma hardly counts."""
    config = FQEConfig(**dict(QUICK) | {"gamma": 0.999})
    fit = fit_members(rounds(terminated=True), any_action, 1, config)
    np.testing.assert_allclose(fit.start_values, 1 + 0.999 + 0.999**2, rtol=0.03)


def test_level_makes_the_weighted_mean_residual_vanish() -> None:
    rng = np.random.default_rng(0)
    residual, weight = torch.from_numpy(rng.normal(size=(2, 2, 30)).astype(np.float64))
    weight = weight.abs()
    discount = torch.from_numpy(np.where(np.arange(30) % 7, 0.99, 0.0))
    change = level(residual, discount, weight)
    assert change.shape == (2, 1)
    after = (weight * (residual - (1 - discount) * change)).sum(1)
    torch.testing.assert_close(after, torch.zeros(2, dtype=torch.float64))


def test_gradient_steps_grow_with_the_horizon_within_limits_unless_given() -> None:
    steps = {g: FQEConfig(gamma=g).gradient_steps for g in (0.0, 0.9, 0.99, 0.995, 0.999, 0.99999)}
    assert list(steps.values()) == [10_000, 10_000, 10_000, 20_000, 30_000, 30_000]
    assert FQEConfig(gamma=0.999, updates=7).gradient_steps == 7


def test_estimate_of_a_continuous_policy_is_that_of_the_linear_system() -> None:
    """x' = 0.9 x + 0.5 u, r = -x^2, u = -k x: V(x) = -x^2 / (1 - gamma (0.9 - 0.5 k)^2)."""
    rng, gain = np.random.default_rng(0), 0.6
    x, rows = rng.uniform(-1, 1, 200), []
    for _ in range(5):
        u = rng.uniform(-1, 1, 200)
        rows.append((x, u, -(x**2), 0.9 * x + 0.5 * u))
        x = rows[-1][3]
    obs, action, reward, after = (
        np.stack(column, 1).reshape(-1, 1).astype(np.float32) for column in zip(*rows, strict=True)
    )
    last = np.arange(len(obs)) % 5 == 4
    data = OfflineDataset(
        observations=obs,
        actions=action,
        rewards=reward[:, 0],
        next_observations=after,
        terminations=np.zeros(len(obs), bool),
        truncations=last,
        learner_units=True,
    )
    config = FQEConfig(**dict(QUICK) | {"hidden_sizes": (32, 32), "batch_size": 256})
    fit = fit_members(data, lambda o: torch.from_numpy(-gain * o).unsqueeze(1), 1, config)
    starts = obs[data.episode_starts]
    expected = (-(starts**2) / (1 - GAMMA * (0.9 - 0.5 * gain) ** 2)).mean()
    assert fit.start_values.mean() == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(
    ("terminated", "expected"),
    [(True, 1 + GAMMA + GAMMA**2), (False, 1 / (1 - GAMMA))],
    ids=["terminated", "truncated"],
)
def test_a_termination_ends_the_sum_and_a_truncation_does_not(
    terminated: bool, expected: float
) -> None:
    fit = fit_members(rounds(terminated=terminated), any_action, 1, QUICK)
    assert fit.start_values == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("terminated", [True, False])
def test_a_factor_on_rewards_is_a_factor_on_the_estimate(terminated: bool) -> None:
    data = rounds(terminated=terminated)
    config = FQEConfig(**dict(QUICK) | {"updates": 50})
    plain = fit_members(data, any_action, 1, config)
    scaled = fit_members(data.scaled(1000.0), any_action, 1, config)
    assert scaled.start_values == pytest.approx(1000 * plain.start_values, rel=1e-4)
    assert scaled.soft_scores == pytest.approx(1000 * plain.soft_scores, rel=1e-3, abs=1e-3)


def test_value_units_turn_the_equation_of_q_into_one_of_the_outputs() -> None:
    units = ValueUnits(centre=-7.0, scale=3.0)
    reward, discount, after = torch.tensor([2.0, -1.0]), torch.tensor([0.9, 0.0]), torch.tensor(0.5)
    output = units.reward(reward, discount) + discount * after
    q = reward + discount * units.value(after)
    torch.testing.assert_close(units.value(output), q)


@pytest.mark.parametrize("constant", [0.0, -3.0])
def test_constant_returns_have_a_scale_too(constant: float) -> None:
    units = ValueUnits.of(torch.full((5,), constant))
    assert units == ValueUnits(constant, abs(constant) or 1.0)


def test_loss_is_the_square_of_the_bellman_error() -> None:
    learner = FQE(2, 1, QUICK, seeds=(0, 1))
    generator = torch.Generator().manual_seed(0)
    obs, after = (torch.randn(2, 5, 2, generator=generator) for _ in range(2))
    action, chosen = (torch.randn(2, 5, 1, generator=generator) for _ in range(2))
    discount = torch.tensor([0.0, 0.9, 0.9, 0.9, 0.9]).expand(2, 5)
    batch = TransitionBatch(
        obs=obs, action=action, reward=obs[..., 0], next_obs=after, discount=discount
    )
    target = batch.reward + discount * learner.estimate(after, chosen)
    error = learner.q_values(learner.network, obs, action) - target
    loss = fqe_loss(learner, batch, chosen)
    torch.testing.assert_close(loss, error.square().mean(1))
    before = learner.estimate(after, chosen)
    learner.update(batch, chosen, 0.0)
    assert (fqe_loss(learner, batch, chosen) < loss).all()
    assert not torch.equal(learner.estimate(after, chosen), before), "the target follows"


def interval(fit: Fit) -> tuple[float, float]:
    low, high = np.quantile(fit.start_values, (0.025, 0.975))
    return float(low), float(high)


def test_interval_covers_the_truth_and_shrinks_with_the_root_of_the_episodes() -> None:
    config = FQEConfig(**dict(QUICK) | {"gamma": 0.5, "members": 40, "updates": 150})
    widths = []
    for episodes in (24, 384):
        low, high = interval(fit_members(noisy(episodes), any_action, 1, config))
        assert low < 1 / (1 - 0.5) < high
        widths.append(high - low)
    assert 2.5 < widths[0] / widths[1] < 6.5, "sixteen times the episodes, a quarter of the width"


def test_each_member_starts_where_its_own_episodes_do() -> None:
    """Each episode stays in one state with a reward of its own; gamma 0 leaves that reward."""
    states, reward = np.repeat(np.arange(3), 4), np.array([0.0, 10.0, -20.0])
    data = replace(
        rounds(terminated=False, episodes=4),
        observations=one_hot(states),
        next_observations=one_hot(states),
        rewards=reward[states].astype(np.float32),
        truncations=np.arange(12) % 4 == 3,
    )
    config = FQEConfig(**dict(QUICK) | {"gamma": 0.0})
    drawn = EpisodeBootstrap(data, seeds=member_seeds(config), gamma=0.0).episodes.numpy()
    fit = fit_members(data, any_action, 1, config)
    assert fit.start_values == pytest.approx(reward[drawn].mean(1), abs=0.5)


def test_members_are_the_same_alone_and_in_a_group() -> None:
    data, config = walks(12, 6), FQEConfig(**dict(QUICK) | {"updates": 30})
    seeds = member_seeds(config)

    def two_actions(observations: Array) -> Tensor:
        return torch.stack([plan_policy(observations)[:, 0], any_action(observations)[:, 0]], 1)

    group = fit_members(data, two_actions, 2, config)
    assert len(set(group.start_values.tolist())) == config.members, "members differ"
    for place, seed in enumerate(seeds):
        alone = fit_members(data, two_actions, 2, config, seeds=(seed,))
        assert alone.start_values[0] == pytest.approx(group.start_values[place], rel=1e-4)
        assert alone.soft_scores[0] == pytest.approx(group.soft_scores[place], rel=1e-3)


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    data, config = walks(12, 6), FQEConfig(**dict(QUICK) | {"updates": 20})
    first, again = (fit_members(data, plan_policy, 2, config) for _ in range(2))
    other = fit_members(data, plan_policy, 2, FQEConfig(**dict(config) | {"seed": 1}))
    assert first.start_values.tolist() == again.start_values.tolist()
    assert first.start_values.tolist() != other.start_values.tolist()


def test_several_actions_of_a_state_count_by_their_shares() -> None:
    """Two of four drawn actions are 1: the value is that of the policy with even chances."""

    def even(observations: Array) -> Tensor:
        return torch.tensor([0, 1, 1, 0]).expand(len(observations), 4)

    data = walks(60, 10)
    moves = np.eye(3)[TRANSITIONS].mean(1)
    value = np.linalg.solve(np.eye(3) - GAMMA * moves, REWARDS.mean(1))
    expected = value[data.observations[data.episode_starts].argmax(-1)].mean()
    fit = fit_members(data, even, 2, QUICK)
    assert fit.start_values.mean() == pytest.approx(expected, abs=0.3)


def test_bootstrap_draws_only_rows_of_the_member_s_episodes_in_proportion() -> None:
    data = walks(6, 4)
    lengths = np.array([1, 3, 5, 7, 2, 6])
    ends = np.zeros(24, bool)
    ends[np.cumsum(lengths) - 1] = True
    data = replace(data, truncations=ends, parts=())
    buffer = EpisodeBootstrap(data, seeds=(0, 1, 2), gamma=0.9)
    index = buffer.sample(20_000).index
    assert index is not None
    episode_of = np.repeat(np.arange(6), lengths)
    for member in range(3):
        drawn = buffer.episodes[member].numpy()
        assert len(set(drawn.tolist())) < 6, "with replacement"
        times = np.bincount(drawn, minlength=6)
        expected = times[episode_of] / (times * lengths).sum()
        found = np.bincount(index[member].numpy(), minlength=24) / 20_000
        assert found == pytest.approx(expected, abs=0.012)
        assert not found[expected == 0].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.0}, "gamma must be < 1"),
        ({"gamma": -0.1}, "gamma must be >= 0"),
        ({"members": 1}, "members must be >= 2"),
        ({"members": 10**9}, "members must be <= 10000"),
        ({"updates": 0}, "updates must be >= 1"),
        ({"tau": 0.0}, "tau must be > 0"),
        ({"hidden": (8,)}, "hidden is not a field of FQEConfig"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FQEConfig(**settings)

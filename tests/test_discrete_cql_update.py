"""Discrete CQL: the penalty against NumPy and closed forms, and the limits it must reach."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.algorithms.discrete_cql import DiscreteCQL, discrete_cql_loss
from rl_training.algorithms.dqn import DQN
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.rng import Rng

OBS, ACT, B = 2, 3, 8


def make_network(seeds: tuple[int, ...] = (0,), *, dueling: bool = False) -> MLPQNetwork:
    return MLPQNetwork(OBS, ACT, (16,), dueling=dueling, rng=Rng(seeds, "networks"))


def make_learner(seeds: tuple[int, ...] = (0,), **settings: Any) -> DiscreteCQL:
    network = make_network(seeds, dueling=settings.get("dueling", False))
    return DiscreteCQL(q_network=network, seeds=seeds, **settings)


def make_batch(seeds: tuple[int, ...] = (0,), key: str = "batch") -> TransitionBatch:
    rng = Rng(seeds, key)
    return TransitionBatch(
        obs=rng.normal(B, OBS),
        action=rng.integers(ACT, B),
        reward=rng.normal(B),
        next_obs=rng.normal(B, OBS),
        discount=torch.full((len(seeds), B), 0.9),
    )


def some_q(scale: float = 3.0) -> tuple[Tensor, Tensor]:
    rng = Rng((4, 5), "q")
    return rng.normal(B, ACT) * scale, rng.integers(ACT, B)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_penalty_is_the_log_sum_exp_minus_q_of_the_data(temperature: float) -> None:
    q, action = some_q()
    ours = make_learner(cql_temperature=temperature).penalty(q, action)
    for seed in range(2):
        for row in range(B):
            values = q[seed, row].numpy().astype(np.float64)
            pushed_down = temperature * np.log(np.exp(values / temperature).sum())
            expected = pushed_down - values[int(action[seed, row])]
            assert ours[seed, row].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_uniform_q_is_charged_the_logarithm_of_the_number_of_actions(temperature: float) -> None:
    learner = make_learner(cql_temperature=temperature)
    gap = learner.penalty(torch.full((1, B, ACT), 7.0), make_batch().action)
    torch.testing.assert_close(gap, torch.full((1, B), temperature * math.log(ACT)))


def test_a_vanishing_temperature_pushes_down_the_largest_q_alone() -> None:
    q, action = some_q()
    gap = make_learner(cql_temperature=1e-4).penalty(q, action)
    data = q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(gap, q.amax(-1) - data, rtol=1e-3, atol=1e-3)


def test_its_gradient_is_the_softmax_minus_the_data_action() -> None:
    q, action = some_q(1.0)
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(make_learner().penalty(q, action).sum(), q)
    expected = q.softmax(-1) - torch.nn.functional.one_hot(action, ACT)
    torch.testing.assert_close(gradient, expected.detach())


@pytest.mark.parametrize("settings", [{}, {"double": False}, {"dueling": True}])
def test_without_the_penalty_updates_are_those_of_double_dqn(settings: dict[str, Any]) -> None:
    settings |= {"target_update_interval": 2}
    ours = make_learner(cql_alpha=1e-30, **settings)
    theirs = DQN(q_network=make_network(dueling=settings.get("dueling", False)), **settings)
    for update in range(5):
        batch = make_batch(key=f"batch{update}")
        ours.update(batch)
        theirs.update(batch)
    for a, b in zip(ours.q_network.parameters(), theirs.q_network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_loss_is_the_td_loss_plus_the_weighted_mean_of_the_penalty() -> None:
    learner, batch = make_learner(cql_alpha=2.5), make_batch()
    metrics = discrete_cql_loss(learner, batch)
    plain = DQN(q_network=make_network()).td_loss(batch)[0]
    torch.testing.assert_close(metrics["td_loss"], plain.detach())
    expected = metrics["td_loss"] + 2.5 * metrics["cql_penalty"].mean(1)
    torch.testing.assert_close(metrics["loss"].detach(), expected)


def test_updates_raise_the_data_action_above_the_others() -> None:
    batch = replace(make_batch(), action=torch.ones(1, B, dtype=torch.int64))
    margins = []
    for weight in (1e-6, 5.0):
        learner = make_learner(cql_alpha=weight, learning_rate=1e-2)
        for _ in range(60):
            learner.update(batch)
        q = learner.q_values(batch.obs).detach()
        margins.append((q[..., 1] - torch.maximum(q[..., 0], q[..., 2])).mean().item())
    assert margins[1] > margins[0] + 1.0
    assert torch.equal(learner.act(batch.obs), batch.action)


def test_acting_is_greedy_and_exploring_draws_the_given_share_at_random() -> None:
    learner = make_learner(exploration=0.3)
    obs = make_batch().obs[:, :1].expand(-1, 20_000, -1)
    best = learner.q_values(obs).argmax(-1)
    assert torch.equal(learner.act(obs), best)
    others = (learner.act(obs, explore=True) != best).double().mean()
    assert abs(float(others) - 0.3 * 2 / 3) < 0.01  # a random one of three is the best at times
    still = make_learner(exploration=0.0)
    assert torch.equal(still.act(obs, explore=True), still.act(obs))


def test_standardised_observations_are_used_everywhere() -> None:
    ours, plain = make_learner(normalize_observations=True), make_learner()
    ours.obs_norm.mean.fill_(2.0)
    ours.obs_norm.variance.fill_(4.0)
    batch = make_batch()
    moved = replace(batch, obs=batch.obs * 2 + 2, next_obs=batch.next_obs * 2 + 2)
    metrics = discrete_cql_loss(ours, moved)
    for name, value in discrete_cql_loss(plain, batch).items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-4, atol=1e-5)
    ours.update(moved)
    plain.update(batch)
    for a, b in zip(ours.q_network.parameters(), plain.q_network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert torch.equal(ours.act(moved.obs), plain.act(batch.obs))


def test_stacked_seeds_equal_single_learners() -> None:
    seeds = (3, 8)
    group = make_learner(seeds, target_update_interval=2)
    singles = [make_learner((seed,), target_update_interval=2) for seed in seeds]
    for _ in range(4):
        group.update(make_batch(seeds))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_batch((seed,)))
    for index, single in enumerate(singles):
        pairs = zip(group.q_network.parameters(), single.q_network.parameters(), strict=True)
        for stacked, alone in pairs:
            torch.testing.assert_close(stacked[index], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["cql_alpha", "cql_temperature"])
def test_weights_and_temperatures_must_be_positive(key: str) -> None:
    settings: dict[str, Any] = {key: 0.0}
    with pytest.raises(ConfigError, match=f"{key} must be > 0"):
        make_learner((0,), **settings)

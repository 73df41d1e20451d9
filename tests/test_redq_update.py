"""REDQ's update: random pairs of target critics, rounds, and its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers.settings import settings_of
from helpers.updates import ACT, OBS, make_batch, parameters_of, same
from rl_training.algorithms.redq import REDQ, REDQConfig
from rl_training.algorithms.sac import SAC
from rl_training.errors import ConfigError
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng


def make(kind: type[SAC], seeds: tuple[int, ...] = (0,), **keywords: Any) -> Any:
    critics = keywords.get("num_critics", 10 if kind is REDQ else 2)
    model = MLPSACModel(OBS, ACT, (16,), num_critics=critics, rng=Rng(seeds, "networks"))
    return kind(model=model, seeds=seeds, **keywords)


@torch.no_grad()
def test_the_target_is_the_least_of_a_drawn_pair_plus_the_entropy() -> None:
    seeds = (0, 4)
    learner, twin = (make(REDQ, seeds, num_critics=6, alpha=0.3) for _ in range(2))
    batch = make_batch(seeds)
    target, _ = learner.td_target(batch)
    action, log_prob = twin.sample_action(batch.next_obs)
    q = twin.model.q_values(batch.next_obs, action, twin.target_critic).numpy()
    pairs = twin.rng.permutation(6)[:, :2].numpy()
    least = np.stack([q[seed, pairs[seed]].min(0) for seed in range(2)])
    expected = batch.reward.numpy() + 0.9 * (least - 0.3 * log_prob.numpy())
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_two_of_two_critics_are_clipped_double_q() -> None:
    redq, sac = make(REDQ, num_critics=2), make(SAC)
    for key in range(3):
        batch = make_batch(key=str(key))
        assert torch.equal(redq.td_target(batch)[0], sac.td_target(batch)[0])


def test_with_the_settings_of_sac_it_is_sac_bit_for_bit() -> None:
    redq = make(REDQ, num_critics=2, gradient_updates_per_step=1, actor_q="min")
    sac = make(SAC)
    for key in range(4):
        batch = make_batch(key=str(key))
        assert dict(redq.update(batch).metrics) == dict(sac.update(batch).metrics)
    assert same(parameters_of(redq.model), parameters_of(sac.model))
    assert torch.equal(redq.log_alpha, sac.log_alpha)


def test_critics_move_at_every_update_and_the_actor_at_the_end_of_a_round() -> None:
    learner = make(REDQ, num_critics=3, gradient_updates_per_step=4)
    moved = []
    for count in range(9):
        actor, critic = parameters_of(learner.model.actor), parameters_of(learner.model.critic)
        learner.update(make_batch(key=str(count)))
        assert not same(critic, parameters_of(learner.model.critic))
        if not same(actor, parameters_of(learner.model.actor)):
            moved.append(count)
    assert moved == [3, 7]


def test_an_update_has_two_kinds_whatever_the_round() -> None:
    learner = make(REDQ, gradient_updates_per_step=20)
    phases = []
    for count in range(60):
        learner.num_updates.value = count
        phases.append(learner.phase())
    assert phases == ([1] * 19 + [0]) * 3


def test_every_critic_learns_though_two_are_the_target() -> None:
    learner = make(REDQ)
    before = parameters_of(learner.model.critic)
    learner.update(make_batch())
    for old, new in zip(before, learner.model.critic.parameters(), strict=True):
        changed = (old != new).flatten(2).any(-1)  # [S, N]
        assert changed.all()


def test_defaults_are_those_of_the_authors() -> None:
    config: Any = settings_of(REDQ)
    assert (config.num_critics, config.num_target_critics, config.actor_q) == (10, 2, "mean")
    assert (config.gradient_updates_per_step, config.learning_starts) == (20, 5000)
    assert (config.learning_rate, config.tau, config.batch_size) == (3e-4, 0.005, 256)
    assert (config.hidden_sizes, config.weight_init) == ((256, 256), "glorot")


def test_more_target_critics_than_critics_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"num_target_critics must be <= num_critics \(10\), got 11"
    ):
        REDQConfig(num_target_critics=11)

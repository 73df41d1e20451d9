"""MBPO: schedule of the horizon, times of fits and refreshes, settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.imagining import ACTION, OBS, make_learner, rollout
from rl_training.algorithms.dynamics.imagination import Times
from rl_training.algorithms.mbpo import MBPO, MBPOConfig, mbpo_model_loss
from rl_training.errors import ConfigError


@pytest.mark.parametrize(
    ("step", "horizon"),
    [(0, 1), (20_000, 1), (29_285, 1), (29_286, 2), (85_000, 8), (150_000, 15), (400_000, 15)],
)
def test_the_horizon_follows_the_papers_schedule_for_hopper(step: int, horizon: int) -> None:
    config = MBPOConfig(rollout_schedule=(20_000, 150_000, 1, 15))
    assert config.horizon(step) == horizon
    assert config.largest_horizon == 15


def test_the_buffer_is_sized_by_the_horizon_and_allocated_for_the_longest() -> None:
    config = MBPOConfig(rollout_schedule=(0, 100, 1, 3), rollout_batch_size=10, rollouts_kept=4)
    assert config.synthetic_capacity == 120
    assert [config.kept_at(step) for step in (0, 49, 50, 100)] == [40, 40, 80, 120]


def test_fits_fall_on_fixed_steps() -> None:
    times = MBPOConfig(learning_starts=600, model_train_frequency=250).fit_times
    done = [times.due(step) for step in (599, 600, 749, 750, 1000)]
    assert done == [0, 1, 1, 2, 3]
    assert [times.next_after(step) for step in (0, 600, 749, 750)] == [600, 750, 750, 1000]


def test_what_happens_once_happens_once() -> None:
    times = Times(0, None)
    assert [times.due(step) for step in (0, 1, 10**6)] == [1, 1, 1]
    assert times.next_after(0) is None


def test_roll_outs_follow_fits_unless_told_otherwise() -> None:
    config = MBPOConfig(learning_starts=500, model_train_frequency=250)
    assert config.refresh_times == config.fit_times
    other = MBPOConfig(learning_starts=500, rollout_refresh_interval=100)
    assert other.refresh_times == Times(500, 100)


def test_the_reward_of_the_model_is_taken_as_it_is() -> None:
    learner = make_learner(MBPO)
    made = rollout([True] * 3, penalty=torch.ones(1, 3))
    assert torch.equal(learner.imagination.worth(made), made.reward)


def test_the_loss_of_the_model_has_its_name() -> None:
    learner = make_learner(MBPO)
    found = mbpo_model_loss(learner.dynamics_model, torch.zeros(1, 1, 4, 2 * OBS + ACTION + 2))
    assert set(found) == {
        *("mbpo_model_loss", "reward_mae", "delta_obs_mae", "ensemble_disagreement")
    }


def test_a_fixed_number_of_gradient_steps_is_taken_to_the_step() -> None:
    learner = make_learner(MBPO, model_updates=13)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 100, 2 * OBS + ACTION + 2, generator=generator)
    taken: list[int] = []

    def step(rows: Tensor, active: Tensor | None) -> dict[str, Tensor]:
        taken.append(1)
        return learner.imagination.trainer.step(rows, active)

    learner.imagination.trainer.run_step = step
    for _ in range(2):
        found = learner.imagination.fit(rows)
    assert len(taken) == 26  # 5 per epoch, so that the third epoch is cut short
    assert found["epochs"].tolist() == [3]
    assert torch.equal(learner.imagination.latest_loss, found["mbpo_model_loss"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_schedule": [100, 100, 1, 5]}, r"must have step0 < step1, got \[100, 100"),
        ({"learning_starts": 4}, r"4 rows x model_holdout_ratio 0.2 is less than 1"),
        ({"rollout_schedule": [0, 10, 0, 5]}, "rollout_schedule"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MBPOConfig(**settings)

"""Offline datasets: episodes, returns, rewards, statistics, parts, learner units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.datasets import SWITCH, TOY, columns_of, rebuilt, tiny_columns, toy_data
from rl_training.data.datasets.blocks import Part
from rl_training.data.datasets.dataset import OfflineDataset, concatenate
from rl_training.data.datasets.random import random_dataset
from rl_training.errors import DataError


def tiny(**changes: Any) -> OfflineDataset:
    return rebuilt(tiny_columns(), **changes)


def test_episodes_end_at_terminations_and_at_truncations() -> None:
    data = tiny()
    assert (len(data), data.num_episodes) == (5, 2)
    assert data.ends.tolist() == [False, False, True, False, True]
    assert data.episode_starts.tolist() == [0, 3]
    assert data.episode_stops.tolist() == [3, 5]
    assert data.episode_lengths().tolist() == [3, 2]
    assert data.episode_returns().tolist() == [6.0, 9.0]


def test_returns_to_go_are_discounted_and_stop_at_both_ends() -> None:
    # 1 + 2/2 + 3/4, 2 + 3/2, 3 | 4 + 5/2, 5
    assert tiny().returns_to_go(0.5).tolist() == [2.75, 3.5, 3.0, 6.5, 5.0]


def test_returns_to_go_agree_with_a_plain_loop() -> None:
    data = toy_data(300)
    expected = np.zeros(len(data))
    following = 0.0
    for row in reversed(range(len(data))):
        following = float(data.rewards[row]) + (0.0 if data.ends[row] else 0.9 * following)
        expected[row] = following
    assert np.allclose(data.returns_to_go(0.9), expected, atol=1e-5)


def test_an_unfinished_last_episode_is_marked_truncated_with_a_note() -> None:
    data = tiny(terminations=np.zeros(5, bool))
    assert data.truncations.tolist() == [False, False, True, False, True]
    assert not data.terminations.any()
    assert data.notes == ("the last episode has no end and was marked truncated",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.zeros(4, np.float32)}, "observations has 5 rows, but rewards has 4"),
        ({"rewards": np.zeros(5)}, "rewards must be float32, got float64"),
        ({"actions": np.zeros(5, np.float32)}, r"actions must have 2 axes, got shape \(5,\)"),
        ({"actions": np.zeros((5, 1, 1), np.int64)}, "actions must have 2 axes"),
        ({"terminations": np.zeros(5)}, "terminations must be bool"),
        ({"next_observations": np.zeros((5, 2), np.float32)}, r"have \(5, 1\)"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        tiny(**changes)


def test_an_empty_dataset_is_refused() -> None:
    empty = {name: column[:0] for name, column in tiny_columns().items()}
    with pytest.raises(DataError, match="no transitions"):
        rebuilt(empty)


def test_a_slice_cuts_its_last_episode() -> None:
    data = tiny().slice(1, 4)
    assert data.rewards.tolist() == [2.0, 3.0, 4.0]
    assert data.truncations.tolist() == [False, True, True]
    assert data.parts == (Part(start=0, stop=3, name="dataset"),)
    with pytest.raises(DataError, match="rows 2 to 9 cannot be taken out of 5"):
        tiny().slice(2, 9)


def test_rewards_are_scaled_then_shifted() -> None:
    assert tiny().scaled(2.0, -1.0).rewards.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert tiny().scaled().rewards.tolist() == tiny().rewards.tolist()


def test_normalized_rewards_have_a_return_range_of_a_thousand() -> None:
    data = toy_data().with_normalized_rewards()
    returns = data.episode_returns()
    assert returns.max() - returns.min() == pytest.approx(1000.0, rel=1e-4)
    assert "multiplied by" in data.notes[-1]


def test_rewards_of_equal_returns_cannot_be_normalized() -> None:
    with pytest.raises(DataError, match="needs episodes of different returns, but all 2 have 3"):
        tiny(rewards=np.array([1, 1, 1, 1, 2], np.float32)).with_normalized_rewards()


def test_statistics_of_observations_are_those_of_numpy() -> None:
    data = toy_data(700)
    mean, std = data.observation_statistics()
    assert np.allclose(mean, data.observations.mean(0), atol=1e-5)
    assert np.allclose(std, data.observations.std(0), atol=1e-5)


def test_statistics_of_large_numbers_keep_their_small_differences() -> None:
    offset = np.float32(10_000)
    data = toy_data(700)
    moved = replace(data, observations=data.observations + offset)
    assert np.allclose(moved.observation_statistics()[1], data.observations.std(0), rtol=1e-2)


def test_statistics_count_parts_by_weight() -> None:
    left = rebuilt(tiny_columns(), observations=np.zeros((5, 1), np.float32))
    right = rebuilt(tiny_columns(), observations=np.ones((5, 1), np.float32))
    mean, std = concatenate([left, right], [1.0, 3.0]).observation_statistics()
    assert mean.tolist() == [0.75]
    assert std[0] == pytest.approx(0.75**0.5 * 0.5)


def test_joined_datasets_keep_their_ranges_weights_and_notes() -> None:
    left = replace(tiny(), name="a", notes=("first",))
    mix = concatenate([left, replace(tiny(), name="b")], [1.0, 4.0])
    assert mix.parts == (
        Part(start=0, stop=5, weight=1.0, name="a"),
        Part(start=5, stop=10, weight=4.0, name="b"),
    )
    assert mix.num_episodes == 4
    assert mix.notes == ("a: first",)
    assert [part.weight for part in concatenate([tiny(), tiny().slice(0, 3)]).parts] == [5.0, 3.0]


def test_data_of_different_tasks_is_not_joined() -> None:
    with pytest.raises(DataError, match="only data of one task can be mixed"):
        concatenate([toy_data(), toy_data(task=SWITCH)])


def test_the_digest_depends_on_every_column_and_on_weights() -> None:
    data = toy_data()
    digests = {data.digest(), concatenate([data], [2.0]).digest()}
    for name, column in columns_of(data).items():
        column.reshape(-1)[-2] += 1 if column.dtype != bool else True
        changed = rebuilt(columns_of(data) | {name: column})
        digests.add(changed.digest())
    assert len(digests) == 8
    assert toy_data().digest() == data.digest()


# Learner units


def test_continuous_actions_are_mapped_from_their_box() -> None:
    columns = columns_of(toy_data(20))
    columns["actions"][:3] = [[-2.0, -1.0], [2.0, 3.0], [0.0, 2.0]]
    mapped = rebuilt(columns).in_learner_units(TOY)
    assert mapped.actions[:3].tolist() == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.5]]
    assert mapped.learner_units
    assert mapped.in_learner_units(TOY) is mapped, "a second time changes nothing"


def test_an_action_outside_the_box_is_named_or_clipped() -> None:
    columns = columns_of(toy_data(20))
    columns["actions"][7] = [0.0, 3.5]
    data = rebuilt(columns, name="file.npz")
    with pytest.raises(DataError, match=r"file.npz: row 7: action \[0\.  3\.5\] is not in \[-2, 2"):
        data.in_learner_units(TOY)
    clipped = data.in_learner_units(TOY, clip=True)
    assert clipped.actions[7].tolist() == [0.0, 1.0]
    assert (
        "1 of 20 actions lie outside Toy-v0's box [-2, 2] x [-1, 3] and were" in clipped.notes[-1]
    )


def test_rounding_does_not_put_an_action_outside_the_box() -> None:
    columns = columns_of(toy_data(20))
    columns["actions"][3] = [2.0001, -1.0001]
    assert rebuilt(columns).in_learner_units(TOY).actions[3].tolist() == [1.0, -1.0]


def test_discrete_actions_begin_at_zero_and_are_checked() -> None:
    data = toy_data(60, task=SWITCH)
    assert sorted(set(data.actions.tolist())) == [1, 2, 3]
    assert sorted(set(data.in_learner_units(SWITCH).actions.tolist())) == [0, 1, 2]
    columns = columns_of(data)
    columns["actions"][4] = 4
    for clip in (False, True):
        with pytest.raises(DataError, match="row 4: action 4 is not in 1 to 3"):
            rebuilt(columns).in_learner_units(SWITCH, clip=clip)


def test_shapes_and_kinds_are_checked_against_the_task() -> None:
    with pytest.raises(DataError, match=r"observations have shape \(4,\), but Toy-v0 gives \(3,\)"):
        toy_data(task=SWITCH).in_learner_units(TOY)
    other = SWITCH.model_copy(update={"obs_shape": (3,)})
    with pytest.raises(DataError, match=r"whole numbers .* takes continuous"):
        toy_data(task=other).in_learner_units(TOY)
    wide = TOY.model_copy(update={"action_shape": (5,)})
    with pytest.raises(DataError, match="actions have 2 entries, but Toy-v0 takes 5"):
        toy_data().in_learner_units(wide)


# The random recipe


@pytest.mark.parametrize("task", [TOY, SWITCH], ids=["continuous", "discrete"])
def test_random_data_is_a_function_of_size_and_seed(task: Any) -> None:
    data = random_dataset(task, 500, 3)
    assert len(data) == 500
    assert data.digest() == random_dataset(task, 500, 3).digest()
    assert data.digest() != random_dataset(task, 500, 4).digest()
    assert "made up at random" in data.notes[0]


def test_random_data_has_both_ends_and_unbroken_chains() -> None:
    data = toy_data(1000)
    assert data.terminations.any()
    assert data.truncations.any()
    inside = ~data.ends[:-1]
    assert np.array_equal(data.next_observations[:-1][inside], data.observations[1:][inside])
    assert data.episode_lengths().max() == 50


def test_random_images_are_bytes() -> None:
    task = TOY.model_copy(update={"obs_shape": (2, 4, 4), "obs_dtype": "uint8"})
    data = random_dataset(task, 30, 0)
    assert data.observations.dtype == np.uint8
    assert data.observations.shape == (30, 2, 4, 4)
    assert data.in_learner_units(task).learner_units


def test_nbytes_counts_every_column(tmp_path: Path) -> None:
    assert tiny().nbytes == 5 * (4 + 4 + 4 + 4 + 1 + 1)

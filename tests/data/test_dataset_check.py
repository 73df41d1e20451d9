"""The checker finds each fault that is planted, where it is, and none where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.datasets import REAL_DATA, SWITCH, TOY, columns_of, rebuilt, toy_data
from rl_training.data import load_transition_dataset
from rl_training.data.datasets.check import Finding, check_dataset
from rl_training.data.datasets.dataset import OfflineDataset, concatenate
from rl_training.data.datasets.rewards import off_scale, reward_scales
from rl_training.envs import probe_env


def found(data: OfflineDataset, check: str, task: Any = None) -> Finding:
    """The one finding of a check; everything else must be quiet about it."""
    (finding,) = [finding for finding in check_dataset(data, task) if finding.check == check]
    assert finding.message
    assert finding.advice
    return finding


def names(data: OfflineDataset, task: Any = None) -> set[str]:
    return {finding.check for finding in check_dataset(data, task)}


@pytest.mark.parametrize("task", [TOY, SWITCH], ids=["continuous", "discrete"])
def test_whole_data_is_clean(task: Any) -> None:
    assert check_dataset(toy_data(2000, task=task), task) == []


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "next_observations"])
def test_nan_is_found(column: str) -> None:
    columns = columns_of(toy_data())
    columns[column][[5, 100]] = np.nan
    finding = found(rebuilt(columns), "not_finite")
    assert (finding.level, finding.rows, finding.count) == ("error", (5, 100), 2)
    assert column in finding.message


def test_infinities_everywhere_raise_no_warning() -> None:
    columns = columns_of(toy_data())
    columns["observations"][:] = np.inf
    columns["rewards"][:] = -np.inf
    assert {"not_finite"} <= names(rebuilt(columns))


def test_a_broken_chain_is_found() -> None:
    columns = columns_of(toy_data())
    row = 3
    columns["next_observations"][row] += 0.5
    finding = found(rebuilt(columns), "broken_chain")
    assert (finding.rows, finding.episodes) == ((row,), (0,))
    assert "mark these rows as truncated" in finding.advice


def test_shuffled_rows_are_told_from_a_missing_end() -> None:
    order = np.random.default_rng(0).permutation(400)
    shuffled = rebuilt({name: column[order] for name, column in columns_of(toy_data()).items()})
    assert "shuffled" in found(shuffled, "broken_chain").advice


def test_a_missing_end_is_found_as_a_broken_chain() -> None:
    data = toy_data()
    columns = columns_of(data)
    row = int(data.episode_stops[2]) - 1
    columns["terminations"][row] = columns["truncations"][row] = False
    assert found(rebuilt(columns), "broken_chain").rows == (row,)


def test_resets_in_place_of_successors_are_found() -> None:
    data = toy_data()
    columns = columns_of(data)
    rows = np.flatnonzero(data.truncations)[:-1]
    columns["next_observations"][rows] = columns["observations"][rows + 1]
    assert found(rebuilt(columns), "successor_is_reset").rows == tuple(rows.tolist())


def test_coming_back_to_the_only_start_is_no_fault() -> None:
    columns = columns_of(toy_data(2000))
    ends = np.flatnonzero(columns["truncations"])[:-1]
    starts = np.flatnonzero(columns["terminations"] | columns["truncations"])[:-1] + 1
    columns["observations"][starts] = 0.0
    columns["next_observations"][ends[:3]] = 0.0
    assert "successor_is_reset" not in names(rebuilt(columns))


def test_actions_outside_the_box_are_found_with_the_task_only() -> None:
    columns = columns_of(toy_data())
    columns["actions"][8] = [2.5, 0.0]
    assert found(rebuilt(columns), "outside_box", TOY).rows == (8,)
    assert "outside_box" not in names(rebuilt(columns))


def test_discrete_actions_out_of_range_are_found() -> None:
    columns = columns_of(toy_data(task=SWITCH))
    columns["actions"][8] = 0
    assert found(rebuilt(columns), "outside_box", SWITCH).rows == (8,)


def test_actions_that_were_scaled_already_are_suspected() -> None:
    columns = columns_of(toy_data(2000))
    columns["actions"] = np.random.default_rng(0).uniform(-1, 1, (2000, 2)).astype(np.float32)
    assert "scaled to [-1, 1] already" in found(rebuilt(columns), "unit_actions", TOY).advice


def test_saturated_and_constant_actions_are_noted() -> None:
    columns = columns_of(toy_data())
    columns["actions"][:300, 0] = 2.0
    columns["actions"][:, 1] = 0.5
    notes = [f for f in check_dataset(rebuilt(columns)) if f.check == "saturated"]
    assert [note.level for note in notes] == ["note", "note"]
    assert "entry 0 is at its border in 75% of rows" in notes[0].message
    assert "entry 1 never changes" in notes[1].message


def test_duplicated_episodes_are_found() -> None:
    data = toy_data()
    start, stop = int(data.episode_starts[1]), int(data.episode_stops[1])
    doubled = concatenate([data, data.slice(start, stop)])
    finding = found(doubled, "duplicates")
    assert finding.episodes == (data.num_episodes,)
    assert f"{data.num_episodes} = 1" in finding.message


@pytest.mark.parametrize("factor", [0.1, 10.0, 100.0])
def test_rewards_on_another_scale_are_found(factor: float) -> None:
    data = toy_data(2000)
    columns = columns_of(data)
    for episode in (3, 11):
        rows = slice(data.episode_starts[episode], data.episode_stops[episode])
        columns["rewards"][rows] *= factor
    finding = found(rebuilt(columns), "reward_scale")
    assert finding.episodes == (3, 11)
    assert reward_scales(rebuilt(columns))[3] == pytest.approx(factor, rel=0.5)


def test_a_source_on_another_scale_is_named() -> None:
    mix = concatenate([toy_data(1000), toy_data(400, seed=1).scaled(100.0)])
    named = concatenate([toy_data(1000), rebuilt(columns_of(mix.slice(1000, 1400)), name="b.npz")])
    assert "all in b.npz" in found(named, "reward_scale").message


def test_good_and_bad_episodes_are_on_one_scale() -> None:
    # Rewards are minus squares: episodes near the origin earn a hundredth of the others.
    columns = columns_of(toy_data(2000))
    shrink = np.repeat(np.random.default_rng(0).uniform(0.1, 1.0, 50), 40)[:, None]
    for name in ("observations", "next_observations"):
        columns[name] = (columns[name] * shrink).astype(np.float32)
    columns["rewards"] = -np.square(columns["next_observations"]).mean(1)
    columns["terminations"][:] = False
    columns["truncations"] = np.arange(1, 2001) % 40 == 0
    assert not len(off_scale(reward_scales(rebuilt(columns))))


def test_rewards_that_are_all_zero_are_found() -> None:
    columns = columns_of(toy_data())
    assert (
        "imitation"
        in found(rebuilt(columns | {"rewards": columns["rewards"] * 0}), "no_rewards").advice
    )


def with_timeouts_as_terminals() -> OfflineDataset:
    columns = columns_of(toy_data(2000))
    ends = columns["terminations"] | columns["truncations"]
    return rebuilt(columns, terminations=ends, truncations=np.zeros(2000, bool))


def test_timeouts_marked_as_terminals_are_found_by_their_length() -> None:
    finding = found(with_timeouts_as_terminals(), "timeouts_as_terminals")
    assert "exactly 50 steps" in finding.message
    assert finding.count >= 20


def test_timeouts_marked_as_terminals_are_found_by_the_limit_of_the_task() -> None:
    data = with_timeouts_as_terminals()
    finding = found(data, "timeouts_as_terminals", TOY)
    assert "time limit of Toy-v0" in finding.message
    longer = TOY.model_copy(update={"max_episode_steps": 1000})
    assert "timeouts_as_terminals" not in names(data, longer)


def test_a_single_episode_that_terminates_is_no_fault() -> None:
    data = toy_data()
    single = data.slice(0, int(data.episode_stops[0]))
    assert single.terminations[-1]
    assert "timeouts_as_terminals" not in names(single)


def test_episodes_beyond_the_limit_of_the_task_are_found() -> None:
    shorter = TOY.model_copy(update={"max_episode_steps": 40})
    finding = found(toy_data(), "too_long", shorter)
    assert 1 in finding.episodes


def test_short_episodes_are_found() -> None:
    columns = columns_of(toy_data())
    columns["truncations"][0] = True
    assert found(rebuilt(columns), "short_episodes").episodes == (0,)


def test_rows_with_both_ends_and_constant_observations_are_noted() -> None:
    columns = columns_of(toy_data())
    columns["truncations"] |= columns["terminations"]
    for name in ("observations", "next_observations"):
        columns[name][:, 1] = 4.0
    data = rebuilt(columns)
    assert found(data, "both_ends").level == "note"
    constant = found(data, "constant_observations")
    assert "never change: 1" in constant.message
    assert "does not scale them" in constant.advice


def test_data_of_another_task_is_found() -> None:
    finding = found(toy_data(task=SWITCH), "task", TOY)
    assert finding.message == "observations have shape (4,), but Toy-v0 gives (3,)"


def test_errors_come_first() -> None:
    columns = columns_of(toy_data())
    columns["actions"][:, 1] = 0.5
    columns["rewards"][3] = np.nan
    columns["truncations"][0] = True
    levels = [finding.level for finding in check_dataset(rebuilt(columns))]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    assert len(set(levels)) == 3


def test_one_row_can_be_checked() -> None:
    assert check_dataset(toy_data(50).slice(0, 1)) is not None


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no recorded data beside this checkout")
@pytest.mark.parametrize(
    ("name", "env_id", "faults"),
    [
        ("pendulum-mixed-reagent", "Pendulum-v1", set()),
        ("pendulum-expert-rllib", "Pendulum-v1", set()),
        ("cartpole-expert-sb2", "CartPole-v1", set()),
        ("acrobot-coach", "Acrobot-v1", set()),
        ("halfcheetah-expert-cs285-v4", "HalfCheetah-v5", {"outside_box"}),
    ],
)
def test_recorded_data_has_its_known_faults_only(name: str, env_id: str, faults: set[str]) -> None:
    data = load_transition_dataset("npz", path=REAL_DATA / f"{name}.npz")
    assert names(data, probe_env(env_id)) == faults


def test_a_recording_that_goes_on_after_a_goal_has_no_short_episodes() -> None:
    data = toy_data()
    columns = columns_of(data)
    inside = int(data.episode_starts[3]) + 5
    columns["terminations"][inside : inside + 3] = True  # three rows in the goal in a row
    assert "short_episodes" not in names(rebuilt(columns))
    columns["next_observations"][inside] += 100.0  # now another episode begins there
    assert found(rebuilt(columns), "short_episodes").rows == (inside + 1,)


def test_a_recorder_with_a_limit_of_its_own_is_believed() -> None:
    shorter = TOY.model_copy(update={"max_episode_steps": 40})
    own = rebuilt(columns_of(toy_data()), provenance={"episode_steps": 50})
    assert "too_long" not in names(own, shorter)
    nonsense = rebuilt(columns_of(toy_data()), provenance={"episode_steps": "many"})
    assert "too_long" in names(nonsense, shorter)

"""Faults planted in a large recording: each is found, named and located, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.datasets import TOY, columns_of, rebuilt
from helpers.tiny import run_cli
from rl_training.data.datasets.check import Finding, check_dataset
from rl_training.data.datasets.dataset import OfflineDataset

STEPS = 50
SMALL = 20_000
LARGE = 1_000_000
SIZES = [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)]


def recording(rows: int) -> dict[str, Any]:
    """Episodes of 50 steps of a damped random walk; rewards follow from state and action."""
    rng = np.random.default_rng(0)
    episodes = rows // STEPS
    actions = rng.uniform([-2, -1], [2, 3], (episodes, STEPS, 2)).astype(np.float32)
    states = np.empty((episodes, STEPS + 1, 3), np.float32)
    states[:, 0] = rng.normal(size=(episodes, 3))
    for step in range(STEPS):
        noise = rng.normal(size=(episodes, 3))
        states[:, step + 1] = 0.9 * states[:, step] + 0.4 * noise
    now, then = states[:, :-1], states[:, 1:]
    rewards = -1.0 - 0.2 * np.abs(now).sum(-1) - 0.1 * np.abs(actions).sum(-1)
    flat = {"observations": now, "actions": actions, "next_observations": then}
    return {
        **{name: np.ascontiguousarray(c.reshape(rows, -1)) for name, c in flat.items()},
        "rewards": rewards.reshape(rows).astype(np.float32),
        "terminations": np.zeros(rows, np.bool_),
        "truncations": np.arange(rows) % STEPS == STEPS - 1,
    }


def findings(columns: dict[str, Any]) -> dict[str, Finding]:
    found = check_dataset(rebuilt(columns), TOY)
    names = [finding.check for finding in found]
    assert len(set(names)) == len(names), names
    return {finding.check: finding for finding in found}


@pytest.fixture(scope="module", params=SIZES)
def clean(request: pytest.FixtureRequest) -> OfflineDataset:
    return rebuilt(recording(request.param))


def somewhere(data: OfflineDataset) -> int:
    """An episode in the second half, by number."""
    return int(data.num_episodes * 0.7)


def test_a_whole_recording_has_no_fault(clean: OfflineDataset) -> None:
    assert check_dataset(clean, TOY) == []


@pytest.mark.parametrize("column", ["observations", "rewards"])
def test_one_nan_is_found_in_its_row(clean: OfflineDataset, column: str) -> None:
    columns, row = columns_of(clean), somewhere(clean) * STEPS + 7
    columns[column][row] = np.nan
    found = findings(columns)
    assert found.keys() == {"not_finite"}
    assert (found["not_finite"].rows, found["not_finite"].count) == ((row,), 1)
    assert column in found["not_finite"].message


def test_glued_episodes_are_found_at_the_seam(clean: OfflineDataset) -> None:
    columns, row = columns_of(clean), somewhere(clean) * STEPS - 1
    columns["truncations"][row] = False
    found = findings(columns)
    assert found.keys() == {"broken_chain", "too_long"}
    assert found["broken_chain"].rows == (row,)
    assert found["too_long"].rows == (row - STEPS + 1,)


def test_glued_episodes_with_copied_successors_are_found_by_their_length(
    clean: OfflineDataset,
) -> None:
    columns, row = columns_of(clean), somewhere(clean) * STEPS - 1
    columns["truncations"][row] = False
    columns["next_observations"][row] = columns["observations"][row + 1]
    found = findings(columns)
    assert found.keys() == {"too_long"}
    assert found["too_long"].rows == (row - STEPS + 1,)


def test_shuffled_rows_are_found_where_they_are(clean: OfflineDataset) -> None:
    columns, start = columns_of(clean), somewhere(clean) * STEPS + 10
    order = start + np.random.default_rng(1).permutation(30)
    for column in columns.values():
        column[start : start + 30] = column[order]
    found = findings(columns)
    assert found.keys() == {"shuffled_rows"}
    rows = found["shuffled_rows"].rows
    assert start - 1 <= rows[0] <= start + 3
    assert 20 <= found["shuffled_rows"].count <= 31
    assert found["shuffled_rows"].episodes == (somewhere(clean),)


def test_a_wholly_shuffled_recording_is_named_so(clean: OfflineDataset) -> None:
    order = np.random.default_rng(1).permutation(len(clean))
    columns = {name: column[order] for name, column in clean.columns()}
    found = {f.check: f for f in check_dataset(rebuilt(columns))}
    assert "shuffled" in found["broken_chain"].advice
    assert found["broken_chain"].count > 0.9 * len(clean)


def test_rewards_in_another_unit_are_found(clean: OfflineDataset) -> None:
    columns, episode = columns_of(clean), somewhere(clean)
    columns["rewards"][episode * STEPS : (episode + 1) * STEPS] *= 100.0
    found = findings(columns)
    assert found.keys() == {"reward_scale"}
    assert found["reward_scale"].episodes == (episode,)


def test_observations_in_degrees_are_found(clean: OfflineDataset) -> None:
    columns, episode = columns_of(clean), somewhere(clean)
    part = slice(episode * STEPS, (episode + 1) * STEPS)
    for name in ("observations", "next_observations"):
        columns[name][part, 1] *= np.float32(180 / np.pi)
    found = findings(columns)
    assert found.keys() == {"other_units"}
    assert found["other_units"].episodes == (episode,)
    assert "entry 1" in found["other_units"].message


def test_actions_in_another_unit_are_found(clean: OfflineDataset) -> None:
    columns, episode = columns_of(clean), somewhere(clean)
    columns["actions"][episode * STEPS : (episode + 1) * STEPS] *= 10.0
    found = findings(columns)
    assert found.keys() == {"outside_box"}
    assert set(found["outside_box"].episodes) == {episode}
    assert all(episode == row // STEPS for row in found["outside_box"].rows)


def test_events_are_not_units() -> None:
    """An entry that is next to nothing in most episodes, and large in a few."""
    columns = recording(SMALL)
    columns["observations"][:, 2] *= 1e-5
    columns["observations"][500:1000, 2] = 1.0
    assert "other_units" not in {f.check for f in check_dataset(rebuilt(columns))}


def test_the_command_finds_all_of_them_at_once(clean: OfflineDataset, tmp_path: Path) -> None:
    columns, episode = columns_of(clean), somewhere(clean)
    nan, seam = (episode - 20) * STEPS + 5, (episode - 30) * STEPS - 1
    columns["observations"][nan, 0] = np.nan
    columns["truncations"][seam] = False
    start = (episode - 40) * STEPS + 10
    order = start + np.random.default_rng(1).permutation(30)
    for column in columns.values():
        column[start : start + 30] = column[order]
    columns["rewards"][episode * STEPS : (episode + 1) * STEPS] *= 100.0
    folder = tmp_path / "planted"
    folder.mkdir()
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    done = run_cli("data", "check", folder, "--json")
    assert done.code == 1
    found = {f["check"]: f for f in json.loads(done.out)["findings"]}
    assert found.keys() == {"not_finite", "broken_chain", "shuffled_rows", "reward_scale"}
    assert found["not_finite"]["rows"] == [nan]
    assert found["broken_chain"]["rows"] == [seam]
    assert all(start - 1 <= row < start + 30 for row in found["shuffled_rows"]["rows"])
    assert found["reward_scale"]["rows"] == [episode * STEPS]

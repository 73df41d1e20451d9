"""Reading and writing datasets: names, ends, successors, formats, and broken files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from helpers.datasets import REAL_DATA, TOY, tiny_columns, toy_data, write_columns
from rl_training.data import load_transition_dataset
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.sources import kind_of
from rl_training.data.datasets.writers import save_dataset
from rl_training.errors import DataError, MissingExtraError

SHORT_NAMES = {
    "observations": "obs",
    "next_observations": "next_obs",
    "terminations": "dones",
}


def load_npz(path: Path, **options: Any) -> OfflineDataset:
    return load_transition_dataset("npz", path=path, **options)


def write_hdf5(path: Path, **columns: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file[name] = column
    return path


def d4rl_columns(**changes: Any) -> dict[str, Any]:
    columns = tiny_columns()
    columns["terminals"] = columns.pop("terminations")
    columns["timeouts"] = columns.pop("truncations")
    return {name: value for name, value in (columns | changes).items() if value is not None}


# Names and ends


def test_npz_keeps_terminations_and_truncations_apart(tmp_path: Path) -> None:
    data = load_npz(write_columns(tmp_path / "a.npz", tiny_columns()))
    assert data.terminations.tolist() == [False, False, False, False, True]
    assert data.truncations.tolist() == [False, False, True, False, False]
    assert data.notes == ()
    assert data.source.startswith("npz ")


def test_short_names_are_read_and_dones_are_terminations_with_a_note(tmp_path: Path) -> None:
    columns = {SHORT_NAMES.get(k, k): v for k, v in tiny_columns().items() if k != "truncations"}
    columns["dones"] = np.array([0, 0, 1, 0, 1], np.float32)
    data = load_npz(write_columns(tmp_path / "a.npz", columns))
    assert data.terminations.tolist() == [False, False, True, False, True]
    assert not data.truncations.any()
    assert "dones are read as terminations" in data.notes[0]


def test_dones_that_are_truncations_are_no_terminations(tmp_path: Path) -> None:
    columns = {SHORT_NAMES.get(k, k): v for k, v in tiny_columns().items()}
    columns["dones"] = np.array([0, 0, 1, 0, 1], bool)
    data = load_npz(write_columns(tmp_path / "a.npz", columns))
    assert data.terminations.tolist() == [False, False, False, False, True]
    assert data.notes == ("1 dones are also truncations and were read as truncations",)


def test_episode_ids_mark_ends_that_no_flag_marks(tmp_path: Path) -> None:
    ids = np.array([0, 0, 0, 1, 1])
    flags = {"truncations": np.zeros(5, bool), "episode_ids": ids}
    data = load_npz(write_columns(tmp_path / "a.npz", tiny_columns(), **flags))
    assert data.truncations.tolist() == [False, False, True, False, False]
    assert "1 episodes end by their episode id alone" in data.notes[0]


def test_numbers_are_converted_to_the_dtypes_of_datasets(tmp_path: Path) -> None:
    columns = tiny_columns()
    columns["observations"] = columns["observations"].astype(np.float64)
    columns["next_observations"] = columns["next_observations"].astype(np.int32)
    columns["actions"] = np.array([[0], [1], [0], [1], [0]], np.uint8)
    columns["rewards"] = columns["rewards"].astype(np.int16)[:, None]
    columns["terminations"] = columns["terminations"].astype(np.uint8)
    data = load_npz(write_columns(tmp_path / "a.npz", columns))
    dtypes = {name: str(column.dtype) for name, column in data.columns()}
    assert dtypes["observations"] == dtypes["next_observations"] == dtypes["rewards"] == "float32"
    assert (dtypes["actions"], dtypes["terminations"]) == ("int64", "bool")
    assert data.actions.tolist() == [0, 1, 0, 1, 0]


# Successors


def test_missing_successors_come_from_the_next_row_and_truncated_rows_go(tmp_path: Path) -> None:
    columns = tiny_columns()
    data = load_npz(write_columns(tmp_path / "a.npz", columns, next_observations=None))
    assert data.observations.ravel().tolist() == [0.0, 1.0, 10.0, 11.0]
    assert data.next_observations.ravel().tolist() == [1.0, 2.0, 11.0, 11.0]
    # Row 2 had no successor, so row 1 is where the first episode is cut now.
    assert data.truncations.tolist() == [False, True, False, False]
    assert data.terminations.tolist() == [False, False, False, True]
    assert "1 rows at truncations have none and were dropped" in data.notes[0]
    assert "1 rows at terminations" in data.notes[0]


def test_an_unfinished_last_episode_loses_its_last_row_without_successors(tmp_path: Path) -> None:
    columns = tiny_columns() | {"terminations": np.zeros(5, bool)}
    data = load_npz(write_columns(tmp_path / "a.npz", columns, next_observations=None))
    assert data.observations.ravel().tolist() == [0.0, 1.0, 10.0]
    assert data.truncations.tolist() == [False, True, True]


def test_truncated_episodes_of_one_step_vanish_without_successors(tmp_path: Path) -> None:
    flags = {"terminations": np.zeros(5, bool), "truncations": np.ones(5, bool)}
    path = write_columns(tmp_path / "a.npz", tiny_columns(), next_observations=None, **flags)
    with pytest.raises(DataError, match="no transition with a known successor is left"):
        load_npz(path)


def test_d4rl_timeouts_are_truncations(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.hdf5", **d4rl_columns())
    with h5py.File(path, "a") as file:
        file["infos/qpos"] = np.zeros(3)
    data = load_transition_dataset("hdf5", path=path)
    assert data.truncations.tolist() == [False, False, True, False, False]
    assert data.terminations.tolist() == [False, False, False, False, True]
    assert data.next_observations.ravel().tolist() == [1.0, 2.0, 3.0, 11.0, 12.0]
    assert data.notes == ()


def test_d4rl_timeouts_followed_by_a_reset_are_dropped(tmp_path: Path) -> None:
    successors = np.array([[1.0], [2.0], [10.0], [11.0], [12.0]], np.float32)
    path = write_hdf5(tmp_path / "a.hdf5", **d4rl_columns(next_observations=successors))
    data = load_transition_dataset("hdf5", path=path)
    assert data.observations.ravel().tolist() == [0.0, 1.0, 10.0, 11.0]
    assert data.truncations.tolist() == [False, True, False, False]
    assert "1 rows at timeouts have the next episode's first observation" in data.notes[0]


def test_d4rl_files_without_timeouts_say_so(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.hdf5", **d4rl_columns(timeouts=None))
    assert "it has no timeouts" in load_transition_dataset("hdf5", path=path).notes[0]


# Writing


@pytest.mark.parametrize("kind", ["npz", "npy", "hdf5"])
def test_what_is_written_is_read_back(kind: str, tmp_path: Path) -> None:
    data = toy_data()
    target = tmp_path / "sub" / ("folder" if kind == "npy" else f"file.{kind}")
    save_dataset(data, target, kind)
    assert kind_of(target) == kind
    again = load_transition_dataset(kind, path=target)
    assert again.digest() == data.digest()
    assert again.env_id == "Toy-v0"
    assert [p.name for p in target.parent.iterdir()] == [target.name], "nothing else is left"


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    target = tmp_path / "a.npz"
    save_dataset(toy_data(100), target, "npz")
    with pytest.raises(DataError, match="exists already"):
        save_dataset(toy_data(200), target, "npz")
    save_dataset(toy_data(200), target, "npz", force=True)
    assert len(load_npz(target)) == 200


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    for kind in ("npy", "npz"):
        with pytest.raises(DataError, match="a folder with other things in it"):
            save_dataset(toy_data(50), tmp_path, kind, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "dear"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left"):
        save_dataset(toy_data(50), tmp_path / "new", "npy")
    assert not list(tmp_path.iterdir())


def test_columns_of_a_folder_stay_on_disk(tmp_path: Path) -> None:
    save_dataset(toy_data(), tmp_path / "a", "npy")
    data = load_transition_dataset("npy", path=tmp_path / "a")
    assert isinstance(data.observations, np.memmap)
    assert isinstance(data.next_observations, np.memmap)
    assert not data.observations.flags.writeable
    in_memory = load_transition_dataset("npy", path=tmp_path / "a", memory_map=False)
    assert not isinstance(in_memory.observations, np.memmap)
    assert in_memory.digest() == data.digest()
    mapped = data.in_learner_units(TOY)
    assert isinstance(mapped.observations, np.memmap)


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_files_are_unpacked_piece_by_piece(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dataset(toy_data(), tmp_path / "a", kind)
    monkeypatch.setattr("rl_training.data.datasets.blocks.CHUNK_ROWS", 64)
    data = load_transition_dataset(kind, path=tmp_path / "a", unpack_into=tmp_path)
    assert isinstance(data.observations, np.memmap)
    assert data.digest() == toy_data().digest()


def test_only_folders_can_be_mapped(tmp_path: Path) -> None:
    path = write_columns(tmp_path / "a.npz", tiny_columns())
    with pytest.raises(DataError, match="data convert SOURCE FOLDER --to npy"):
        load_npz(path, memory_map=True)


# Mistakes


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("a missing key", {"actions": None}, "key actions is missing; it holds observations"),
    ("a mistyped key", {"rewards": None, "reward": 0}, r"rewards is missing \(did you mean reward"),
    ("fewer rows", {"actions": np.zeros((4, 1))}, "actions has 4 rows, but rewards has 5"),
    ("another shape", {"next_observations": np.zeros((5, 2))}, r"\(5, 2\), but observations"),
    ("a table of rewards", {"rewards": np.zeros((5, 2))}, r"one number per row, got shape \(5, 2"),
    ("texts", {"actions": np.array(list("abcde"))}, "actions holds <U1, not numbers"),
    ("objects", {"actions": np.array([{}] * 5)}, "actions holds Python objects .* never unpickled"),
    ("a number", {"rewards": np.float32(1.0)}, "rewards is a single value, not a column"),
    ("other flags", {"terminations": np.arange(5)}, "0 and 1, got 2 at row 2"),
    ("NaN", {"rewards": np.array([0, 0, 0, np.nan, 0])}, "rewards holds NaN or infinity at row 3"),
    ("overflow", {"rewards": np.array([0, 1e300, 0, 0, 0])}, "rewards holds NaN .* at row 1"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(changes, message, id=name) for name, changes, message in BROKEN],
)
def test_a_broken_file_is_named_with_key_and_row(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_columns(tmp_path / "bad.npz", tiny_columns(), **changes)
    with pytest.raises(DataError, match=message) as caught:
        load_npz(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_an_empty_file_of_columns_is_refused(tmp_path: Path) -> None:
    empty = {name: column[:0] for name, column in tiny_columns().items()}
    with pytest.raises(DataError, match="rewards is empty: there are no transitions"):
        load_npz(write_columns(tmp_path / "a.npz", empty))


def test_nan_is_taken_when_told(tmp_path: Path) -> None:
    columns = tiny_columns()
    columns["observations"][1] = np.nan
    path = write_columns(tmp_path / "a.npz", columns)
    assert np.isnan(load_npz(path, allow_nan=True).observations[1]).all()


@pytest.mark.parametrize("content", [b"", b"not a zip", b"\x93NUMPY"])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz: it is not an npz file"):
        load_npz(tmp_path / "a.npz")


def test_a_damaged_archive_is_refused_whole_and_in_pieces(tmp_path: Path) -> None:
    save_dataset(toy_data(2000), tmp_path / "a.npz", "npz")
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[2000:2400] = bytes(400)
    (tmp_path / "b.npz").write_bytes(content)
    for folder in (None, tmp_path):
        with pytest.raises(DataError, match=r"b\.npz: observations cannot be read"):
            load_npz(tmp_path / "b.npz", unpack_into=folder)


def test_a_truncated_hdf5_file_is_refused(tmp_path: Path) -> None:
    save_dataset(toy_data(), tmp_path / "a.hdf5", "hdf5")
    content = (tmp_path / "a.hdf5").read_bytes()
    (tmp_path / "b.hdf5").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"b\.hdf5: it is not an HDF5 file, or damaged"):
        load_transition_dataset("hdf5", path=tmp_path / "b.hdf5")


def test_an_object_column_in_a_folder_is_refused(tmp_path: Path) -> None:
    save_dataset(toy_data(50), tmp_path / "a", "npy")
    np.save(tmp_path / "a" / "rewards.npy", np.array([{}] * 50), allow_pickle=True)
    with pytest.raises(DataError, match=r"rewards\.npy: it is not a plain array"):
        load_transition_dataset("npy", path=tmp_path / "a")


def test_unknown_kinds_and_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'hdf' is not known \(did you mean hdf5\?\)"):
        load_transition_dataset("hdf")
    with pytest.raises(DataError, match="needs a path"):
        load_transition_dataset("npz")
    with pytest.raises(DataError, match=r"nowhere\.npz: there is no such file"):
        load_npz(tmp_path / "nowhere.npz")
    with pytest.raises(DataError, match="is a folder, but kind npz needs a file"):
        load_npz(tmp_path)
    with pytest.raises(DataError, match="needs env_spec"):
        load_transition_dataset("random")
    with pytest.raises(DataError, match="needs an id"):
        load_transition_dataset("minari")


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.hdf5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"rl-training\[offline\]"):
        load_transition_dataset("hdf5", path=tmp_path / "a.hdf5")


# Data that others recorded


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no recorded data beside this checkout")
@pytest.mark.parametrize(
    ("name", "rows", "episodes", "mean"),
    [
        ("pendulum-mixed-reagent", 22_000, 110, -600.5),
        ("pendulum-medium-rllib", 10_000, 50, -524.3),
        ("halfcheetah-expert-cs285-v4", 2_000, 2, 4034.8),
        ("acrobot-coach", 9_804, 30, -326.2),
    ],
)
def test_recorded_data_has_its_known_returns(
    name: str, rows: int, episodes: int, mean: float
) -> None:
    data = load_npz(REAL_DATA / f"{name}.npz")
    assert (len(data), data.num_episodes) == (rows, episodes)
    assert data.episode_returns().mean() == pytest.approx(mean, abs=0.1)

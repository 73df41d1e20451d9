"""Saving, loading, segments and single files: what goes in comes out, bit for bit."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import Ring, awkward_tree, save
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import (
    compare_states,
    flatten_state,
    slice_seed,
)
from rl_training.experiment.checkpointing import (
    list_checkpoints,
    load_checkpoint,
    load_single_file,
    open_checkpoint,
    prune_checkpoints,
    read_manifest,
    resolve_checkpoint,
    restore_seed_segments,
    save_checkpoint,
    save_single_file,
    verify_checkpoint,
)

# -- folders -------------------------------------------------------------------------------------


def test_checkpoint_round_trip_is_bit_exact(tmp_path: Path) -> None:
    tree = awkward_tree()
    header = {"config": {"lr": 1e-3, "best": -math.inf, "seed": 2**90}, "level": "exact"}
    path = save_checkpoint(tmp_path, 7, header=header, states={"learner": tree, "empty": {}})
    assert path == tmp_path / "checkpoints" / "step_7"
    loaded = load_checkpoint(path)
    assert compare_states(loaded.states, {"learner": tree, "empty": {}}) == []
    assert (loaded.step, loaded.header) == (7, header)
    assert sorted(os.listdir(path)) == ["learner.safetensors", "manifest.json"]
    assert len(load_file(path / "learner.safetensors")) == len(flatten_state(tree)[1])
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]


def test_only_the_asked_components_are_read(tmp_path: Path) -> None:
    ring = Ring()
    ring.add(20)
    path = save(tmp_path, 1, ring)
    for file in (path / "segments").iterdir():
        file.write_bytes(b"")
    assert load_checkpoint(path, {"learner"}).states.keys() == {"learner"}
    assert open_checkpoint(tmp_path, components={"learner"}).step == 1
    for components in (None, {"replay"}):
        with pytest.raises(CheckpointError, match="segments/replay-000000000000"):
            load_checkpoint(path, components)
    with pytest.raises(CheckpointError, match="no component 'actor'"):
        load_checkpoint(path, {"actor"})


def test_existing_step_is_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 3, header={}, states={"a": {"x": torch.zeros(2)}})
    save_checkpoint(tmp_path, 3, header={}, states={"b": {"x": torch.ones(2)}})
    assert load_checkpoint(tmp_path / "checkpoints" / "step_3").states.keys() == {"b"}
    assert os.listdir(tmp_path / "checkpoints") == ["step_3"]


def test_leftovers_of_dead_processes_are_swept_and_those_of_live_ones_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    dead, live = 2**22 + 1, os.getppid()  # above the largest process id of Linux; our parent
    for name in (f".tmp-step_5-{dead}", f".del-step_4-{dead}", f".tmp-step_6-{live}"):
        (folder / name).mkdir()
        (folder / name / "x").write_text("x")
    save(tmp_path, 2)
    assert sorted(os.listdir(folder)) == [f".tmp-step_6-{live}", "step_1", "step_2"]


def test_folder_set_aside_by_a_crash_is_read_and_then_put_back(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    path.rename(path.parent / f".old-step_1-{2**22 + 1}")
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
    assert open_checkpoint(tmp_path).states["learner"]["n"] == 1
    assert load_checkpoint(path).states["learner"]["n"] == 1
    save(tmp_path, 2)
    assert sorted(os.listdir(path.parent)) == ["step_1", "step_2"]


def test_steps_are_listed_by_number(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step_007").mkdir()
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [9, 10, 100]
    assert list_checkpoints(tmp_path / "nothing") == []


def test_resolve_takes_any_of_the_three_folders(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    folder = tmp_path / "checkpoints"
    assert resolve_checkpoint(tmp_path) == resolve_checkpoint(folder) == folder / "step_2"
    assert resolve_checkpoint(folder / "step_1") == folder / "step_1"
    assert resolve_checkpoint(tmp_path, step=1) == folder / "step_1"
    with pytest.raises(CheckpointError, match="steps are: 1, 2"):
        resolve_checkpoint(tmp_path, step=5)
    with pytest.raises(CheckpointError, match="not the checkpoint of step 5"):
        resolve_checkpoint(folder / "step_1", step=5)
    with pytest.raises(CheckpointError, match="no folder"):
        resolve_checkpoint(tmp_path / "absent")


def test_prune_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    assert prune_checkpoints(tmp_path, 2, protect={1}) == [4, 3, 2]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_1", "step_5", "step_6"]
    with pytest.raises(CheckpointError, match="keep_last"):
        prune_checkpoints(tmp_path, 0)


def test_header_with_a_tensor_and_bad_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="/w"):
        save_checkpoint(tmp_path, 1, header={"w": torch.ones(1)}, states={})
    for name in ("../x", "a/b", "", ".hidden"):
        with pytest.raises(CheckpointError, match="component name"):
            save_checkpoint(tmp_path, 1, header={}, states={name: {}})
    with pytest.raises(CheckpointError, match="step"):
        save_checkpoint(tmp_path, -1, header={}, states={})
    assert os.listdir(tmp_path / "checkpoints") == []


# -- segments ------------------------------------------------------------------------------------


def test_save_writes_only_new_rows_and_links_full_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, int] = {}
    original = files.write_file

    def counting(path: Path, chunks: Iterable[bytes | memoryview]) -> files.FileRecord:
        record = original(path, chunks)
        written[path.name] = record.size
        return record

    monkeypatch.setattr(files, "write_file", counting)
    ring = Ring(capacity=1000, segment_rows=8)
    ring.add(20)
    first = save(tmp_path, 1, ring)
    written.clear()
    ring.add(10)
    second = save(tmp_path, 2, ring)
    assert {name for name in written if name.startswith("replay")} == {
        "replay-000000000002.safetensors",
        "replay-000000000003.safetensors",
    }
    inodes = [
        [(p / "segments" / f"replay-{k:012d}.safetensors").stat() for k in range(3)]
        for p in (first, second)
    ]
    assert [a.st_ino == b.st_ino for a, b in zip(*inodes, strict=True)] == [True, True, False]
    assert inodes[0][0].st_nlink == 2
    prune_checkpoints(tmp_path, 1)
    verify_checkpoint(second)


@pytest.mark.parametrize("seed", [0, 1])
def test_segments_follow_a_ring_that_wraps_around(tmp_path: Path, seed: int) -> None:
    ring = Ring(capacity=21, segment_rows=8)
    for step in range(1, 30):
        ring.add(step % 7)
        path = save(tmp_path, step, ring, seed_index=seed)
        restored = Ring(capacity=21, segment_rows=8, seeds=1)
        load_checkpoint(path).restore_segments("replay", restored)
        if ring.total:
            assert restored.total == ring.total
            expected = slice_seed(ring.read_rows(*ring.segment_range()), seed)
            assert compare_states(restored.read_rows(*ring.segment_range()), expected) == []
        assert len(list((path / "segments").iterdir())) <= 21 // 8 + 2
        prune_checkpoints(tmp_path, 2)


def test_rows_of_several_seeds_are_joined_even_when_their_files_begin_differently(
    tmp_path: Path,
) -> None:
    ring = Ring(capacity=21, segment_rows=8)
    ring.add(16)
    save(tmp_path / "a", 1, ring, seed_index=0)
    ring.add(10)
    # Run b has no earlier checkpoint, so its first segment is clipped where a's is not.
    paths = [save(tmp_path / name, 2, ring, seed_index=i) for i, name in enumerate("ab")]
    starts = [read_manifest(path).segments[0].files[0].start for path in paths]
    assert starts == [0, 5]
    restored = Ring(capacity=21, segment_rows=8)
    restore_seed_segments([load_checkpoint(path) for path in paths], "replay", restored)
    assert compare_states(restored.read_rows(5, 26), ring.read_rows(5, 26)) == []


def test_segment_of_another_history_is_not_linked(tmp_path: Path) -> None:
    ring, other = Ring(), Ring()
    ring.add(20)
    save(tmp_path, 1, ring)
    other.add(10)
    other.add(20, salt=7)  # as after a resume from row 10 that went another way
    path = save(tmp_path, 2, other)
    restored = Ring(seeds=1)
    load_checkpoint(path).restore_segments("replay", restored)
    assert compare_states(restored.obs, other.obs[:1]) == []
    assert (path / "segments" / "replay-000000000000.safetensors").stat().st_nlink == 2


def test_unusable_previous_segments_are_written_afresh(tmp_path: Path) -> None:
    ring = Ring()
    ring.add(30)
    first = save(tmp_path, 1, ring)
    (first / "segments" / "replay-000000000000.safetensors").write_bytes(b"short")
    (first / "segments" / "replay-000000000001.safetensors").unlink()
    second = save(tmp_path, 2, ring)
    verify_checkpoint(second)
    (second / "manifest.json").write_text("{}")
    verify_checkpoint(save(tmp_path, 3, ring, previous=second))
    verify_checkpoint(save(tmp_path, 4, Ring(segment_rows=5)))


def test_segment_that_lacks_rows_now_wanted_is_written_afresh(tmp_path: Path) -> None:
    small, large = Ring(capacity=10), Ring(capacity=50)
    small.add(20)
    large.add(20)
    save(tmp_path, 1, small)
    restored = Ring(seeds=1)
    load_checkpoint(save(tmp_path, 2, large)).restore_segments("replay", restored)
    assert compare_states(restored.obs, large.obs[:1]) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_segments_are_copied_and_checked_where_links_are_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "links not supported")

    monkeypatch.setattr(files, "link_file", refuse)
    ring = Ring()
    ring.add(20)
    first = save(tmp_path, 1, ring) / "segments" / "replay-000000000000.safetensors"
    if damaged:
        data = bytearray(first.read_bytes())
        data[-1] ^= 1
        first.write_bytes(data)
    verify_checkpoint(save(tmp_path, 2, ring))


def test_component_with_wrong_row_shapes_is_refused(tmp_path: Path) -> None:
    ring = Ring(seeds=1)
    ring.add(3)
    with pytest.raises(CheckpointError, match="seed 1"):
        save(tmp_path, 1, ring, seed_index=1)
    assert list_checkpoints(tmp_path) == []


# -- single files and readers --------------------------------------------------------------------


def test_single_file_is_replaced_atomically_and_keeps_its_header(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "agent.rlt"
    for value in (1.0, 2.0):
        save_single_file(path, header={"v": value}, states={"a": {"x": torch.tensor(value)}})
    loaded = load_single_file(path)
    assert (loaded.header, float(loaded.states["a"]["x"])) == ({"v": 2.0}, 2.0)
    assert os.listdir(path.parent) == ["agent.rlt"]


def test_readers_never_fail_while_a_trainer_saves_replaces_and_prunes(tmp_path: Path) -> None:
    ring = Ring(capacity=40)
    ring.add(30)
    save(tmp_path, 0, ring)
    stop, errors = threading.Event(), list[BaseException]()

    def write() -> None:
        try:
            for step in range(60):
                ring.add(3)
                save(tmp_path, step // 3, ring)  # every step is replaced twice
                prune_checkpoints(tmp_path, 1)
        except BaseException as error:
            errors.append(error)
        finally:
            stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    loads, warnings = 0, list[str]()
    while not stop.is_set() or loads < 20:
        loaded = open_checkpoint(tmp_path, warn=warnings.append)
        assert loaded.states["learner"]["n"] == loaded.step
        loads += 1
    writer.join()
    assert errors == []
    assert warnings == []

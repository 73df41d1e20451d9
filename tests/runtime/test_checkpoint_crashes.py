"""Crashes at every file operation and disks that refuse: a good checkpoint always remains."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import Ring, save
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import (
    list_checkpoints,
    load_checkpoint,
    load_single_file,
    open_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    save_single_file,
    verify_checkpoint,
)

OPERATIONS = ("write_file", "link_file", "rename", "make_dir", "fsync_dir", "remove_tree")


class Crash(BaseException):
    """The process is gone: nothing after this touches the disk."""


class FaultyDisk:
    """Lets `allowed` operations pass, then dies before or halfway through the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int, halfway: bool) -> None:
        self.left = allowed
        self.halfway = halfway
        self.dead = False
        for name in OPERATIONS:
            monkeypatch.setattr(files, name, self.shim(name, getattr(files, name)))

    def shim(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                return original(*arguments)
            if self.halfway and not self.dead:
                self.do_half(name, arguments)
            self.dead = True
            raise Crash

        return operation

    def do_half(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "write_file":
            data = b"".join(bytes(chunk) for chunk in arguments[1])
            arguments[0].write_bytes(data[: len(data) // 2])
        elif name == "remove_tree":
            for victim in sorted(p for p in arguments[0].rglob("*") if p.is_file())[::2]:
                victim.unlink()


@pytest.mark.parametrize("halfway", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_crash_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, replaced: bool, halfway: bool
) -> None:
    outcomes = []
    for allowed in range(200):
        run = tmp_path / str(allowed)
        ring = Ring()
        ring.add(20)
        save(run, 1, ring)
        before = open_checkpoint(run).states
        ring.add(10)
        after: dict[str, Any] = {"learner": {"w": torch.zeros(1, 3)}, "clock": {}}
        step = 1 if replaced else 2
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, allowed, halfway)
            try:
                save_checkpoint(run, step, header={}, states=after, segmented={"replay": ring})
            except Crash:
                assert disk.dead
        found = open_checkpoint(run, warn=pytest.fail)
        is_new = compare_states(found.states, after) == []
        assert is_new or compare_states(found.states, before) == []
        found.restore_segments("replay", restored := Ring(seeds=1))
        assert restored.total == (30 if is_new else 20)
        outcomes.append(is_new)
        save(run, 3, ring)
        assert not [n for n in os.listdir(run / "checkpoints") if n.startswith(".")]
        if not disk.dead:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) > 10


@pytest.mark.parametrize("halfway", [False, True])
def test_crash_while_pruning_leaves_only_whole_checkpoints(tmp_path: Path, halfway: bool) -> None:
    for allowed in range(20):
        run = tmp_path / str(allowed)
        for step in (1, 2, 3):
            save(run, step)
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, allowed, halfway)
            try:
                prune_checkpoints(run, 1)
            except Crash:
                assert disk.dead
        entries = list_checkpoints(run)
        assert entries[-1].step == 3
        for entry in entries:
            verify_checkpoint(entry.path)
        if not disk.dead:
            assert len(entries) == 1
            return
    pytest.fail("pruning never ended")


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "free space"), (errno.EROFS, "accessible"), (errno.EIO, "check the disk")],
)
@pytest.mark.parametrize("operation", ["write_file", "rename", "make_dir", "fsync_dir"])
@pytest.mark.parametrize("countdown", [0, 1])
def test_refusing_disk_gives_advice_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    code: int, advice: str, operation: str, countdown: int,
) -> None:  # fmt: skip
    save(tmp_path, 1)
    before = load_checkpoint(save(tmp_path, 2)).states
    original = getattr(files, operation)
    left = [countdown]

    def refuse(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            if operation == "write_file":
                arguments[0].write_bytes(b"half")
            raise OSError(code, os.strerror(code))
        return original(*arguments)

    ring = Ring()
    ring.add(3)
    monkeypatch.setattr(files, operation, refuse)
    with pytest.raises(CheckpointError, match=f"step_2 failed .*{advice}") as caught:
        save_checkpoint(tmp_path, 2, header={}, states=before, segmented={"replay": ring})
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert compare_states(open_checkpoint(tmp_path, warn=pytest.fail).states, before) == []
    names = os.listdir(tmp_path / "checkpoints")
    assert not [name for name in names if name.startswith(".tmp")]
    assert {"step_1", "step_2"} <= set(names)


def test_real_read_failures_are_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="step_1 failed"):
        save(tmp_path, 1)


def test_failed_single_file_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_single_file(tmp_path / "agent.rlt", header={"v": 1}, states={})

    def refuse(target: Path, chunks: Iterable[bytes]) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_file", refuse)
    with pytest.raises(CheckpointError, match="free space"):
        save_single_file(path, header={"v": 2}, states={})
    assert load_single_file(path).header == {"v": 1}
    assert os.listdir(tmp_path) == ["agent.rlt"]

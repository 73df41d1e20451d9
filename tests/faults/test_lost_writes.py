"""Power cuts: what was not flushed is lost, and still a whole checkpoint is there (R6, R7)."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import Ring, save
from helpers.faults import Tried
from helpers.lost_writes import LossyDisk, lay_out
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import (
    open_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from rl_training.experiment.config import load_config
from rl_training.experiment.runs import create_run_folder
from rl_training.runtime.checkpoints.saver import _write_best
from rl_training.testing.contract import small_config

AFTER: dict[str, Any] = {"learner": {"w": torch.zeros(1, 3)}, "clock": {}}


def crash_everywhere(
    run: Path, work: Callable[[], object], *, ignore_flushes: bool = False
) -> LossyDisk:
    with pytest.MonkeyPatch.context() as patch:
        disk = LossyDisk(patch, run, ignore_flushes=ignore_flushes)
        work()
    return disk


def one_save(run: Path, step: int) -> tuple[Callable[[], None], dict[str, Any]]:
    """A run with checkpoints 0 and 1, and the work that saves, prunes and notes the best."""
    ring = Ring()
    ring.add(20)
    for earlier in (0, 1):
        save(run, earlier, ring)
    before = open_checkpoint(run).states
    ring.add(10)

    def work() -> None:
        save_checkpoint(run, step, header={}, states=AFTER, segmented={"replay": ring})
        _write_best(run, step)
        prune_checkpoints(run, 1, protect={step})

    return work, before


def is_old_or_new(image: Path, before: dict[str, Any]) -> bool:
    try:
        found = open_checkpoint(image, warn=pytest.fail)
    except CheckpointError:
        return False
    is_new = compare_states(found.states, AFTER) == []
    found.restore_segments("replay", restored := Ring(seeds=1))
    assert restored.total == (30 if is_new else 20)
    return is_new or compare_states(found.states, before) == []


@pytest.mark.parametrize("step", [1, 2], ids=["replacing", "adding"])
def test_a_power_cut_leaves_the_old_or_the_new_checkpoint(
    step: int, tried: Tried, tmp_path: Path
) -> None:
    run, image = tmp_path / "run", tmp_path / "image"
    work, before = one_save(run, step)
    disk = crash_everywhere(run, work)
    count = lost = 0
    for tree in disk.images(random.Random(step), draws=3):
        lay_out(tree, image)
        lost += not is_old_or_new(image, before)
        count += 1
        shutil.rmtree(image)
    tried("power cut during a save", "-", count, lost)
    assert lost == 0
    assert count > 50


def test_without_flushes_checkpoints_would_be_lost(tmp_path: Path) -> None:
    run, image = tmp_path / "run", tmp_path / "image"
    work, before = one_save(run, 1)
    disk = crash_everywhere(run, work, ignore_flushes=True)
    lost = 0
    for tree in disk.images(random.Random(0), draws=3):
        lay_out(tree, image)
        try:
            lost += not is_old_or_new(image, before)
        except pytest.fail.Exception:
            lost += 1
        shutil.rmtree(image)
    assert lost > 0


def test_the_folder_of_a_run_is_there_whole_or_not_at_all(tried: Tried, tmp_path: Path) -> None:
    parent, image = tmp_path / "runs", tmp_path / "image"
    parent.mkdir()
    config = small_config("dqn", parent, run_name="new", seeds=[1, 2])
    disk = crash_everywhere(parent, lambda: create_run_folder(config))
    seen = set()
    count = torn = 0
    for tree in disk.images(random.Random(0), draws=3):
        lay_out(tree, image)
        there = (image / "new").exists()
        seen.add(there)
        if there:
            names = {p.name for p in (image / "new").iterdir()}
            torn += names != {"config.yaml", "run.json", "seed_1", "seed_2"}
            assert load_config(image / "new" / "config.yaml").all_seeds == (1, 2)
            assert load_config(image / "new" / "seed_2" / "config.yaml").seed == 2
        count += 1
        shutil.rmtree(image)
    tried("power cut while a run begins", "-", count, torn)
    assert torn == 0
    assert seen == {False, True}


def test_a_file_is_flushed_after_its_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    files.write_file(tmp_path / "x", [b"abc", b"defg"])
    assert sizes == [7]

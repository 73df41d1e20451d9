"""Shards: the same whoever makes them, never half a one, and work that goes on after a kill."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.recipes import STEPS, CountingMaker
from helpers.tiny import clean_environment
from rl_training.errors import DataError
from rl_training.tools.recipes.shards import PLAN_FILE, Progress, Work, make_shards

EPISODES = {"train": 7, "validation": 1}


def work(folder: Path, **changes: Any) -> Work:
    settings: dict[str, Any] = {
        "name": "made/up",
        "folder": folder,
        "identity": {"seed": 0},
        "episodes": EPISODES,
        "episode_steps": STEPS,
    }
    return Work(**(settings | changes))


def contents(task: Work) -> dict[str, dict[str, bytes]]:
    return {
        shard.path.name: {name: column.tobytes() for name, column in shard.read().items()}
        for split in task.episodes
        for shard in task.shards(split)
    }


def test_shards_hold_whole_episodes_in_order(tmp_path: Path) -> None:
    task = work(tmp_path / "parts")
    make_shards(task, CountingMaker(), jobs=1)
    numbers = np.concatenate([shard.read()["numbers"] for shard in task.shards("train")])
    np.testing.assert_array_equal(numbers, np.repeat(np.arange(7), STEPS))
    assert [(s.first, s.stop) for s in task.shards("train")] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert not list(task.folder.glob("*.part"))


def test_the_number_of_processes_changes_no_bit(tmp_path: Path) -> None:
    alone, together = work(tmp_path / "one"), work(tmp_path / "two")
    make_shards(alone, CountingMaker(), jobs=1)
    make_shards(together, CountingMaker(), jobs=2)
    assert contents(alone) == contents(together)


def test_finished_shards_are_not_made_again(tmp_path: Path) -> None:
    task, reports = work(tmp_path / "parts"), list[Progress]()
    make_shards(task, CountingMaker(), jobs=1)
    before = {path: path.stat().st_mtime_ns for path in task.folder.glob("*.npz")}
    task.shards("train")[1].path.unlink()
    make_shards(task, CountingMaker(), jobs=1, on_progress=reports.append)
    assert (reports[0].rows, reports[0].total) == (6 * STEPS, 8 * STEPS)
    assert reports[0].rate is None
    assert (reports[-1].rows, reports[-1].seconds_left) == (8 * STEPS, 0.0)
    same = [p for p, t in before.items() if p.stat().st_mtime_ns == t]
    assert len(same) == len(before) - 1


def test_a_larger_set_takes_over_the_whole_shards_of_a_smaller_one(tmp_path: Path) -> None:
    make_shards(work(tmp_path, episodes={"train": 5}), CountingMaker(), jobs=1)
    reports: list[Progress] = []
    make_shards(
        work(tmp_path, episodes={"train": 9}), CountingMaker(), jobs=1, on_progress=reports.append
    )
    assert reports[0].rows == 4 * STEPS  # the shard of episode 4 alone was not a whole one


def test_a_process_that_dies_is_one_sentence_and_the_work_goes_on(tmp_path: Path) -> None:
    task, deadly = work(tmp_path / "parts"), tmp_path / "deadly"
    deadly.touch()
    with pytest.raises(DataError, match=r"has died.*kept in.*the same command continues"):
        make_shards(task, CountingMaker(deadly), jobs=2)
    left = {path.name for path in task.folder.glob("*.npz")}
    assert "train-000004-000006.npz" not in left
    deadly.unlink()
    make_shards(task, CountingMaker(deadly), jobs=2)
    whole = work(tmp_path / "whole")
    make_shards(whole, CountingMaker(), jobs=1)
    assert contents(task) == contents(whole)


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc")
def test_killed_with_its_processes_at_work_it_leaves_no_orphans_and_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from helpers.recipes import CountingMaker, STEPS\n"
        "from rl_training.tools.recipes.shards import Work, make_shards\n"
        "if __name__ == '__main__':\n"
        "    work = Work(name='made/up', folder=Path(sys.argv[1]), identity={'seed': 0},\n"
        "                episodes={'train': 7, 'validation': 1}, episode_steps=STEPS)\n"
        "    make_shards(work, CountingMaker(slow=0.6), jobs=2)\n"
    )
    script, folder = tmp_path / "program.py", tmp_path / "parts"
    script.write_text(program)
    tests = str(Path(__file__).parents[1])
    environment = clean_environment()
    environment["PYTHONPATH"] += os.pathsep + tests
    running = subprocess.Popen([sys.executable, script, folder], env=environment)
    try:
        while not list(folder.glob("*.npz")):
            assert running.poll() is None
            time.sleep(0.01)
        children = _children(running.pid)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert len(children) >= 2
    limit = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < limit, "a process outlives the command"
        time.sleep(0.05)
    task = work(folder)
    assert len(list(folder.glob("*.npz"))) < 5
    make_shards(task, CountingMaker(), jobs=1)
    whole = work(tmp_path / "whole")
    make_shards(whole, CountingMaker(), jobs=1)
    assert contents(task) == contents(whole)


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_episode_that_fails_names_itself(tmp_path: Path, jobs: int) -> None:
    error = DataError if jobs > 1 else ZeroDivisionError
    with pytest.raises(error, match="no such episode"):
        make_shards(work(tmp_path), CountingMaker(failing=True), jobs=jobs)


def test_unfinished_work_of_another_command_is_left_alone(tmp_path: Path) -> None:
    make_shards(work(tmp_path, episodes={"train": 1}), CountingMaker(), jobs=1)
    with pytest.raises(DataError, match=r"unfinished work of another command.*remove the folder"):
        make_shards(work(tmp_path, identity={"seed": 1}), CountingMaker(), jobs=1)
    assert json.loads((tmp_path / PLAN_FILE).read_text()) == {"seed": 0}


def test_a_disk_that_cannot_hold_the_rest_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 100_000))
    with pytest.raises(DataError, match=r"needs another .* GiB, but only 0.00 GiB are free"):
        make_shards(work(tmp_path), CountingMaker(), jobs=1)
    assert len(list(tmp_path.glob("*.npz"))) == 1  # what was finished is kept


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(DataError, match=r"disk of .* is full.*continues where it was"):
        make_shards(work(tmp_path), CountingMaker(), jobs=1)
    assert not list(tmp_path.glob("*.part"))


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    task = work(tmp_path, episodes={"train": 1})
    make_shards(task, CountingMaker(), jobs=1)
    path = task.shards("train")[0].path
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"train-000000-000001.npz is damaged.*remove it"):
        task.shards("train")[0].read()

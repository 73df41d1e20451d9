"""Runs that were stopped on their way, to be resumed by tests that spoil them first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import tiny_config
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.train import train

CUT = 48
BOTH = [3, 1]


class Notes(Callback):
    """Keeps what a person should know."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, state: TrainerState, text: str) -> None:
        self.texts.append(text)


def cut_run(folder: Path, **changes: Any) -> Path:
    """Two thirds of a run, with checkpoints at 16, 32 and 48."""
    config = tiny_config("dqn", folder, checkpoint_interval=16, accelerate="off", **changes)
    return train(config, stop_at=CUT).run_dir


@pytest.fixture(scope="session")
def stopped_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two runs of one configuration, one of another, a group, and whole runs."""
    folder = tmp_path_factory.mktemp("runs")
    cut_run(folder, run_name="a")
    cut_run(folder, run_name="b")
    cut_run(folder, run_name="other", seed=7)
    cut_run(folder, run_name="group", seeds=BOTH)
    for name, seeds in {"whole": None, "whole_group": BOTH}.items():
        train(tiny_config("dqn", folder, accelerate="off", run_name=name, seeds=seeds))
    return folder


@pytest.fixture
def place(stopped_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the runs, to be spoilt, in the working folder."""
    folder = Path(shutil.copytree(stopped_runs, tmp_path / "place", symlinks=True))
    monkeypatch.chdir(folder)
    return folder


def checkpoint(run: Path, step: int = CUT) -> Path:
    return run / "checkpoints" / f"step_{step}"


def content(folder: Path) -> dict[str, object]:
    """Everything below a folder: bytes of files, targets of links, names of folders."""
    return {
        str(path.relative_to(folder)): (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        )
        for path in sorted(folder.rglob("*"))
    }

"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.stopped import place as place
from helpers.stopped import stopped_runs as stopped_runs
from helpers.tiny import tiny_config
from rl_training.experiment.config import TrainConfig


@pytest.fixture
def config(algo: str, tmp_path: Path) -> TrainConfig:
    """A tiny run of each registered algorithm in turn, in a folder of its own."""
    return tiny_config(algo, tmp_path)


@pytest.fixture
def sac_config(tmp_path: Path) -> TrainConfig:
    """A tiny run of SAC in a folder of its own."""
    return tiny_config("sac", tmp_path)

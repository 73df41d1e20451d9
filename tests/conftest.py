"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.stopped import place as place
from helpers.stopped import stopped_runs as stopped_runs
from helpers.tiny import tiny_config
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled programs and measured choices of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_TRAINING_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=algorithm_names())
def algo(request: pytest.FixtureRequest) -> str:
    """The name of each registered algorithm in turn."""
    name: str = request.param
    return name


@pytest.fixture
def config(algo: str, tmp_path: Path) -> TrainConfig:
    """A tiny run of each registered algorithm in turn, in a folder of its own."""
    return tiny_config(algo, tmp_path)


@pytest.fixture
def sac_config(tmp_path: Path) -> TrainConfig:
    """A tiny run of SAC in a folder of its own."""
    return tiny_config("sac", tmp_path)

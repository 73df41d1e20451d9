"""Small datasets, whole and broken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.tiny import ROOT
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.random import random_dataset
from rl_training.envs.spec import EnvSpec

REAL_DATA = ROOT.parent / "shared" / "data"
"""Recorded data that a checkout may have beside it; tests that use it skip without it."""

TOY = EnvSpec(
    env_id="Toy-v0",
    obs_shape=(3,),
    obs_dtype="float32",
    action_kind="continuous",
    action_shape=(2,),
    action_dtype="float32",
    action_low=(-2.0, -1.0),
    action_high=(2.0, 3.0),
    max_episode_steps=50,
)
SWITCH = EnvSpec(
    env_id="Switch-v0",
    obs_shape=(4,),
    obs_dtype="float32",
    action_kind="discrete",
    action_shape=(),
    num_actions=3,
    action_start=1,
    action_dtype="int64",
)


def toy_data(size: int = 400, seed: int = 0, task: EnvSpec = TOY) -> OfflineDataset:
    """Whole episodes: half of them terminate, the others are truncated at 50 steps."""
    return random_dataset(task, size, seed)


def columns_of(dataset: OfflineDataset) -> dict[str, Any]:
    """Copies of the columns, to be broken."""
    return {name: np.array(column) for name, column in dataset.columns()}


def rebuilt(columns: Mapping[str, Any], **changes: Any) -> OfflineDataset:
    """A dataset of changed columns."""
    return OfflineDataset(**(dict(columns) | changes))


def write_columns(path: Path, columns: Mapping[str, Any], **changes: Any) -> Path:
    """An npz file of columns; a change to None leaves a column out."""
    kept = {name: value for name, value in (dict(columns) | changes).items() if value is not None}
    np.savez(path, **kept)
    return path


def tiny_columns() -> dict[str, Any]:
    """Two episodes of 3 and 2 steps: the first is truncated, the second terminates."""
    observations = np.array([[0.0], [1.0], [2.0], [10.0], [11.0]], np.float32)
    return {
        "observations": observations,
        "actions": np.array([[0.1], [0.2], [0.3], [0.4], [0.5]], np.float32),
        "rewards": np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32),
        "next_observations": observations + 1,
        "terminations": np.array([0, 0, 0, 0, 1], bool),
        "truncations": np.array([0, 0, 1, 0, 0], bool),
    }

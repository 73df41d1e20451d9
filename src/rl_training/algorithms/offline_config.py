"""Settings of learners that learn from a fixed dataset."""

from __future__ import annotations

from rl_training.algorithms.config import AlgoConfig
from rl_training.data.datasets.config import DatasetSettings
from rl_training.validation import PositiveInt


class OfflineConfig(DatasetSettings, AlgoConfig):
    """Which data to learn from, and how batches are drawn; steps are gradient steps."""

    batch_size: PositiveInt = 256
    """Transitions per gradient step and seed."""
    n_step: PositiveInt = 1
    """Rewards summed before bootstrapping; stops at the end of an episode."""

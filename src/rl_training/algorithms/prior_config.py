"""Settings of learners that learn from recorded data and their own experience at once."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from rl_training.algorithms.replay_config import ReplayConfig
from rl_training.data.datasets.config import DatasetSettings, DatasetStorage
from rl_training.validation import Fraction, NonNegativeInt

BatchRatio = Fraction | Literal["union"]
"""Share of a batch from recorded data, or draws from the union of data and experience."""


class PriorDataConfig(DatasetSettings, ReplayConfig):
    """Which prior data to use, and how much of each batch comes from it.

    What is done to the rewards of the prior data is done to those of the task as well.
    """

    offline_batch_ratio: BatchRatio = 0.5
    """Share of every batch that is drawn from the prior data: 0 ignores it, 1 uses nothing else;
    `union` draws uniformly from prior data and experience together."""
    offline_pretrain_updates: NonNegativeInt = 0
    """Updates on the prior data alone, before the first environment step."""

    @model_validator(mode="after")
    def _rows_can_be_drawn(self) -> PriorDataConfig:
        require_on_device(self.dataset_storage)
        if self.offline_batch_ratio == "union" and self.prioritized:
            raise ValueError(
                "offline_batch_ratio union draws uniformly, so prioritized must be false; give a "
                "share between 0 and 1 to draw the run's own rows by priority"
            )
        return self


def require_on_device(storage: DatasetStorage) -> None:
    """Refuse data on disk where batches hold new experience too; `auto` then means `device`.

    Raises:
        ValueError: When rows are to be mapped.
    """
    # Rows on disk are drawn outside of a compiled update, new ones inside it.
    if storage == "mapped":
        raise ValueError(
            "dataset_storage mapped is for offline training; batches with new experience are drawn "
            "on the device: use device"
        )

"""Settings of learners that learn from recorded data and their own experience at once."""

from __future__ import annotations

from pydantic import model_validator

from rl_training.algorithms.replay_config import ReplayConfig
from rl_training.data.dataset_config import DatasetSettings, DatasetStorage
from rl_training.validation import Fraction, NonNegativeInt


class PriorDataConfig(DatasetSettings, ReplayConfig):
    """Which prior data to use, and how much of each batch comes from it.

    What is done to the rewards of the prior data is done to those of the task as well.
    """

    offline_batch_ratio: Fraction = 0.5
    """Share of every batch that is drawn from the prior data; 0 ignores it, 1 uses nothing else."""
    offline_pretrain_updates: NonNegativeInt = 0
    """Updates on the prior data alone, before the first environment step."""

    @model_validator(mode="after")
    def _rows_lie_on_the_device(self) -> PriorDataConfig:
        require_on_device(self.dataset_storage)
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

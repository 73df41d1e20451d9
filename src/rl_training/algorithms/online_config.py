"""Settings of offline learners that can go on with experience of their own."""

from __future__ import annotations

from pydantic import model_validator

from rl_training.algorithms.config import AlgoConfig
from rl_training.algorithms.offline_config import OfflineConfig
from rl_training.algorithms.prior_config import BatchRatio, PriorDataConfig, require_on_device
from rl_training.algorithms.replay_config import ReplaySettings
from rl_training.validation import NonNegativeInt, PositiveInt, StrictModel


class OnlineSettings(StrictModel):
    """How an offline learner goes on online; units are environment steps per seed."""

    offline_batch_ratio: BatchRatio = 0.5
    """Share of every batch that is drawn from the dataset: 0 learns from new experience alone;
    `union` draws uniformly from dataset and experience together."""
    buffer_capacity: PositiveInt = 1_000_000
    """New transitions kept; the oldest are overwritten."""
    learning_starts: NonNegativeInt = 1_000
    """Steps before the first update: the policy's own after a checkpoint, else random ones."""
    train_frequency: PositiveInt = 1
    """Environment steps between two rounds of updates."""
    gradient_updates_per_step: PositiveInt = 1
    """Updates per round; with `train_frequency` 1 this is the update-to-data ratio."""


class OfflineToOnlineConfig(OfflineConfig):
    """Settings of an offline learner that may go on online with its own update."""

    online: OnlineSettings | None = None
    """Step environments and learn from them too; null does so only with `from_checkpoint`."""

    @model_validator(mode="after")
    def _fits_going_online(self) -> OfflineToOnlineConfig:
        if self.online is None:
            return self
        require_on_device(self.dataset_storage)
        if self.online.buffer_capacity < self.batch_size:
            raise ValueError(
                f"online.buffer_capacity must be >= batch_size ({self.batch_size}), "
                f"got {self.online.buffer_capacity}"
            )
        return self


def replay_settings(config: AlgoConfig) -> ReplaySettings | None:
    """Return how experience is kept, mixed and paced; None for a run that keeps none."""
    if isinstance(config, ReplaySettings):
        return config
    if not isinstance(config, OfflineToOnlineConfig) or config.online is None:
        return None
    common = PriorDataConfig.model_fields.keys() & type(config).model_fields.keys()
    settings = {name: getattr(config, name) for name in common}
    return PriorDataConfig(**settings | dict(config.online))

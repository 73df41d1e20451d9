"""Observations standardised by the statistics of a dataset, for learners that ask for it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.normalizer import RunningNorm
from rl_training.data.replay.storage import ReplayBuffer


class _Config(Protocol):
    @property
    def normalize_observations(self) -> bool: ...


class Standardized:
    """Part of a learner: statistics are taken once and are part of its state."""

    config: _Config
    network_names: ClassVar[tuple[str, ...]]
    num_seeds: int
    device: torch.device

    def setup_statistics(self) -> None:
        """Create the statistics: mean 0 and variance 1 until data is seen."""
        obs_dim: int = getattr(self, self.network_names[0]).obs_dim
        self.obs_norm = RunningNorm(self.num_seeds, (obs_dim,), self.device)

    @property
    def normalizes(self) -> bool:
        """Whether the networks see standardised observations."""
        return self.config.normalize_observations

    def see_data(self, buffer: ReplayBuffer) -> None:
        """Take mean and variance of the observations as batches will show them."""
        if self.normalizes:
            for rows, weight in buffer.observation_blocks():
                self.obs_norm.update(rows.expand(self.num_seeds, -1, -1).float(), weight)

    def normalize(self, obs: Tensor) -> Tensor:
        """Standardise observations `[S, B, ...]` when asked to."""
        return self.obs_norm(obs) if self.normalizes else obs

    def normalized(self, batch: TransitionBatch) -> TransitionBatch:
        """Standardise the observations of a batch when asked to."""
        if not self.normalizes:
            return batch
        return replace(
            batch, obs=self.normalize(batch.obs), next_obs=self.normalize(batch.next_obs)
        )

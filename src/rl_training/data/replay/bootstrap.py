"""Draws batches from resamples of a dataset's episodes, one resample per member.

Shapes: S members, B batch, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_training.data.batch import TransitionBatch
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.replay.dataset import LARGEST, DatasetBuffer
from rl_training.rng import Rng


class EpisodeBootstrap(DatasetBuffer):
    """Each member sees E episodes drawn with replacement, and draws their rows uniformly.

    Episodes, not rows: rows of one episode are not independent (Hanna et al., 2017).  Weights of a
    mix play no part; every row of the resample is equally likely.
    """

    def __init__(
        self,
        dataset: OfflineDataset,
        *,
        seeds: Sequence[int],
        gamma: float,
        device: torch.device | str = "cpu",
    ) -> None:
        """Copy the rows to the device and draw the episodes.

        Args:
            dataset: Transitions in learner units.
            seeds: One per member; a member's draws are the same alone or in a group.
            gamma: Discount that `sample` puts into the batch.
            device: Where the rows live and batches are made.
        """
        super().__init__(dataset, seeds=seeds, gamma=gamma, device=device)
        count = dataset.num_episodes
        self.episodes = Rng(seeds, "bootstrap", self.device).integers(count, count)  # [S, E]
        self._stops = torch.from_numpy(dataset.episode_stops).to(self.device)  # [E]
        lengths = torch.from_numpy(dataset.episode_lengths()).to(self.device)
        self._totals = lengths[self.episodes].cumsum(1)  # [S, E], rows up to each episode's end

    def sample(self, batch_size: int) -> TransitionBatch:
        """Draw rows of each member's resample uniformly, with replacement."""
        draw = self.rng.integers(LARGEST, batch_size) % self._totals[:, -1:]  # [S, B]
        place = torch.searchsorted(self._totals, draw, right=True)
        left = self._totals.gather(1, place) - draw  # rows to the end of the episode, at least 1
        return self.gather(self._stops[self.episodes.gather(1, place)] - left)

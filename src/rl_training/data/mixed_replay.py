"""Replay whose batches hold rows of a fixed dataset beside rows of the run's own experience.

Every batch has the same share of each (symmetric sampling, Sec. 4.1 of arXiv:2302.02948), the
dataset's rows first.  As long as there is no experience, batches hold rows of the dataset alone.

Shapes: S seeds, B batch, n environments per seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.dataset_buffer import DatasetBuffer
from rl_training.data.prioritized_replay import PrioritizedReplayBuffer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.state import require_same_keys


class WithPrior(ReplayBuffer):
    """Part of a buffer: rows are the run's own, and batches are completed from `prior`.

    A checkpoint holds the own rows, and of the dataset its digest.
    """

    read_only = (*ReplayBuffer.read_only, *(f"prior.{name}" for name in DatasetBuffer.read_only))

    def __init__(self, *arguments: Any, prior: DatasetBuffer, prior_ratio: float, **options: Any):
        """Allocate the storage.

        Args:
            *arguments: As for `ReplayBuffer`.
            prior: The dataset, for as many seeds and with the same discount and number of steps;
                its draws come from this buffer's randomness from now on.
            prior_ratio: Share of a batch that is drawn from it.
            **options: As for `ReplayBuffer` or its prioritized kind.
        """
        super().__init__(*arguments, **options)
        assert (prior.num_seeds, prior.gamma, prior.n_step) == (
            self.num_seeds,
            self.gamma,
            self.n_step,
        )
        assert not prior.is_mapped, "rows on disk are drawn outside of updates, own rows inside"
        self.prior, self.prior_ratio, self.notes = prior, prior_ratio, prior.notes
        self.data_shape = prior.data_shape
        # New rewards on the scale of the dataset's, whose factor may have been found in the data.
        self.reward_scale, self.reward_shift = prior.reward_scale, prior.reward_shift
        # One source of randomness: two of the same seeds and stream would draw the same numbers.
        prior.rng = self.rng

    def prior_rows(self, batch_size: int) -> int:
        """Return how many rows of a batch come from the dataset."""
        return round(batch_size * self.prior_ratio) if len(self) else batch_size

    def sample(self, batch_size: int) -> TransitionBatch:
        """Draw the dataset's share of a batch, then the rest from the run's own rows."""
        from_prior = self.prior_rows(batch_size)
        if from_prior == 0:
            return super().sample(batch_size)
        prior = self.prior.sample(from_prior)
        if from_prior == batch_size:
            return prior
        return _joined(prior, super().sample(batch_size - from_prior))

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Take new priorities of a batch's own rows; the dataset's, which come first, have none."""
        first = self.prior_rows(index.shape[1])
        if first < index.shape[1]:
            super().update_priorities(index[:, first:], priority[:, first:])

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows."""
        return super().state_dict() | {"prior_digest": self.prior.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything but the rows.

        Raises:
            CheckpointError: When the run was on other data.
        """
        require_same_keys(self.state_dict(), state, type(self).__name__)
        self.prior.require_digest(state["prior_digest"])
        super().load_state_dict(state)


class MixedReplayBuffer(WithPrior):
    """Uniform draws from both."""


class MixedPrioritizedReplayBuffer(WithPrior, PrioritizedReplayBuffer):
    """Uniform draws from the dataset, prioritized ones from the run's own rows."""


def _joined(prior: TransitionBatch, own: TransitionBatch) -> TransitionBatch:
    """Put two batches side by side; rows without an importance weight weigh 1."""

    def both(first: Tensor, second: Tensor) -> Tensor:
        return torch.cat((first, second), 1)

    assert prior.index is not None
    assert own.index is not None
    return TransitionBatch(
        obs=both(prior.obs, own.obs),
        action=both(prior.action, own.action),
        reward=both(prior.reward, own.reward),
        next_obs=both(prior.next_obs, own.next_obs),
        discount=both(prior.discount, own.discount),
        weight=None if own.weight is None else both(torch.ones_like(prior.reward), own.weight),
        index=both(prior.index, own.index),
    )

"""Draws batches from a fixed dataset that all seeds share.

Shapes: S seeds, B batch, N rows, P sources of a mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.replay_buffer import Array, ReplayBuffer
from rl_training.errors import CheckpointError
from rl_training.state import require_same_keys

LARGEST = 2**31 - 1


class DatasetBuffer(ReplayBuffer):
    """The rows of a dataset on the learner's device; a checkpoint holds their digest alone."""

    read_only = (*ReplayBuffer.read_only, "_shares", "_starts", "_lengths")

    def __init__(
        self,
        dataset: OfflineDataset,
        *,
        seeds: Sequence[int] = (0,),
        gamma: float = 0.99,
        n_step: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Copy the rows to the device.

        Args:
            dataset: Transitions in learner units.
            seeds: Seeds of the sampling, one per member of the group.
            gamma: Discount that `sample` puts into the batch.
            n_step: Rewards summed before the bootstrap.
            device: Where the rows live and batches are made.
        """
        assert dataset.learner_units, "map the dataset's actions to learner units first"
        super().__init__(
            len(dataset),
            dataset.observations.shape[1:],
            dataset.actions.shape[1:],
            action_dtype=torch.int64 if dataset.is_discrete else torch.float32,
            obs_dtype=torch.uint8 if dataset.observations.dtype == np.uint8 else torch.float32,
            seeds=seeds,
            gamma=gamma,
            n_step=n_step,
            device=device,
            shared=True,
        )
        self._digest = dataset.digest()
        columns: dict[str, Array] = {
            "obs": dataset.observations,
            "action": dataset.actions,
            "next_obs": dataset.next_observations,
            "reward": dataset.rewards,
            "continues": ~dataset.terminations,
            "truncated": dataset.truncations,
        }
        for name, rows in self.rows.items():
            rows[0].copy_(torch.from_numpy(np.array(columns[name])))
        self.set_inserted(len(dataset))
        parts = dataset.parts
        weight = torch.tensor([part.weight for part in parts], dtype=torch.float64)
        self._shares = (weight / weight.sum()).cumsum(0)[:-1].float().to(self.device)  # [P - 1]
        self._starts = torch.tensor([part.start for part in parts], device=self.device)  # [P]
        lengths = [part.stop - part.start for part in parts]
        self._lengths = torch.tensor(lengths, device=self.device)
        scale = len(dataset) / sum(part.weight for part in parts)
        self._parts = [(slice(part.start, part.stop), part.weight * scale) for part in parts]

    def sample(self, batch_size: int) -> TransitionBatch:
        """Draw a source by weight and a row of it uniformly, with replacement."""
        if self._lengths.shape[0] == 1:
            return super().sample(batch_size)
        return self.gather(self._mixed(batch_size))

    def _mixed(self, batch_size: int) -> Tensor:
        source = torch.searchsorted(self._shares, self.rng.uniform(batch_size), right=True)
        row = self.rng.integers(LARGEST, batch_size) % self._lengths[source]
        return self._starts[source] + row

    def parts(self) -> list[tuple[slice, float]]:
        """Return the rows of every source with its weight; the weights add up to all rows."""
        return self._parts

    segment_range = None  # type: ignore[assignment]  # rows are not part of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampling, and which data it is of."""
        return {"rng": self.rng.state_dict(), "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sampling.

        Raises:
            CheckpointError: When the run was on other data.
        """
        require_same_keys(self.state_dict(), state, type(self).__name__)
        if state["digest"] != self._digest:
            raise CheckpointError(
                "the dataset is not the one this run was trained on: its contents have another "
                f"digest ({self._digest[:12]} instead of {state['digest'][:12]}); bring it back, "
                "or start a new run"
            )
        self.rng.load_state_dict(state["rng"])

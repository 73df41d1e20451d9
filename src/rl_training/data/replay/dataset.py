"""Draws batches from a fixed dataset that all seeds share.

Shapes: S seeds, B batch, N rows, P sources of a mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_training.data.datasets.blank import UNCOUNTED, BlankRows, DatasetShape
from rl_training.data.datasets.blocks import Index, RowSource, blocks
from rl_training.data.replay.returns import dataset_returns
from rl_training.data.replay.storage import Array, Fields, ReplayBuffer
from rl_training.errors import CheckpointError
from rl_training.rng import Rng

LARGEST = 2**31 - 1
FIELDS = {
    "obs": "observations",
    "action": "actions",
    "next_obs": "next_observations",
    "reward": "rewards",
    "continues": "terminations",
    "truncated": "truncations",
    "next_action": "actions",
    "return_to_go": "rewards",
}
"""Columns that the fields of a batch are made of."""


def read_field(source: RowSource, field: str, rows: Index) -> Array:
    """Return rows of a field of a batch."""
    if field == "next_action":
        index = np.arange(*rows.indices(len(source))) if isinstance(rows, slice) else rows
        # The last row always ends an episode, so what it reads here is masked.
        rows = np.minimum(index + 1, len(source) - 1)
    values = source.read(FIELDS[field], rows)
    return ~values if field == "continues" else values


class DatasetBuffer(ReplayBuffer):
    """The rows of a dataset on the learner's device; a checkpoint holds their digest alone."""

    read_only = (*ReplayBuffer.read_only, "_shares", "_starts", "_lengths")
    foreseeable = False
    is_mapped: ClassVar[bool] = False
    """Whether rows stay where they are, so that batches are drawn outside of compiled updates."""

    def __init__(
        self,
        dataset: RowSource,
        *,
        seeds: Sequence[int] = (0,),
        gamma: float = 0.99,
        n_step: int = 1,
        next_actions: bool = False,
        returns_to_go: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Copy the rows to the device.

        Args:
            dataset: Transitions in learner units.
            seeds: Seeds of the sampling, one per member of the group.
            gamma: Discount that `sample` puts into the batch.
            n_step: Rewards summed before the bootstrap.
            next_actions: Put the action that follows a transition into the batch; the rows must be
                in time order.
            returns_to_go: Put the discounted rewards to the end of the episode into the batch; the
                rows must be in time order.
            device: Where the rows live and batches are made.
        """
        self._keeps_next_actions = next_actions
        if next_actions:
            self._successor_fields = ("next_obs", "next_action", "continues", "truncated")
        self.keeps_returns = returns_to_go
        if returns_to_go:
            self._own_fields = ("obs", "action", "return_to_go")
            blank = isinstance(dataset, BlankRows)
            self._returns = np.zeros(len(dataset)) if blank else dataset_returns(dataset, gamma)
        assert dataset.learner_units, "map the dataset's actions to learner units first"
        obs, action = dataset.kind("observations"), dataset.kind("actions")
        super().__init__(
            len(dataset),
            obs.shape,
            action.shape,
            action_dtype=torch.int64 if action.dtype.kind == "i" else torch.float32,
            obs_dtype=torch.uint8 if obs.dtype == np.uint8 else torch.float32,
            seeds=seeds,
            gamma=gamma,
            n_step=n_step,
            device=device,
            shared=True,
        )
        self._digest = dataset.digest()
        self.notes = dataset.notes
        self.reward_scale, self.reward_shift = dataset.reward_scale, dataset.reward_shift
        self.data_shape: DatasetShape = DatasetShape(
            # What is drawn outside does not depend on the number of rows.
            rows=max(UNCOUNTED, n_step) if self.is_mapped else len(dataset),
            parts=len(dataset.parts),
            obs_shape=obs.shape,
            obs_dtype=str(obs.dtype),
            action_shape=action.shape,
            action_dtype=str(action.dtype),
            mapped=self.is_mapped,
        )
        self._take(dataset)
        self.set_inserted(len(dataset))
        parts = dataset.parts
        weight = torch.tensor([part.weight for part in parts], dtype=torch.float64)
        self._shares = (weight / weight.sum()).cumsum(0)[:-1].float().to(self.device)  # [P - 1]
        self._starts = torch.tensor([part.start for part in parts], device=self.device)  # [P]
        lengths = [part.stop - part.start for part in parts]
        self._lengths = torch.tensor(lengths, device=self.device)
        scale = len(dataset) / sum(part.weight for part in parts)
        self._parts = [(slice(part.start, part.stop), part.weight * scale) for part in parts]

    def _fields(
        self,
        obs: tuple[tuple[int, ...], torch.dtype],
        action: tuple[tuple[int, ...], torch.dtype],
    ) -> Fields:
        """Return what a row holds; what follows it too, so that a batch is still one gather."""
        fields = dict(super()._fields(obs, action))
        # First: the scalars must stay the table's last columns.
        if self._keeps_next_actions:
            fields = {"next_action": action, **fields}
        return {"return_to_go": ((), torch.float32), **fields} if self.keeps_returns else fields

    def _return_to_go(self, table: Tensor, flat: Tensor) -> dict[str, Tensor]:
        """Return what came of a row in the data."""
        if not self.keeps_returns:
            return {}
        return {"return_to_go": self._field("return_to_go", table, flat)}

    def _next_action(self, table: Tensor, flat: Tensor) -> dict[str, Tensor]:
        """Return the action of the row after, and whether that row is of the same episode."""
        if not self._keeps_next_actions:
            return {}
        continues = self._field("continues", table, flat)
        mask = continues * (1 - self._field("truncated", table, flat))
        action = self._field("next_action", table, flat)
        return {"next_action": action, "next_action_mask": mask}

    def _take(self, dataset: RowSource) -> None:
        """Copy the rows, block by block."""
        if isinstance(dataset, BlankRows):
            return
        for field, rows in self.rows.items():
            for block in blocks(len(dataset), dataset.kind(FIELDS[field]).row_bytes):
                values = np.array(self._read(dataset, field, block))
                rows[0, block].copy_(torch.from_numpy(values))

    def _read(self, dataset: RowSource, field: str, rows: Index) -> Array:
        """Return rows of a field, the one that was computed here among them."""
        if field == "return_to_go":
            return self._returns[rows]
        return read_field(dataset, field, rows)

    def draw_rows(self, rng: Rng, batch_size: int) -> Tensor:
        """Draw a source by weight and a row of it uniformly, with replacement."""
        if self._lengths.shape[0] == 1:
            return super().draw_rows(rng, batch_size)
        source = torch.searchsorted(self._shares, rng.uniform(batch_size), right=True)
        row = rng.integers(LARGEST, batch_size) % self._lengths[source]
        return self._starts[source] + row

    def parts(self) -> list[tuple[slice, float]]:
        """Return the rows of every source with its weight; the weights add up to all rows."""
        return self._parts

    segment_range = None  # type: ignore[assignment]  # rows are not part of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampling, and which data it is of."""
        return {"rng": self.rng.state_dict(), "digest": self._digest}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.require_digest(state["digest"])
        self.rng.load_state_dict(state["rng"])

    @property
    def digest(self) -> str:
        """Digest of the data."""
        return self._digest

    def require_digest(self, saved: str) -> None:
        """Check that a run was on this data.

        Raises:
            CheckpointError: When it was on other data.
        """
        if saved != self._digest:
            raise CheckpointError(
                "the dataset is not the one this run was trained on: its contents have another "
                f"digest ({self._digest[:12]} instead of {saved[:12]}); bring it back, "
                "or start a new run"
            )

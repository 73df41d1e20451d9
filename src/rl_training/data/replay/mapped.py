"""Draws batches from a dataset that stays on disk.

Rows are drawn on the host by the same numbers as `DatasetBuffer` draws them anywhere, and changed
to learner units as they are read, so that a run is bit-exact with it on a CPU.  A thread reads
the next batches while the learner is busy.  It is of no account in a checkpoint: the counter of
the random numbers moves when a batch is handed out, not when it is read.

Shapes: S seeds, B batch, R rows read at once.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.datasets.blocks import RowSource
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.rng import Rng

AHEAD = 2
"""Batches that are read before they are asked for."""


@dataclass(frozen=True)
class _Ordered:
    """A batch that is being read, and the state of the random numbers before and after it."""

    before: int
    after: int
    size: int
    batch: Future[TransitionBatch]


class MappedBuffer(DatasetBuffer):
    """The rows of a dataset where they lie; batches go to the learner's device."""

    is_mapped: ClassVar[bool] = True
    drawn_outside = True

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
        """Open the dataset; arguments as of `DatasetBuffer`."""
        self.dataset = dataset
        self.batch_device = torch.device(device)
        super().__init__(
            dataset,
            seeds=seeds,
            gamma=gamma,
            n_step=n_step,
            next_actions=next_actions,
            returns_to_go=returns_to_go,
            device="cpu",
        )
        self._ahead = Rng(seeds, "replay")
        self._ordered: deque[_Ordered] = deque()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="dataset")

    def _allocate(self) -> None:
        self.rows = {}
        self._loose = {}

    def _take(self, dataset: RowSource) -> None:
        """Leave the rows where they are."""

    def sample(self, batch_size: int) -> TransitionBatch:
        """Hand out the next batch and order another."""
        here = int(self.rng.counter)
        if not self._ordered or (here, batch_size) != (
            self._ordered[0].before,
            self._ordered[0].size,
        ):
            self._ordered.clear()
            self._ahead.load_state_dict(self.rng.state_dict())
        while len(self._ordered) <= AHEAD:
            self._ordered.append(self._order(batch_size))
        first = self._ordered.popleft()
        batch = first.batch.result()
        self.rng.counter.fill_(first.after)
        # Sent from this thread: another one must not touch a device while a graph is captured.
        return send(batch, self.batch_device)

    def _order(self, batch_size: int) -> _Ordered:
        before = int(self._ahead.counter)
        index = self.draw_rows(self._ahead, batch_size)
        after = int(self._ahead.counter)
        return _Ordered(before, after, batch_size, self._reader.submit(self.gather, index))

    def example(self, batch_size: int) -> TransitionBatch:
        """Return a batch of rows spread over the dataset, the same every time."""
        rows = torch.arange(batch_size) * max(1, len(self) // batch_size) % len(self)
        return send(self.gather(rows.expand(self.num_seeds, -1)), self.batch_device)

    def _observations(self, rows: slice) -> Tensor:
        values = np.array(self._read(self.dataset, "obs", rows))
        return torch.from_numpy(values).unsqueeze(0).to(self.batch_device)

    def _table_rows(self, flat: Tensor, fields: Sequence[str]) -> Tensor:
        table = torch.empty(flat.shape[0], self._width)
        array, rows = table.numpy(), flat.numpy()
        for field in fields:
            if field in self._columns:
                place = array[:, self._columns[field]]
                place[...] = self._read(self.dataset, field, rows).reshape(place.shape)
        return table

    def _scalar_rows(self, flat: Tensor) -> Tensor:
        rows = flat.numpy()
        fields = ("reward", "continues", "truncated")
        columns = [self._read(self.dataset, field, rows) for field in fields]
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32, copy=False))

    def _loose_rows(self, name: str, flat: Tensor) -> Tensor:
        return torch.from_numpy(self._read(self.dataset, name, flat.numpy()))

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the sampling; what was read ahead is forgotten."""
        super()._restore(state)
        self._ordered.clear()


def send(batch: TransitionBatch, device: torch.device) -> TransitionBatch:
    """Move a batch in one transfer."""
    if device.type == "cpu":
        return batch

    def transfer(packed: Tensor) -> Tensor:
        pinned = packed.pin_memory() if device.type == "cuda" else packed
        return pinned.to(device, non_blocking=True)

    return packed_through(batch, transfer)


def packed_through(batch: TransitionBatch, transfer: Callable[[Tensor], Tensor]) -> TransitionBatch:
    """Pass all tensors of a batch through `transfer` as one row of bytes."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    tensors = {name: value for name, value in fields.items() if value is not None}
    # The widest numbers first, so that each begins at a multiple of its own width.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    flat = [tensors[name].contiguous().view(-1).view(torch.uint8) for name in order]
    there = torch.split(transfer(torch.cat(flat)), [part.numel() for part in flat])
    moved = {
        name: part.view(tensors[name].dtype).view(tensors[name].shape)
        for name, part in zip(order, there, strict=True)
    }
    return dataclasses.replace(batch, **moved)

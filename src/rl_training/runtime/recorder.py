"""Averages of metrics between two log lines; tensors stay on the device until one transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import UpdateResult
from rl_training.state import Counter, StateDict, copy_tensor, require_same_keys

FOLD_AFTER = 128
"""Updates whose metrics are kept as they are before they are added up in one operation."""
MOST_AT_ONCE = 8
"""Updates whose metrics one captured graph may keep."""

_NEVER = 2**62


class MetricRecorder:
    """Running sums of an algorithm's declared metrics, `[S, M]`.

    An update only appends its tensors to lists: to average and add them one update at a time would
    cost a small learner a tenth of its time.  The lists are folded after a fixed number of updates
    and never for a checkpoint, so that saving more often cannot change a sum.
    """

    def __init__(self, names: Sequence[str], num_seeds: int, device: torch.device) -> None:
        self.names = tuple(names)
        self.sums = torch.zeros(num_seeds, len(self.names), dtype=torch.float64, device=device)
        self.updates = Counter()
        self.total_gradient_steps = Counter()
        self._pending: list[list[Tensor]] = [[] for _ in self.names]  # [S] or [S, B] each
        self._rows: list[Tensor] = []  # [P, S, M] each
        self._num_rows = 0
        # Where captured graphs keep their rows: a count of the device says which is next.
        self._kept = torch.zeros(0, device=device)
        self._kept_count = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_kept = 0
        self._restored = self._none_pending()
        self._folded = 0
        self._first_bad = torch.full(self.sums.shape, _NEVER, dtype=torch.int64, device=device)

    def _none_pending(self) -> Tensor:
        return self.sums.new_zeros(self.sums.shape[0], 0, self.sums.shape[1])

    def record(self, result: UpdateResult) -> None:
        """Take in the metrics of one update, without reading them."""
        tensors = result.metrics.tensors
        for name, pending in zip(self.names, self._pending, strict=True):
            pending.append(tensors[name])
        self.updates.value += 1
        self.total_gradient_steps.value += result.num_gradient_steps
        self._fold_when_due()

    def record_rows(self, rows: Tensor) -> None:
        """Take in the means of several updates `[P, S, M]`, one gradient step each."""
        self._rows.append(rows)
        self.updates.value += rows.shape[0]
        self.total_gradient_steps.value += rows.shape[0]
        self._num_rows += rows.shape[0]
        self._fold_when_due()

    def prepare_keeping(self) -> None:
        """Allocate what `keep` writes to, before it is captured."""
        if not len(self._kept):
            places = FOLD_AFTER + MOST_AT_ONCE
            # Programs may arrive while the run acts, and updates could not write to its tensors.
            with torch.inference_mode(False):
                self._kept = torch.zeros(places, *self.sums.shape, device=self.sums.device)

    def keep(self, row: Tensor) -> None:
        """Keep the means of one update `[S, M]`: device work only, so that it can be captured.

        Whoever replays the graph tells `count_kept` how many there were.
        """
        self._kept.index_copy_(0, self._kept_count, row.unsqueeze(0))
        self._kept_count += 1

    def count_kept(self, count: int) -> None:
        """Count updates whose means were kept, one gradient step each."""
        self._num_kept += count
        self.updates.value += count
        self.total_gradient_steps.value += count
        self._fold_when_due()

    @property
    def _num_waiting(self) -> int:
        """Updates that are not added up yet."""
        before = len(self._pending[0]) + self._restored.shape[1]
        return before + self._num_rows + self._num_kept

    def _fold_when_due(self) -> None:
        if self._num_waiting >= FOLD_AFTER:
            self._fold()

    def _fold(self) -> None:
        means = self._means()
        self.sums += means.sum(1)
        # Which update was the first to go wrong; nothing is read, that is for the error to do.
        number = torch.arange(1, means.shape[1] + 1, device=means.device).view(1, -1, 1)
        found = torch.where(means.isfinite(), _NEVER, number + self._folded).amin(1)
        self._first_bad = torch.minimum(self._first_bad, found)
        self._folded += means.shape[1]
        self._drop_waiting()
        self._restored = self._none_pending()

    def _drop_waiting(self) -> None:
        self._pending = [[] for _ in self.names]
        self._rows, self._num_rows = [], 0
        if self._num_kept:
            self._num_kept = 0
            self._kept_count.zero_()

    def _means(self) -> Tensor:
        """The metrics not yet added up, averaged over the batch, `[S, P, M]`.

        In double precision the mean of single-precision numbers does not depend on their grouping.
        """
        parts = [self._restored]
        if self._pending[0]:
            columns = [torch.stack(pending).double() for pending in self._pending]
            means = [c if c.ndim == 2 else c.flatten(2).mean(-1) for c in columns]  # [P, S]
            parts.append(torch.stack(means, -1).transpose(0, 1))
        if self._rows:
            parts.append(torch.cat(self._rows).double().transpose(0, 1))
        if self._num_kept:
            parts.append(self._kept[: self._num_kept].double().transpose(0, 1))
        return torch.cat(parts, 1)

    def flush(self) -> list[dict[str, float]]:
        """Return the averages of each seed since the last flush, and begin again."""
        if self.updates.value == 0:
            return [{} for _ in self.sums]
        if self._num_waiting:  # none are where the last update of the window filled the lists
            self._fold()
        rows = (self.sums / self.updates.value).tolist()
        self.sums.zero_()
        self.updates.value = 0
        return [dict(zip(self.names, row, strict=True)) for row in rows]

    def first_bad(self) -> list[dict[str, int]]:
        """Return, for each seed, the first update whose metric was not finite, by metric.

        Updates are counted from where this process took the run up, and read from the device.
        """
        return [
            {name: at for name, at in zip(self.names, row, strict=True) if at != _NEVER}
            for row in self._first_bad.tolist()
        ]

    def state_dict(self) -> StateDict:
        """Return sums, counts and what is not yet added up."""
        return {
            "sums": self.sums,
            "pending": self._means(),
            "updates": self.updates.state_dict(),
            "total_gradient_steps": self.total_gradient_steps.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
        require_same_keys(self.state_dict(), state, type(self).__name__)
        copy_tensor(self.sums, state["sums"], "recorder.sums")
        self._restored = state["pending"].to(self.sums.device)
        self._drop_waiting()
        self.updates.load_state_dict(state["updates"])
        self.total_gradient_steps.load_state_dict(state["total_gradient_steps"])

"""Averages of metrics between two log lines; tensors stay on the device until one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_training.algorithms.base import UpdateResult
from rl_training.state import Counter, Stateful


class MetricRecorder(Stateful):
    """Running sums of an algorithm's declared metrics, `[S, M]`."""

    def __init__(self, names: Sequence[str], num_seeds: int, device: torch.device) -> None:
        self.names = tuple(names)
        self.sums = torch.zeros(num_seeds, len(self.names), dtype=torch.float64, device=device)
        self.updates = Counter()
        self.total_gradient_steps = Counter()

    def record(self, result: UpdateResult) -> None:
        """Add the metrics of one update, without reading them."""
        tensors = result.metrics.tensors
        self.sums += torch.stack([tensors[name] for name in self.names], 1)
        self.updates.value += 1
        self.total_gradient_steps.value += result.num_gradient_steps

    def flush(self) -> list[dict[str, float]]:
        """Return the averages of each seed since the last flush, and start anew."""
        if self.updates.value == 0:
            return [{} for _ in self.sums]
        rows = (self.sums / self.updates.value).tolist()
        self.sums.zero_()
        self.updates.value = 0
        return [dict(zip(self.names, row, strict=True)) for row in rows]

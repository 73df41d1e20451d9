"""What an update gives back.  Shapes: S seeds, B batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


class Metrics(Mapping[str, float]):
    """Named results of an update: tensors `[S]` or `[S, B]` inside, their mean when read.

    Reading synchronises with the device, and only reading does; loops use `tensors`.  Means over a
    batch are left to whoever reads, who does many at once.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {
            name: tensor.detach() if tensor.requires_grad else tensor
            for name, tensor in tensors.items()
        }

    def __getitem__(self, name: str) -> float:
        return float(self.tensors[name].float().mean())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"


@dataclass(slots=True, kw_only=True)
class UpdateResult:
    """What one call of `update` did."""

    metrics: Metrics
    num_gradient_steps: int = 1
    priority: Tensor | None = None
    """New priorities of the sampled rows `[S, B]`; the loop hands them to the replay buffer."""


@dataclass(slots=True)
class StepOutput:
    """What an algorithm's `step` returns; metrics are tensors `[S]` or `[S, B]`."""

    metrics: dict[str, Tensor]
    priority: Tensor | None = None
    num_gradient_steps: int = 1

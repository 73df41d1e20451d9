"""Runs a function eagerly and compiled from the same state, and says how far they differ.

Where a function draws categories, or otherwise decides by comparing numbers, rounding alone can
change much of its result; `effect_of_rounding` says how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.runtime.compile.cache import Program
from rl_training.runtime.compile.trace import Source, flatten, owned_tensors, tensor_randomness


class Undo:
    """Puts the tensors that a source may change back to what they are now."""

    def __init__(self, source: Source) -> None:
        frozen = tuple(
            f"{name}.{attribute}"
            for name, owner in source.owners.items()
            for attribute in getattr(owner, "read_only", ())
        )
        self.tensors = {
            path: tensor.detach()
            for path, tensor in owned_tensors(source.owners).items()
            if not path.startswith(frozen)
        }
        self.before = {path: tensor.clone() for path, tensor in self.tensors.items()}

    def __call__(self) -> None:
        """Restore them."""
        for path, tensor in self.tensors.items():
            tensor.copy_(self.before[path])


@dataclass(frozen=True)
class Gap:
    """The largest relative difference between two ways to do the same."""

    where: str
    size: float

    def __str__(self) -> str:
        return f"{self.where} by {self.size:.2g} of its change"


def compare(source: Source, program: Program, arguments: Sequence[Any]) -> Gap | None:
    """Run both ways from the same state, restore it, and return where they differ most."""
    undo = Undo(source)
    with tensor_randomness(source.owners):
        outputs, _ = flatten(source.function(*arguments))
    eager = {path: tensor.clone() for path, tensor in undo.tensors.items()}
    eager_outputs = [output.detach().clone() for output in outputs]
    undo()
    compiled_outputs, _ = flatten(program(*arguments))
    gaps = [
        Gap(path, share * _distance(undo.tensors[path], eager[path], undo.before[path]))
        for path, share in _shares(source)
        if path in eager
    ]
    gaps += [
        Gap(f"output {index}", _distance(ours, theirs, torch.zeros_like(theirs), 0.1))
        for index, (ours, theirs) in enumerate(zip(compiled_outputs, eager_outputs, strict=True))
    ]
    undo()
    return max(gaps, key=lambda gap: gap.size, default=None)


@torch.no_grad()
def _disturb(source: Source, size: float) -> None:
    """Multiply parameters by 1 +- `size`, with the same signs at every call."""
    signs = torch.Generator().manual_seed(0)
    for tensor in owned_tensors(source.owners).values():
        if tensor.requires_grad:
            up = torch.rand(tensor.shape, generator=signs) < 0.5
            tensor.mul_(torch.where(up, 1 + size, 1 - size).to(tensor.device, tensor.dtype))


def effect_of_rounding(source: Source, arguments: Sequence[Any], size: float) -> float:
    """Return how far the eager function's result moves when its parameters are rounded.

    In the terms of `compare`, parameters themselves left out. The state is restored.

    Args:
        source: The function.
        arguments: What it is called with.
        size: The relative error of the numbers that it multiplies.
    """
    undo = Undo(source)

    def run() -> dict[str, Tensor]:
        with tensor_randomness(source.owners):
            outputs, _ = flatten(source.function(*arguments))
        owned = {p: tensor.clone() for p, tensor in undo.tensors.items() if p not in parameters}
        undo()
        return owned | {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}

    parameters = {p for p, t in owned_tensors(source.owners).items() if t.requires_grad}
    exact = run()
    _disturb(source, size)
    rounded = run()
    gaps = [
        _distance(rounded[path], tensor, undo.before[path])
        if path in undo.before
        else _distance(rounded[path], tensor, torch.zeros_like(tensor), 0.1)
        for path, tensor in exact.items()
    ]
    return max(gaps, default=0.0)


def _shares(source: Source) -> list[tuple[str, float]]:
    """Weight of each tensor in a comparison.

    Adam moves a parameter by its whole learning rate even where the gradient is only rounding; the
    moments, which are linear in the gradient, tell more.
    """
    owned = owned_tensors(source.owners)
    return [(path, 0.2 if tensor.requires_grad else 1.0) for path, tensor in owned.items()]


def _distance(ours: Tensor, theirs: Tensor, start: Tensor, least: float = 1e-4) -> float:
    """Size of the difference of two results, relative to the change from `start`.

    Changes below `least` of the numbers themselves count as that much: they are mostly rounding.
    """
    ours, theirs, start = ours.double(), theirs.double(), start.double()
    change = (theirs - start).norm()
    floor = least * (1 + theirs.norm())
    gap = float((ours - theirs).norm() / torch.maximum(change, floor))
    return gap if math.isfinite(gap) else math.inf

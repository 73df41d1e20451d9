"""Puts the networks of one learner into another, part by part, and says what went where.

A part is a network, a learned number such as the temperature, the statistics of observations, or an
optimizer. Counters and random numbers are none: a run that starts from a checkpoint is a new run.
Shapes: S seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.optim import Optimizer
from rl_training.data.normalizer import RunningNorm
from rl_training.errors import SpecMismatch
from rl_training.state import copy_tensor, tensors_in

Path = tuple[str, ...]
"""Where a tensor stands in a learner's state."""
NO_PARTS = ("rng", "last", "obs_norm")
"""Tensors that are never said to be left behind: statistics that count must fit, see `Origin`."""


@dataclass(frozen=True)
class TakenOver:
    """Names of the parts."""

    taken: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    """Parts of the new learner that the other one has not, or not of that shape (optimizers)."""
    left: list[str] = field(default_factory=list)
    """Parts of the other learner that the new one has no use for."""

    def __str__(self) -> str:
        lines = [f"{', '.join(self.taken)} taken over"]
        lines += [f"{', '.join(self.fresh)} starting fresh"] if self.fresh else []
        lines += [f"{', '.join(self.left)} left behind"] if self.left else []
        return "; ".join(lines)


def take_over(learner: AnyLearner, states: Sequence[Mapping[str, Any]]) -> TakenOver:
    """Copy what a learner has in common with the states of others, one per seed.

    Nothing is changed unless everything fits.

    Raises:
        SpecMismatch: When a network of the same name has another shape, or none is in common.
    """
    ours, theirs = _parts(learner), [tensors_in(state) for state in states]
    known = {_part_of(path) for path in theirs[0]}
    report = TakenOver()
    moved: set[int] = set()
    for name, tensors in ours.items():
        if name in known and _fits(name, tensors, theirs):
            report.taken.append(name)
            moved |= {id(tensor) for tensor in tensors.values()}
        else:
            report.fresh.append(name)
    for name, optimizer in _optimizers(learner).items():
        fits = {id(p) for p in optimizer.parameters} <= moved
        fits = fits and _same_shapes(tensors_in({name: optimizer.state_dict()}), theirs)
        (report.taken if fits else report.fresh).append(name)
    _require_networks(learner, report)
    _copy(learner, report.taken, theirs)
    others = known - ours.keys() - _optimizers(learner).keys() - set(NO_PARTS)
    report.left.extend(sorted(others))
    return report


def _parts(learner: AnyLearner) -> dict[str, dict[Path, Tensor]]:
    """Return the tensors of networks, learned numbers and statistics, by the name of the part."""
    found: dict[str, dict[Path, Tensor]] = {}
    for name, value in vars(learner).items():
        if isinstance(value, nn.Module):
            # Past `named_parameters`, whose tensors are those that optimizers hold.
            tensors = dict(value.named_parameters()) | dict(value.named_buffers())
            for key, tensor in tensors.items():
                found.setdefault(_part_of((name, key)), {})[name, key] = tensor
        elif isinstance(value, nn.Parameter):
            found[name] = {(name,): value}
        elif isinstance(value, RunningNorm) and learner.normalizes:
            found[name] = tensors_in({name: value.state_dict()})
    return found


def _part_of(path: Path) -> str:
    """Name the part a tensor belongs to: networks of a model by themselves, others as a whole."""
    return path[1].split(".")[0] if path[0] == "model" else path[0]


def _optimizers(learner: AnyLearner) -> dict[str, Optimizer]:
    return {name: value for name, value in vars(learner).items() if isinstance(value, Optimizer)}


def _same_shapes(tensors: Mapping[Path, Tensor], theirs: Sequence[Mapping[Path, Tensor]]) -> bool:
    """Whether the others have these tensors, of one seed each."""
    return all(
        path in other and other[path].shape[1:] == tensor.shape[1:]
        for path, tensor in tensors.items()
        for other in theirs
    )


def _fits(
    name: str, tensors: Mapping[Path, Tensor], theirs: Sequence[Mapping[Path, Tensor]]
) -> bool:
    """Whether a part can be taken; a network of the same name must fit."""
    there = {path: tensor for path, tensor in theirs[0].items() if _part_of(path) == name}
    if there.keys() == tensors.keys() and _same_shapes(tensors, theirs):
        return True
    for path in {**tensors, **there}:
        left, right = _shape_text(there.get(path)), _shape_text(tensors.get(path))
        if left != right:
            raise SpecMismatch(
                f"its {name} does not fit: {path[-1]} is {left} there and {right} here"
            )
    return False


def _shape_text(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(tuple(tensor.shape[1:]))


def _require_networks(learner: AnyLearner, report: TakenOver) -> None:
    networks = {
        _part_of((name, key)) for name in learner.network_names for key in _keys(learner, name)
    }
    if not networks & set(report.taken):
        raise SpecMismatch(
            f"it has no network in common with {type(learner).__name__}, which has "
            f"{', '.join(sorted(networks))}"
        )


def _keys(learner: AnyLearner, network: str) -> list[str]:
    return list(getattr(learner, network).state_dict())


def _copy(
    learner: AnyLearner, taken: Sequence[str], theirs: Sequence[Mapping[Path, Tensor]]
) -> None:
    """Copy in place the tensors of the parts named."""
    for path, target in tensors_in(learner.state_dict()).items():
        if _part_of(path) in taken:
            sources = [other[path] for other in theirs]
            stacked = torch.cat(sources) if target.ndim else sources[0]
            copy_tensor(target, stacked, ".".join(path))

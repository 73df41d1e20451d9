"""The sources of a run as learners see them: rows are changed when they are read, not before.

Shapes: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import (
    COLUMNS,
    ColumnKind,
    Index,
    Part,
    blocks,
    digest_of,
    is_mapped,
)
from rl_training.data.datasets.dataset import (
    OfflineDataset,
    check_same_kind,
    normalizing_factor,
)
from rl_training.data.datasets.units import (
    TaskSpec,
    check_actions,
    check_fits,
    check_masks,
    to_learner_units,
)
from rl_training.data.rewards import scale_rewards

Array = NDArray[Any]
WIDE = ("observations", "next_observations", "actions")
"""Columns that must lie in files for a source to count as mapped; the others are small."""


@dataclass(frozen=True, kw_only=True)
class DatasetView:
    """Datasets one after the other: actions in learner units, rewards as settings ask for."""

    datasets: tuple[OfflineDataset, ...]
    """In the task's units, as they were loaded."""
    task: TaskSpec
    parts: tuple[Part, ...]
    name: str
    rescaling: tuple[tuple[float, float], ...] = ()
    """Factor and shift of rewards, one after the other."""
    notes: tuple[str, ...] = ()
    learner_units: bool = True

    def __len__(self) -> int:
        """Return the number of transitions."""
        return self.parts[-1].stop

    def kind(self, name: str) -> ColumnKind:
        """Return what the rows of a column are."""
        sizes = self.task.action_sizes
        if name == "actions" and sizes:  # floats in a dataset, which does not know their task
            return ColumnKind(np.dtype(np.int64), (len(sizes),))
        return self.datasets[0].kind(name)

    def read(self, name: str, rows: Index) -> Array:
        """Return rows of a column."""
        if len(self.datasets) == 1:
            return self._read(0, name, rows)
        index = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        kind = self.kind(name)
        found = np.empty((len(index), *kind.shape), kind.dtype)
        for number, part in enumerate(self.parts):
            inside = np.flatnonzero((index >= part.start) & (index < part.stop))
            if len(inside):
                found[inside] = self._read(number, name, index[inside] - part.start)
        return found

    def _read(self, number: int, name: str, rows: Index) -> Array:
        values = self.datasets[number].read(name, rows)
        if name == "actions":
            return to_learner_units(values, self.task)
        if name == "rewards":
            for factor, shift in self.rescaling:
                values = scale_rewards(values, factor, shift)
        return values

    def digest(self) -> str:
        """Return what the rows are recognised by; the same as that of `to_dataset`."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_of(self)

    @property
    def is_mapped(self) -> bool:
        """Whether a source lies in files, so that it need not fit into memory."""
        return any(all(is_mapped(getattr(d, name)) for name in WIDE) for d in self.datasets)

    @property
    def reward_scale(self) -> float:
        """Factor between the rewards of the sources and those that are read."""
        return math.prod((factor for factor, _ in self.rescaling), start=1.0)

    @property
    def reward_shift(self) -> float:
        """What has been added to them after that."""
        total = 0.0
        for factor, shift in self.rescaling:
            total = total * factor + shift
        return total

    def scaled(self, factor: float, shift: float = 0.0) -> DatasetView:
        """Return the view with rewards `factor * r + shift`."""
        if factor == 1.0 and shift == 0.0:
            return self
        return replace(self, rescaling=(*self.rescaling, (factor, shift)))

    def with_normalized_rewards(self) -> DatasetView:
        """Return the view with rewards x 1000 / (largest - smallest episode return)."""
        assert not self.rescaling, "the range of returns is that of the sources"
        self.require_episodes("normalize_rewards")
        returns = np.concatenate([dataset.episode_returns() for dataset in self.datasets])
        factor, note = normalizing_factor(returns, self.name)
        return replace(self.scaled(factor), notes=(*self.notes, note))

    def require_episodes(self, what: str) -> None:
        """Refuse data whose episodes cannot be told; `what` needs them.

        Raises:
            DataError: When the rows of a source are not in time order.
        """
        for dataset in self.datasets:
            dataset.require_episodes(what)

    def to_dataset(self) -> OfflineDataset:
        """Return the rows as arrays; columns that are not changed stay where they are."""
        columns: dict[str, Any] = {name: self._column(name) for name in COLUMNS}
        return OfflineDataset(
            **columns,
            name=self.name,
            source=" + ".join(dataset.source for dataset in self.datasets),
            env_id=self.task.env_id,
            notes=self.notes,
            parts=self.parts,
            learner_units=True,
            reward_scale=self.reward_scale,
            reward_shift=self.reward_shift,
            in_time_order=all(dataset.in_time_order for dataset in self.datasets),
        )

    def _column(self, name: str) -> Array:
        changed = name == "actions" or (name == "rewards" and self.rescaling)
        if len(self.datasets) == 1 and not changed:
            column: Array = getattr(self.datasets[0], name)
            return column
        kind = self.kind(name)
        made = np.empty((len(self), *kind.shape), kind.dtype)
        for block in blocks(len(self), kind.row_bytes):
            made[block] = self.read(name, block)
        return made


def view_of(
    datasets: Sequence[OfflineDataset],
    task: TaskSpec,
    *,
    clip: bool = False,
    weights: Sequence[float] | None = None,
) -> DatasetView:
    """Check datasets against a task and look at them as one.

    Args:
        datasets: At least one, with actions in the task's units.
        task: What they must fit.
        clip: Bring actions outside the action box back to its border, with a note.
        weights: How often each is drawn; None for a single one.

    Raises:
        DataError: When observations or actions do not fit the task or each other.
    """
    notes: list[str] = []
    for dataset in datasets:
        assert not dataset.learner_units
        check_fits(dataset.observations, dataset.actions, task, dataset.name)
        check_same_kind(datasets[0], dataset)
        note = check_actions(dataset.actions, task, dataset.name, clip=clip)
        check_masks(dataset.observations, dataset.actions, task, dataset.name)
        own = dataset.notes if note is None else (*dataset.notes, note)
        notes += own if len(datasets) == 1 else [f"{dataset.name}: {text}" for text in own]
    bounds = np.cumsum([0, *(len(d) for d in datasets)]).tolist()
    parts = tuple(
        Part(start=start, stop=stop, weight=weight, name=dataset.name)
        for dataset, start, stop, weight in zip(
            datasets, bounds[:-1], bounds[1:], weights or (1.0,), strict=True
        )
    )
    name = datasets[0].name if weights is None else "mix"
    return DatasetView(
        datasets=tuple(datasets), task=task, parts=parts, name=name, notes=tuple(notes)
    )

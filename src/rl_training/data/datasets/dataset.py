"""Recorded transitions: episode after episode, in time order.

Terminations and truncations are kept apart: a termination has no future, a truncation
has one, and `next_observations` holds its true first observation.

Shapes: N rows, A action entries, E episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import (
    CHUNK_ROWS,
    COLUMNS,
    ColumnKind,
    Index,
    Part,
    digest_of,
    kind_of_column,
    mean_and_deviation,
)
from rl_training.data.datasets.units import TaskSpec, check_fits, check_masks, learner_actions
from rl_training.data.rewards import scale_rewards
from rl_training.errors import DataError

Array = NDArray[Any]
RETURN_RANGE = 1000.0
"""Range of episode returns after `with_normalized_rewards`, as in IQL's code."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OfflineDataset:
    """Transitions in time order; arrays may be memory-mapped.

    A last episode that neither terminates nor is truncated is marked truncated, with a note: its
    last transition has a true successor, so nothing is lost.

    Raises:
        DataError: When columns do not fit together.
    """

    observations: Array
    """`[N, ...]`, float32, or uint8 for images."""
    actions: Array
    """`[N, A]` float32, or `[N]` int64 for discrete ones; in the task's units when loaded."""
    rewards: Array
    """`[N]` float32."""
    next_observations: Array = field(default=None)  # type: ignore[arg-type]  # made if not given
    """`[N, ...]`: true successors, at the ends of episodes too.  Left out, they are taken from the
    rows that follow; a truncated episode then loses its last row, whose successor is not known."""
    terminations: Array
    """`[N]` bool: the episode ended by the task's rules."""
    truncations: Array
    """`[N]` bool: the episode was cut; its future has a value."""
    name: str = "dataset"
    """What messages call it."""
    source: str = ""
    """Where it came from."""
    env_id: str | None = None
    """The task, where the source says so."""
    notes: tuple[str, ...] = ()
    """What was assumed or changed on the way, a sentence each."""
    parts: tuple[Part, ...] = ()
    """Sources of a mix; a dataset without a mix is one part."""
    learner_units: bool = False
    """Whether actions have been mapped to learner units."""
    reward_scale: float = 1.0
    """Factor that `scaled` has put on the rewards since they were loaded or joined."""
    reward_shift: float = 0.0
    """What `scaled` has added to them after that."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How it was made, where its file says so: recipe, seed, versions, reference returns."""
    in_time_order: bool = True
    """False where most rows are not followed by their successor: episodes mean nothing then."""

    def __post_init__(self) -> None:
        if getattr(self, "next_observations", None) is None:
            self._complete()
        _check_columns(self)
        if not self.parts:
            whole = Part(start=0, stop=len(self), name=self.name)
            object.__setattr__(self, "parts", (whole,))
        if not (self.terminations[-1] or self.truncations[-1]):
            cut = np.array(self.truncations)
            cut[-1] = True
            object.__setattr__(self, "truncations", cut)
            note = "the last episode has no end and was marked truncated"
            object.__setattr__(self, "notes", (*self.notes, note))

    def _complete(self) -> None:
        """Take successors from the following rows, and plain numbers as the dtypes of a dataset."""
        from rl_training.data.datasets.columns import RawData, assemble

        columns = {name: np.asarray(c) for name, c in self.columns() if c is not None}
        keys = {name: name for name in columns}
        raw = RawData(columns=columns, keys=keys, where=self.name, source=self.source)
        made = assemble(raw, mark_ends=False)
        for name, column in made.columns():
            object.__setattr__(self, name, column)
        object.__setattr__(self, "notes", (*self.notes, *made.notes))

    def __len__(self) -> int:
        """Return the number of transitions."""
        return len(self.rewards)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(int(column.nbytes) for _, column in self.columns())

    @property
    def is_discrete(self) -> bool:
        """Whether actions are discrete."""
        return self.actions.dtype.kind == "i"

    def columns(self) -> Iterator[tuple[str, Array]]:
        """Give every column with its name."""
        return ((name, getattr(self, name)) for name in COLUMNS)

    @property
    def ends(self) -> NDArray[np.bool_]:
        """`[N]`: rows that are the last of their episode."""
        return np.logical_or(self.terminations, self.truncations)

    @cached_property
    def episode_stops(self) -> NDArray[np.int64]:
        """`[E]`: the row after each episode."""
        return np.flatnonzero(self.ends) + 1

    @cached_property
    def episode_starts(self) -> NDArray[np.int64]:
        """`[E]`: the first row of each episode."""
        return np.concatenate([np.zeros(1, np.int64), self.episode_stops[:-1]])

    @property
    def num_episodes(self) -> int:
        """Number of episodes E."""
        return len(self.episode_stops)

    def episode_lengths(self) -> NDArray[np.int64]:
        """Return the number of steps of each episode, `[E]`."""
        return self.episode_stops - self.episode_starts

    def episode_returns(self) -> NDArray[np.float64]:
        """Return the sum of rewards of each episode, `[E]`."""
        found = []
        # Whole episodes at a time: a sum in double precision copies what it adds up.
        stops = np.searchsorted(self.episode_stops, range(CHUNK_ROWS, len(self), CHUNK_ROWS))
        for group in np.split(np.arange(self.num_episodes), np.unique(stops)):
            if len(group):
                start, stop = self.episode_starts[group[0]], self.episode_stops[group[-1]]
                rewards = np.asarray(self.rewards[start:stop], np.float64)
                found.append(np.add.reduceat(rewards, self.episode_starts[group] - start))
        return np.concatenate(found)

    def returns_to_go(self, gamma: float) -> NDArray[np.float32]:
        """Return the discounted sum of the rewards from each row to its episode's end, `[N]`.

        What would have come after a truncation is unknown and counts as zero.
        """
        result = np.array(self.rewards, dtype=np.float64)
        lengths = self.episode_lengths()
        order = np.argsort(-lengths, kind="stable")
        stops, lengths = self.episode_stops[order], lengths[order]
        # Backwards, all episodes at once: those with more than `back` rows come first.
        for back in range(1, int(lengths[0])):
            rows = stops[: np.searchsorted(-lengths, -back)] - 1 - back
            result[rows] += gamma * result[rows + 1]
        return result.astype(np.float32)

    def require_episodes(self, what: str) -> None:
        """Refuse data whose episodes are unknown.

        Args:
            what: What needs them, for the message.

        Raises:
            DataError: When the rows are not in time order.
        """
        if not self.in_time_order:
            raise DataError(
                f"{self.name}: {what} needs whole episodes, but at most rows the next observation "
                "is not that of the following row, so the rows are not in time order; bring them "
                f"into order, or do without {what}"
            )

    def kind(self, name: str) -> ColumnKind:
        """Return what the rows of a column are."""
        return kind_of_column(getattr(self, name))

    def read(self, name: str, rows: Index) -> Array:
        """Return rows of a column."""
        column: Array = getattr(self, name)
        # A plain view: indexing a mapped array as such is slow.
        return np.asarray(column)[rows]

    def digest(self) -> str:
        """Return the SHA-256 of rows and parts, of huge columns in samples; see `digest_of`."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_of(self)

    def slice(self, start: int, stop: int) -> OfflineDataset:
        """Return rows `start` to `stop` (excluded); a cut episode ends truncated."""
        if not 0 <= start < stop <= len(self):
            raise DataError(
                f"{self.name}: rows {start} to {stop} cannot be taken out of {len(self)} rows"
            )
        parts = tuple(
            replace(p, start=max(p.start, start) - start, stop=min(p.stop, stop) - start)
            for p in self.parts
            if p.start < stop and p.stop > start
        )
        columns: dict[str, Any] = {n: column[start:stop] for n, column in self.columns()}
        return replace(self, **columns, parts=parts)

    def scaled(self, reward_scale: float = 1.0, reward_shift: float = 0.0) -> OfflineDataset:
        """Return the dataset with rewards `reward_scale * r + reward_shift`."""
        if reward_scale == 1.0 and reward_shift == 0.0:
            return self
        return replace(
            self,
            rewards=scale_rewards(self.rewards, reward_scale, reward_shift),
            reward_scale=self.reward_scale * reward_scale,
            reward_shift=self.reward_shift * reward_scale + reward_shift,
        )

    def with_normalized_rewards(self) -> OfflineDataset:
        """Return the dataset with rewards x 1000 / (largest - smallest episode return).

        As the code of IQL (arXiv:2110.06169) does for locomotion.

        Raises:
            DataError: When all episodes have the same return, or cannot be told.
        """
        self.require_episodes("normalize_rewards")
        factor, note = normalizing_factor(self.episode_returns(), self.name)
        return replace(self.scaled(factor), notes=(*self.notes, note))

    def observation_statistics(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return mean and standard deviation of observations; parts count by their weight."""
        return mean_and_deviation(self.observations, self.parts)

    def in_learner_units(self, env_spec: TaskSpec, *, clip: bool = False) -> OfflineDataset:
        """Return the dataset with actions in learner units, checked against the task.

        Args:
            env_spec: The task.
            clip: Clip actions outside the action box, with a note.

        Raises:
            DataError: When observations or actions do not fit the task.
        """
        check_fits(self.observations, self.actions, env_spec, self.name)
        if self.learner_units:
            return self
        actions, note = learner_actions(self.actions, env_spec, self.name, clip=clip)
        check_masks(self.observations, self.actions, env_spec, self.name)
        notes = (*self.notes, note) if note else self.notes
        return replace(self, actions=actions, notes=notes, learner_units=True)


def normalizing_factor(returns: NDArray[np.float64], name: str) -> tuple[float, str]:
    """Return what `normalize_rewards` multiplies by, and a note.

    Raises:
        DataError: When all episodes have the same return.
    """
    width = float(returns.max() - returns.min())
    if not width > 0:
        raise DataError(
            f"{name}: normalize_rewards needs episodes of different returns, but all "
            f"{len(returns)} have {returns[0]:g}; use reward_scale instead"
        )
    factor = RETURN_RANGE / width
    return factor, f"rewards were multiplied by {factor:.6g} (1000 / range of returns {width:.6g})"


def concatenate(
    datasets: Sequence[OfflineDataset],
    weights: Sequence[float] | None = None,
    *,
    name: str = "mix",
) -> OfflineDataset:
    """Join datasets; each becomes a part that is drawn by its weight.

    Args:
        datasets: At least one, with observations and actions of the same shape and dtype.
        weights: One per dataset; None takes the number of rows, so that all rows are equally
            likely.
        name: Name of the result.

    Raises:
        DataError: When shapes or dtypes differ.
    """
    assert datasets, "at least one dataset"
    first = datasets[0]
    for other in datasets[1:]:
        check_same_kind(first, other)
    chosen = [float(len(d)) for d in datasets] if weights is None else list(weights)
    bounds = np.cumsum([0, *(len(d) for d in datasets)]).tolist()
    parts = tuple(
        Part(start=bounds[i], stop=bounds[i + 1], weight=chosen[i], name=dataset.name)
        for i, dataset in enumerate(datasets)
    )
    if len(datasets) == 1:
        return replace(first, name=name, parts=parts)
    columns: dict[str, Any] = {
        key: np.concatenate([getattr(d, key) for d in datasets]) for key in COLUMNS
    }
    return OfflineDataset(
        **columns,
        name=name,
        source=" + ".join(d.source for d in datasets),
        env_id=first.env_id,
        notes=tuple(f"{d.name}: {note}" for d in datasets for note in d.notes),
        parts=parts,
        learner_units=first.learner_units,
        in_time_order=all(d.in_time_order for d in datasets),
    )


def check_same_kind(first: OfflineDataset, other: OfflineDataset) -> None:
    """Check that two datasets can be mixed.

    Raises:
        DataError: When shapes or dtypes differ.
    """
    for key in ("observations", "actions"):
        left, right = getattr(first, key), getattr(other, key)
        if left.shape[1:] != right.shape[1:] or left.dtype != right.dtype:
            raise DataError(
                f"{other.name}: {key} are {right.dtype} of shape {right.shape[1:]}, but those of "
                f"{first.name} are {left.dtype} of shape {left.shape[1:]}; only data of one task "
                "can be mixed"
            )
    assert first.learner_units == other.learner_units


def _check_columns(dataset: OfflineDataset) -> None:
    """Check dtypes, axes and lengths."""
    if not len(dataset.rewards):
        raise DataError(f"{dataset.name}: it holds no transitions")
    allowed = {
        "observations": ("float32", "uint8"),
        "actions": ("float32", "int64"),
        "rewards": ("float32",),
        "next_observations": (str(dataset.observations.dtype),),
        "terminations": ("bool",),
        "truncations": ("bool",),
    }
    for name, column in dataset.columns():
        if str(column.dtype) not in allowed[name]:
            raise DataError(
                f"{dataset.name}: {name} must be {' or '.join(allowed[name])}, got {column.dtype}"
            )
        if len(column) != len(dataset):
            raise DataError(
                f"{dataset.name}: {name} has {len(column)} rows, but rewards has {len(dataset)}; "
                "every column needs one row per transition"
            )
    axes = {"rewards": 1, "terminations": 1, "truncations": 1}
    one_number = dataset.is_discrete and dataset.actions.ndim == 1
    axes["actions"] = 1 if one_number else 2
    for name, count in axes.items():
        column = getattr(dataset, name)
        if column.ndim != count:
            raise DataError(
                f"{dataset.name}: {name} must have {count} axes, got shape {column.shape}"
            )
    if dataset.next_observations.shape != dataset.observations.shape:
        raise DataError(
            f"{dataset.name}: next_observations have shape {dataset.next_observations.shape}, but "
            f"observations have {dataset.observations.shape}"
        )

"""Figures that describe a dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import column_blocks, count_at_border, range_of
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.scores import reference_scores, scores_in

Array = NDArray[Any]
MOST_ENTRIES = 64
"""Entries of observations and actions that are described one by one."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean, standard deviation and ends of some numbers."""

    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Array) -> Spread:
        """Describe numbers `[N]`."""
        return spreads(np.asarray(values)[:, None])[0]


def spreads(rows: Array) -> tuple[Spread, ...]:
    """Describe each entry of `[N, D]`, block by block.

    NaN makes mean and deviation NaN, and so the smallest and largest value.
    """
    centre = np.asarray(rows[0], np.float64)  # squares of large numbers would lose digits
    total, square = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    low, high = np.array(centre), np.array(centre)
    for block in column_blocks(rows):
        numbers = np.asarray(rows[block], np.float64)
        low = np.minimum(low, numbers.min(axis=0))
        high = np.maximum(high, numbers.max(axis=0))
        numbers = numbers - centre
        total += numbers.sum(axis=0)
        square += (numbers * numbers).sum(axis=0)
    mean = total / len(rows)
    std = np.sqrt(np.maximum(square / len(rows) - mean * mean, 0.0))
    columns = (mean + centre, std, low, high)
    return tuple(
        Spread(mean=m, std=s, min=least, max=most)
        for m, s, least, most in zip(*(c.tolist() for c in columns), strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """What `data inspect` shows."""

    name: str
    source: str
    env_id: str | None
    rows: int
    bytes: int
    digest: str
    episodes: int
    terminated: int
    truncated: int
    observation_shape: tuple[int, ...]
    observation_dtype: str
    returns: Spread
    lengths: Spread
    rewards: Spread
    observations: tuple[Spread, ...]
    """One per entry, for vectors of at most 64 entries."""
    actions: tuple[Spread, ...]
    """One per entry of continuous actions."""
    saturation: tuple[float, ...]
    """Share of rows in which an entry is at its own largest or smallest value."""
    action_counts: dict[int, int]
    """How often each discrete action was taken."""
    normalized_return: float | None
    """Mean return between the returns that the data carries, or on D4RL's scale for the task."""
    notes: tuple[str, ...]
    provenance: Mapping[str, Any]
    """How it was made, where the file says so."""

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def summarize(dataset: OfflineDataset) -> DatasetSummary:
    """Compute the figures; reads every row once or twice."""
    last = dataset.episode_stops - 1
    over = dataset.terminations[last]
    returns = dataset.episode_returns()
    scores = scores_in(dataset.provenance) or reference_scores(dataset.env_id or "")
    with np.errstate(invalid="ignore", over="ignore"):  # a file may hold NaN, which is to be seen
        return DatasetSummary(
            name=dataset.name,
            source=dataset.source,
            env_id=dataset.env_id,
            rows=len(dataset),
            bytes=dataset.nbytes,
            digest=dataset.digest(),
            episodes=dataset.num_episodes,
            terminated=int(over.sum()),
            truncated=int((~over).sum()),
            observation_shape=dataset.observations.shape[1:],
            observation_dtype=str(dataset.observations.dtype),
            returns=Spread.of(returns),
            lengths=Spread.of(dataset.episode_lengths()),
            rewards=Spread.of(dataset.rewards),
            observations=_entries(dataset.observations),
            actions=() if dataset.is_discrete else _entries(dataset.actions),
            saturation=() if dataset.is_discrete else _saturation(dataset.actions),
            action_counts=_counts(dataset.actions) if dataset.is_discrete else {},
            normalized_return=None if scores is None else scores.score(float(returns.mean())),
            notes=dataset.notes,
            provenance=dataset.provenance,
        )


def _entries(rows: Array) -> tuple[Spread, ...]:
    if rows.ndim != 2 or rows.shape[1] > MOST_ENTRIES:
        return ()
    return spreads(rows)


def _saturation(actions: Array) -> tuple[float, ...]:
    if actions.shape[1] > MOST_ENTRIES:
        return ()
    counts = count_at_border(actions, *range_of(actions))
    return tuple((counts / len(actions)).tolist())


def _counts(actions: Array) -> dict[int, int]:
    found: Counter[int] = Counter()
    for block in column_blocks(actions):
        values, counts = np.unique(np.asarray(actions[block]), return_counts=True)
        found.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    return dict(sorted(found.items()))

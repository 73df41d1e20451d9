"""Figures that describe a dataset."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.reference_scores import normalized_score, reference_scores

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
        """Describe numbers."""
        numbers = np.asarray(values, np.float64)
        return cls(
            mean=float(numbers.mean()),
            std=float(numbers.std()),
            min=float(numbers.min()),
            max=float(numbers.max()),
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
    """Mean return on D4RL's scale, where it has one for the task."""
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def summarize(dataset: OfflineDataset) -> DatasetSummary:
    """Compute the figures; reads every row once or twice."""
    last = dataset.episode_stops - 1
    over = dataset.terminations[last]
    returns = dataset.episode_returns()
    known = dataset.env_id is not None and reference_scores(dataset.env_id) is not None
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
            normalized_return=(
                normalized_score(dataset.env_id, float(returns.mean()))
                if known and dataset.env_id is not None
                else None
            ),
            notes=dataset.notes,
        )


def _entries(rows: Array) -> tuple[Spread, ...]:
    if rows.ndim != 2 or rows.shape[1] > MOST_ENTRIES:
        return ()
    return tuple(Spread.of(rows[:, entry]) for entry in range(rows.shape[1]))


def _saturation(actions: Array) -> tuple[float, ...]:
    if actions.shape[1] > MOST_ENTRIES:
        return ()
    columns = (np.asarray(actions[:, entry]) for entry in range(actions.shape[1]))
    shares = (((c == c.min()) | (c == c.max())).mean() for c in columns)
    return tuple(float(share) for share in shares)


def _counts(actions: Array) -> dict[int, int]:
    values, counts = np.unique(np.asarray(actions), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))

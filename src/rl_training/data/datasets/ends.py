"""Ends of episodes that a recording does not mark.

The next observation of their last row is not the observation of the following row.  Where next
observations tell nothing, because they are missing or were copied from the following rows, the
limit of the task tells: no episode is longer.  `data check` reports both; the loader marks
truncations there, so that returns stop at the end and the last step still has a future.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import (
    Part,
    blocks,
    joined,
    kind_of_column,
    mean_and_deviation,
)
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.units import any_in_row

Array = NDArray[Any]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Links:
    """How rows follow each other."""

    broken: Rows
    """Rows whose next observation is not the following row's; marked ends do not count."""
    shuffled: bool
    """Whether most are so."""
    told: bool
    """Whether any row, marked ends included, has a next observation of its own."""


def find_links(columns: Mapping[str, Array]) -> Links:
    """Compare every next observation with the following row; rounding is forgiven.

    Args:
        columns: By the names of `COLUMNS`; observations, next observations and both ends are read.
    """
    current, successors = columns["observations"], columns["next_observations"]
    row_bytes = kind_of_column(current).row_bytes
    unequal = []
    for block in blocks(len(current) - 1, row_bytes):
        following = current[block.start + 1 : block.stop + 1]
        unequal.append(block.start + np.flatnonzero(any_in_row(successors[block] != following)))
    rows = joined(unequal)
    if len(rows) and current.dtype != np.uint8:
        rows = rows[_far_apart(current, successors, rows)]
    inside = ~np.logical_or(columns["terminations"], columns["truncations"])
    broken = rows[inside[rows]]
    shuffled = len(broken) > 0.5 * max(int(inside[:-1].sum()), 1)
    return Links(broken, shuffled, told=len(rows) > 0)


def _far_apart(current: Array, successors: Array, rows: Rows) -> NDArray[np.bool_]:
    """Return which next observations differ from the following rows by more than rounding."""
    row_bytes = kind_of_column(current).row_bytes
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities may be there
        _, deviation = mean_and_deviation(current, (Part(start=0, stop=len(current)),))
        slack = 1e-4 * np.where(np.isfinite(deviation), deviation, 1.0) + 1e-6
        apart = [
            any_in_row(np.abs(successors[rows[block]] - current[rows[block] + 1]) > slack)
            for block in blocks(len(rows), row_bytes)
        ]
    return np.concatenate(apart)


def rows_at_limit(ends: NDArray[np.bool_], limit: int) -> Rows:
    """Return the unmarked rows at which episodes reach a limit of steps, and continue.

    Args:
        ends: `[N]`, the last rows of episodes as far as they are known.
        limit: Steps that an episode has at most.
    """
    rows = np.arange(len(ends))
    begins = np.concatenate([[True], ends[:-1]])
    start = np.maximum.accumulate(np.where(begins, rows, 0))
    return np.flatnonzero(((rows - start + 1) % limit == 0)[:-1] & ~ends[:-1])


def with_links_marked(data: OfflineDataset) -> OfflineDataset:
    """Return a dataset with truncations where links are broken, as the loader marks them."""
    links = find_links(dict(data.columns()))
    if not len(links.broken):
        return data
    return replace(
        data,
        truncations=marked(data.truncations, links.broken),
        notes=(*data.notes, link_note(links)),
        in_time_order=not links.shuffled,
    )


def marked(truncations: Array, rows: Rows) -> Array:
    """Return a copy of the truncations with `rows` among them."""
    changed = np.array(truncations)
    changed[rows] = True
    return changed


def link_note(links: Links) -> str:
    """Say how many ends were found by broken links."""
    rows = links.broken
    first = f"(first at row {int(rows[0])})"
    if links.shuffled:
        return (
            f"at {len(rows)} rows, most of them, the next observation is not that of the following "
            f"row {first}: the rows are shuffled or thinned out, so each of these was marked "
            "truncated and n-step returns stop there"
        )
    return (
        f"{len(rows)} unmarked ends of episodes were found, where the next observation is not that "
        f"of the following row, and marked truncated {first}"
    )


def limit_note(rows: Rows, limit: int) -> str:
    """Say how many ends were found by the limit of the task."""
    return (
        f"{len(rows)} unmarked ends of episodes were found at the task's limit of {limit} steps "
        f"and marked truncated (first at row {int(rows[0])})"
    )

"""From the columns of a file to a dataset: names, dtypes, ends of episodes, successors.

Shapes: N rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import (
    COLUMNS,
    blocks,
    column_blocks,
    is_mapped,
    joined,
    kind_of_column,
)
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.ends import (
    find_links,
    limit_note,
    link_note,
    marked,
    rows_at_limit,
)
from rl_training.data.datasets.units import any_in_row
from rl_training.errors import DataError
from rl_training.validation import suggest

Array = NDArray[Any]
ALIASES: dict[str, tuple[str, ...]] = {
    "observations": ("observations", "obs"),
    "actions": ("actions",),
    "rewards": ("rewards",),
    "next_observations": ("next_observations", "next_obs"),
    "terminations": ("terminations", "terminals", "dones"),
    "truncations": ("truncations", "timeouts"),
}
"""Names a file may use, the first found is taken."""
REQUIRED = ("observations", "actions", "rewards", "terminations")


@dataclass
class RawData:
    """Columns as a file holds them, and its name in messages."""

    columns: dict[str, Array]
    """By the names of `COLUMNS`; next observations and truncations may be missing."""
    keys: dict[str, str]
    """The names the file used, by the names of `COLUMNS`."""
    where: str
    """Path or id, first thing in every message."""
    source: str
    """What the dataset will say of its origin."""
    env_id: str | None = None
    episode_ids: Array | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resets_follow_timeouts: bool = False
    """Whether a timeout's next observation may be the first of the next episode, as in D4RL."""


def find_keys(names: Mapping[str, Any] | list[str], where: str) -> dict[str, str]:
    """Match a file's names to ours.

    Raises:
        DataError: For a missing column, naming what was found instead.
    """
    present = list(names)
    keys = {
        column: next(alias for alias in aliases if alias in present)
        for column, aliases in ALIASES.items()
        if any(alias in present for alias in aliases)
    }
    for column in REQUIRED:
        if column not in keys:
            wanted = " or ".join(ALIASES[column])
            near = suggest(ALIASES[column][0], set(present) - set(keys.values()))
            raise DataError(
                f"{where}: key {wanted} is missing{near if 'did you mean' in near else ''}; it "
                f"holds {', '.join(present) or 'nothing'}"
            )
    return keys


def assemble(
    raw: RawData, *, allow_nan: bool = False, mark_ends: bool = True, limit: int | None = None
) -> OfflineDataset:
    """Check, convert and complete the columns.

    Args:
        raw: What the file holds; its columns are handed over.
        allow_nan: Take NaN and infinities as they are; for `data check` and `data inspect`.
        mark_ends: Mark truncations where episodes end without a mark.
        limit: Steps that an episode has at most, where that is known.

    Raises:
        DataError: In one sentence with file, key and, where there is one, row.
    """
    _check_lengths(raw)
    columns = {name: _converted(raw, name) for name in COLUMNS if name in raw.columns}
    raw.columns = columns
    successors = columns.get("next_observations")
    if successors is not None and successors.shape != columns["observations"].shape:
        raise DataError(
            f"{raw.where}: {raw.keys['next_observations']} has shape {successors.shape}, but "
            f"{raw.keys['observations']} has {columns['observations'].shape}; the two must agree"
        )
    _settle_ends(raw)
    if not allow_nan:
        check_finite(raw)
    in_time_order = _mark_ends(raw, limit) if mark_ends else True
    if "next_observations" not in columns:
        _make_successors(raw)
    elif raw.resets_follow_timeouts:
        _drop_resets(raw)
    if not len(raw.columns["rewards"]):
        raise DataError(f"{raw.where}: no transition with a known successor is left")
    finished: dict[str, Any] = dict(raw.columns)
    return OfflineDataset(
        **finished,
        name=raw.where,
        source=raw.source,
        env_id=raw.env_id,
        notes=tuple(raw.notes),
        provenance=raw.provenance,
        in_time_order=in_time_order,
    )


def _check_lengths(raw: RawData) -> None:
    for name, column in raw.columns.items():
        if column.ndim == 0:
            raise DataError(f"{raw.where}: {raw.keys[name]} is a single value, not a column")
    count = len(raw.columns["rewards"])
    for name, column in raw.columns.items():
        if len(column) != count:
            raise DataError(
                f"{raw.where}: {raw.keys[name]} has {len(column)} rows, but {raw.keys['rewards']} "
                f"has {count}; every key needs one row per transition"
            )
    if not count:
        raise DataError(f"{raw.where}: {raw.keys['rewards']} is empty: there are no transitions")


def _converted(raw: RawData, name: str) -> Array:
    """Return a column with the dtype and axes that datasets have."""
    column, key = raw.columns[name], raw.keys[name]
    if column.dtype.kind not in "fiub":
        raise DataError(
            f"{raw.where}: {key} holds {column.dtype}, not numbers; store a plain numeric array"
        )
    if name in ("terminations", "truncations"):
        return _flags(_flat(raw, name), key, raw.where)
    if name == "rewards":
        return _as(_flat(raw, name), np.float32)
    if name == "actions":
        return _actions(column)
    if column.ndim == 1:
        column = column[:, None]
    return column if column.dtype == np.uint8 else _as(column, np.float32)


def _as(column: Array, dtype: type[Any]) -> Array:
    """Convert unless it is of this dtype already, so that a mapped column stays mapped."""
    if column.dtype == dtype:
        return column
    with np.errstate(over="ignore"):  # found and named as infinite afterwards
        return column.astype(dtype)


def _flat(raw: RawData, name: str) -> Array:
    column = raw.columns[name]
    if column.size != len(column):
        raise DataError(
            f"{raw.where}: {raw.keys[name]} must have one number per row, got shape {column.shape}"
        )
    return column.reshape(-1)


def _flags(column: Array, key: str, where: str) -> Array:
    if column.dtype == np.bool_:
        return column
    wrong = np.flatnonzero((column != 0) & (column != 1))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{where}: {key} must hold booleans or 0 and 1, got {column[row]} at row {row}"
        )
    return column.astype(np.bool_)


def _actions(column: Array) -> Array:
    if column.dtype.kind == "f":
        return _as(column.reshape(len(column), -1), np.float32)
    one_each = column.size == len(column)
    # Several whole numbers per row are continuous actions that happen to be whole.
    return (
        _as(column.reshape(-1), np.int64)
        if one_each
        else _as(column.reshape(len(column), -1), np.float32)
    )


def _settle_ends(raw: RawData) -> None:
    """Make terminations and truncations of what the file says about ends."""
    columns = raw.columns
    over = columns["terminations"]
    if raw.keys["terminations"] == "dones":
        if "truncations" in columns:
            both = over & columns["truncations"]
            if both.any():
                columns["terminations"] = over & ~columns["truncations"]
                raw.notes.append(
                    f"{int(both.sum())} dones are also truncations and were read as truncations"
                )
        else:
            raw.notes.append(
                "dones are read as terminations; if some are time limits, store terminations and "
                "truncations apart"
            )
    columns.setdefault("truncations", np.zeros(len(over), np.bool_))
    if raw.episode_ids is not None and len(raw.episode_ids) == len(over):
        ids = raw.episode_ids
        silent = np.flatnonzero((ids[1:] != ids[:-1]) & ~(over | columns["truncations"])[:-1])
        if len(silent):
            columns["truncations"] = np.array(columns["truncations"])
            columns["truncations"][silent] = True
            raw.notes.append(
                f"{len(silent)} episodes end by their episode id alone and were marked truncated "
                f"(first at row {int(silent[0])})"
            )


def _mark_ends(raw: RawData, limit: int | None) -> bool:
    """Mark the ends that the file does not, and return whether rows are in time order."""
    columns = raw.columns
    # A file that says where it was cut is believed: its recorder may have had another limit.
    silent = raw.episode_ids is None and not columns["truncations"].any()
    recorded = "next_observations" in columns
    if recorded:
        links = find_links(columns)
        silent = silent and not links.told
        if len(links.broken):
            columns["truncations"] = marked(columns["truncations"], links.broken)
            raw.notes.append(link_note(links))
        if links.shuffled:
            return False
    if silent and limit is not None:
        rows = rows_at_limit(columns["terminations"] | columns["truncations"], limit)
        if len(rows):
            columns["truncations"] = marked(columns["truncations"], rows)
            raw.notes.append(limit_note(rows, limit))
            # Every link is whole, so these next observations are those of resets.  Mapped columns
            # are not copied to leave rows out: they may be larger than memory.
            if recorded and not is_mapped(columns["observations"]):
                _drop_at_resets(raw, rows)
    return True


def check_finite(raw: RawData) -> None:
    """Refuse NaN and infinities, naming key and row."""
    for name, column in raw.columns.items():
        if column.dtype.kind != "f":
            continue
        for block in column_blocks(column):
            rows = column[block]
            if np.isfinite(rows).all():
                continue
            bad = np.flatnonzero(any_in_row(~np.isfinite(rows)))
            raise DataError(
                f"{raw.where}: {raw.keys[name]} holds NaN or infinity at row "
                f"{block.start + int(bad[0])}"
                "; repair or remove the row (rl-training data check lists all of them)"
            )


def _make_successors(raw: RawData) -> None:
    """Take each row's successor from the following row of its episode.

    A truncated episode's last row has no known successor and is dropped; the row before it then
    ends the episode.  A terminated one is kept: its successor has no value, and any will do.
    """
    columns = raw.columns
    over = columns["terminations"]
    ends = over | columns["truncations"]
    ends[-1] = True
    last = np.flatnonzero(ends)
    following = np.minimum(np.arange(len(ends)) + 1, len(ends) - 1)
    following[last] = last
    dropped = ends & ~over
    cut = np.zeros(len(ends), np.bool_)
    cut[:-1] = dropped[1:] & ~ends[:-1]
    columns["truncations"] = (columns["truncations"] & ~dropped) | cut
    columns["next_observations"] = columns["observations"][following]
    _keep(raw, ~dropped)
    note = "next observations are missing and were taken from the following rows"
    if dropped.any():
        note += f"; {int(dropped.sum())} rows at truncations have none and were dropped"
    if over.any():
        note += (
            f"; {int(over.sum())} rows at terminations have none and stand for themselves, which "
            "value learning does not see, but do not fit a model of the dynamics to them"
        )
    raw.notes.append(note)


def rows_with_reset_for_successor(columns: Mapping[str, Array]) -> NDArray[np.int64]:
    """Return truncated rows whose next observation is the first of the next episode.

    Where episodes always start in one of a few states, a truncated one may well have come back
    there; so in that case only a fault of all rows is taken for one.
    """
    ends = columns["terminations"] | columns["truncations"]
    rows = np.flatnonzero(columns["truncations"] & ~columns["terminations"])
    rows = rows[rows + 1 < len(ends)]
    found, starts = [], set()
    width = kind_of_column(columns["observations"]).row_bytes
    for block in blocks(len(rows), width):
        chosen = rows[block]
        successors = columns["next_observations"][chosen]
        firsts = np.ascontiguousarray(columns["observations"][chosen + 1])
        found.append(chosen[~any_in_row(successors != firsts)])
        starts |= {hashlib.sha256(first.tobytes()).digest() for first in firsts}
    wrong = joined(found)
    few_starts = len(rows) > 1 and len(starts) <= len(rows) // 2
    return wrong[:0] if few_starts and len(wrong) < 0.9 * len(rows) else wrong


def _drop_resets(raw: RawData) -> None:
    columns = raw.columns
    wrong = rows_with_reset_for_successor(columns)
    if len(wrong):
        _drop_at_resets(raw, wrong)


def _drop_at_resets(raw: RawData, wrong: NDArray[np.int64]) -> None:
    """Drop rows whose successor is of the next episode; the row before each ends its own."""
    columns = raw.columns
    dropped = np.zeros(len(columns["rewards"]), np.bool_)
    dropped[wrong] = True
    ends = columns["terminations"] | columns["truncations"]
    cut = np.array(columns["truncations"])
    cut[:-1] |= dropped[1:] & ~ends[:-1]
    columns["truncations"] = cut
    _keep(raw, ~dropped)
    raw.notes.append(
        f"{len(wrong)} rows at timeouts have the next episode's first observation for a successor "
        f"and were dropped (first at row {int(wrong[0])})"
    )


def _keep(raw: RawData, kept: NDArray[np.bool_]) -> None:
    if not kept.all():
        raw.columns = {name: column[kept] for name, column in raw.columns.items()}

"""Columns that may be larger than memory: read in blocks, recognised by a digest.

Shapes: N rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Index = slice | NDArray[np.int64]
COLUMNS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminations",
    "truncations",
)
CHUNK_ROWS = 1 << 16
CHUNK_BYTES = 8 << 20
"""A block has at most so many rows and about so many bytes: images are few to a block."""
MAX_RATIO = 1100
"""No more bytes than this come out of one packed by deflate, which reaches 1032."""
DIGEST_BYTES = 256 << 20
"""Columns up to this size are hashed whole."""
DIGEST_PIECES, DIGEST_PIECE_BYTES = 1024, 64 << 10
"""Of larger ones, so many pieces of about so many bytes, evenly spread, the ends among them."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows `start` to `stop` (excluded), drawn with a probability proportional to `weight`."""

    start: int
    stop: int
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True)
class ColumnKind:
    """What one row of a column is."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape)


class RowSource(Protocol):
    """Rows in learner units that can be read piece by piece; `OfflineDataset` is one."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def parts(self) -> tuple[Part, ...]: ...  # noqa: D102
    @property
    def learner_units(self) -> bool: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def reward_scale(self) -> float: ...  # noqa: D102
    @property
    def reward_shift(self) -> float: ...  # noqa: D102
    def __len__(self) -> int: ...
    def kind(self, name: str) -> ColumnKind:
        """Return what the rows of a column are."""
        ...

    def read(self, name: str, rows: Index) -> Array:
        """Return rows of a column."""
        ...

    def digest(self) -> str:
        """Return what the rows are recognised by."""
        ...


def kind_of_column(column: Array) -> ColumnKind:
    """Return what the rows of an array are."""
    return ColumnKind(column.dtype, column.shape[1:])


def blocks(count: int, row_bytes: int) -> Iterator[slice]:
    """Divide `count` rows into blocks that fit into memory."""
    size = max(1, min(CHUNK_ROWS, CHUNK_BYTES // max(row_bytes, 1)))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def column_blocks(column: Array) -> Iterator[slice]:
    """Divide the rows of a column into blocks that fit into memory."""
    return blocks(len(column), kind_of_column(column).row_bytes)


def is_mapped(column: Array) -> bool:
    """Whether an array lies in a file; what is calculated from a mapped one does not."""
    return isinstance(column, np.memmap) and column.filename is not None


def digest_of(source: RowSource) -> str:
    """Return the SHA-256 of names, dtypes, shapes, rows and parts.

    Of a column above `DIGEST_BYTES` only pieces are read, so that it takes no longer for a file of
    a terabyte; a change between the pieces is not seen.  Times and places of files do not count.
    """
    found = hashlib.sha256()
    for name in COLUMNS:
        kind = source.kind(name)
        found.update(f"{name} {kind.dtype.str} {(len(source), *kind.shape)};".encode())
        for rows in _pieces(len(source), kind.row_bytes):
            found.update(np.ascontiguousarray(source.read(name, rows)).data)
    for part in source.parts:
        found.update(f"{part.start} {part.stop} {part.weight!r};".encode())
    return found.hexdigest()


def _pieces(count: int, row_bytes: int) -> Iterator[slice]:
    if count * row_bytes <= DIGEST_BYTES:
        yield from blocks(count, row_bytes)
        return
    size = max(1, DIGEST_PIECE_BYTES // row_bytes)
    pieces = min(DIGEST_PIECES, count // size)
    for piece in range(pieces):
        start = piece * (count - size) // max(pieces - 1, 1)
        yield slice(start, start + size)


def mean_and_deviation(
    column: Array, parts: Sequence[Part]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean and standard deviation of each entry; parts count by their weight."""
    total = sum(part.weight for part in parts)
    kind = kind_of_column(column)
    mean, square = np.zeros(kind.shape), np.zeros(kind.shape)
    # Around the first row: squares of large numbers would lose the small differences.
    centre = np.asarray(column[0], np.float64)
    for part in parts:
        share = part.weight / total / (part.stop - part.start)
        for block in blocks(part.stop - part.start, kind.row_bytes):
            rows = column[part.start :][block] - centre
            mean += share * rows.sum(0)
            square += share * (rows * rows).sum(0)
    deviation = np.sqrt(np.maximum(square - mean * mean, 0.0))
    return (mean + centre).astype(np.float32), deviation.astype(np.float32)


def range_of(column: Array) -> tuple[Array, Array]:
    """Return smallest and largest value of each entry, NaN left out where there are others."""
    found = [
        (np.fmin.reduce(rows, axis=0), np.fmax.reduce(rows, axis=0))
        for block in column_blocks(column)
        for rows in (np.asarray(column[block]),)
    ]
    lows, highs = zip(*found, strict=True)
    return np.fmin.reduce(np.stack(lows)), np.fmax.reduce(np.stack(highs))


def count_at_border(column: Array, low: Array, high: Array) -> NDArray[np.int64]:
    """Return in how many rows each entry is at its smallest or largest value."""
    counts = [
        ((rows == low) | (rows == high)).sum(axis=0)
        for block in column_blocks(column)
        for rows in (np.asarray(column[block]),)
    ]
    return np.asarray(np.sum(counts, axis=0), np.int64)


def joined(found: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Put row numbers of blocks together; there may be none."""
    return np.concatenate([np.zeros(0, np.int64), *found])

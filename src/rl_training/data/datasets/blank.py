"""A stand-in for a dataset where only shapes matter: compiling an update reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import ColumnKind, Index, Part

Array = NDArray[Any]
UNCOUNTED = 1024
"""Rows of a stand-in where their number does not matter."""


@dataclass(frozen=True, kw_only=True)
class DatasetShape:
    """All that a compiled update knows of a dataset; plain data."""

    rows: int
    parts: int
    obs_shape: tuple[int, ...]
    obs_dtype: str
    action_shape: tuple[int, ...]
    action_dtype: str
    mapped: bool

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DatasetShape:
        """Read it back from JSON."""
        plain: dict[str, Any] = dict(record)
        for name in ("obs_shape", "action_shape"):
            plain[name] = tuple(plain[name])
        return cls(**plain)


class BlankRows:
    """Rows of zeros, made when they are read."""

    name = "blank rows"
    learner_units = True
    notes: tuple[str, ...] = ()
    reward_scale, reward_shift = 1.0, 0.0

    def __init__(self, shape: DatasetShape) -> None:
        self.shape = shape
        bounds = np.linspace(0, shape.rows, shape.parts + 1).astype(int).tolist()
        self.parts = tuple(Part(start=start, stop=stop) for start, stop in pairwise(bounds))

    def __len__(self) -> int:
        """Return the number of transitions."""
        return self.shape.rows

    def kind(self, name: str) -> ColumnKind:
        """Return what the rows of a column are."""
        if name in ("observations", "next_observations"):
            return ColumnKind(np.dtype(self.shape.obs_dtype), self.shape.obs_shape)
        if name == "actions":
            return ColumnKind(np.dtype(self.shape.action_dtype), self.shape.action_shape)
        return ColumnKind(np.dtype(np.float32 if name == "rewards" else np.bool_), ())

    def read(self, name: str, rows: Index) -> Array:
        """Return rows of a column."""
        count = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        kind = self.kind(name)
        return np.zeros((count, *kind.shape), kind.dtype)

    def digest(self) -> str:
        """Return what the rows are recognised by."""
        return "blank"

"""Figures: samples of all sides of one line of the table, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.speed.rows import Bar

OURS = ("graph", "compile", "ours", "off")
"""Names of our sides, the one that counts first."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    row: str
    label: str
    unit: str
    samples: Mapping[str, Sequence[float]]
    """Side to what each repeat gave; our sides are named by `accelerate`, or `ours`."""
    bar: Bar | None = None
    notes: tuple[str, ...] = ()
    """Sentences printed below the line."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More numbers, for the JSON file."""

    @property
    def medians(self) -> dict[str, float]:
        """Side to the median of its repeats."""
        return {side: statistics.median(values) for side, values in self.samples.items() if values}

    @property
    def ours(self) -> float | None:
        """Our median, compiled where there is such a side."""
        medians = self.medians
        return next((medians[side] for side in OURS if side in medians), None)

    @property
    def eager(self) -> float | None:
        """Our median without compilation, where `ours` is with it."""
        medians = self.medians
        return medians.get("off") if {"compile", "graph"} & set(medians) else None

    @property
    def fastest_peer(self) -> str | None:
        """The peer with the largest median."""
        peers = {side: value for side, value in self.medians.items() if side not in OURS}
        return max(peers, key=lambda side: peers[side]) if peers else None

    @property
    def ratio(self) -> float | None:
        """Ours to the fastest peer's."""
        ours, peer = self.ours, self.fastest_peer
        return None if ours is None or peer is None else ours / self.medians[peer]

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without a bar, or without a peer it needs."""
        if self.bar is None or self.ours is None:
            return None
        return self.bar.is_met(self.ours, self.ratio)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "row": self.row,
            "label": self.label,
            "unit": self.unit,
            "samples": {side: list(values) for side, values in self.samples.items()},
            "medians": self.medians,
            "ours": self.ours,
            "fastest_peer": self.fastest_peer,
            "ratio": self.ratio,
            "bar": None if self.bar is None else {"kind": self.bar.kind, "value": self.bar.value},
            "met": self.met,
            "notes": list(self.notes),
            "extra": dict(self.extra),
        }

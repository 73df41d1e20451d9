"""The data that offline methods learned from: its returns, beside what was reached with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from rl_training.data.datasets.sources import load_transition_dataset
from rl_training.errors import RLTrainingError
from rl_training.reporting.charts import COLORS, SMALL, Scale, labels, ticks
from rl_training.reporting.figures import Row

MOST_BYTES = 2**30
"""Size of a file beyond which a page is not worth reading it."""
BINS = 24


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A dataset on the page."""

    title: str
    chart: Markup
    summary: str


def recorded_data(rows: Sequence[Row]) -> tuple[list[Recorded], list[str]]:
    """Return the datasets of the methods, and a sentence for each that cannot be shown."""
    by_source: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for source in _sources(row.method.settings):
            by_source.setdefault(source, []).append(row)
    found = [_attempt(kind, place, users) for (kind, place), users in by_source.items()]
    shown = [each for each in found if isinstance(each, Recorded)]
    return shown, [each for each in found if isinstance(each, str)]


def _attempt(kind: str, place: str, users: Sequence[Row]) -> Recorded | str:
    try:
        return _read(kind, place, users)
    except (RLTrainingError, OSError) as error:
        return f"{place} is not shown: {error}"


def _sources(settings: Any) -> Iterator[tuple[str, str]]:
    """Return kind and place of what a method learned from; random data is not worth a picture."""
    for prefix in ("algo_kwargs.dataset_", "algo_kwargs.expert_dataset_"):
        kind = settings.get(f"{prefix}kind")
        place = settings.get(f"{prefix}path") or settings.get(f"{prefix}id")
        if isinstance(kind, str) and isinstance(place, str):
            yield kind, place


def _read(kind: str, place: str, users: Sequence[Row]) -> Recorded:
    path = None if kind == "minari" else Path(place)
    if path is not None and path.is_file() and path.stat().st_size > MOST_BYTES:
        raise RLTrainingError(f"it is larger than {MOST_BYTES / 2**30:g} GiB")
    dataset = load_transition_dataset(
        kind,
        path=path,
        dataset_id=place if kind == "minari" else None,
        download=False,
        allow_nan=True,
    )
    returns = dataset.episode_returns()
    finite = returns[np.isfinite(returns)]
    if not len(finite):
        raise RLTrainingError("it has no whole episode")
    marks = [
        (row.method.number, row.final.iqm)
        for row in users
        if row.final is not None and np.isfinite(row.final.iqm)
    ]
    mean = f"mean {finite.mean():.4g}, highest {finite.max():.4g}"
    return Recorded(
        title=Path(place).name,
        chart=histogram(finite, marks, f"Returns of the episodes of {Path(place).name}"),
        summary=f"{len(dataset):,} transitions, {len(returns):,} episodes; return {mean}",
    )


def histogram(values: Any, marks: Sequence[tuple[int, float]], title: str) -> Markup:
    """Draw how often each return occurs, and a line where each method ended."""
    size = SMALL
    ends = [float(values.min()), float(values.max()), *(value for _, value in marks)]
    steps = ticks(min(ends), max(ends), 4)
    across = Scale(steps[0], steps[-1], size.left, size.width - size.right)
    counts, edges = np.histogram(values, bins=BINS, range=(steps[0], steps[-1]))
    bottom = size.height - size.bottom
    up = Scale(0, float(counts.max()), bottom, size.top)
    parts = [
        f'<rect class="bin" x="{across(left)}" y="{up(count)}" '
        f'width="{max(0.5, across(right) - across(left) - 1):.2f}" '
        f'height="{bottom - up(count):.2f}"/>'
        for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True)
        if count
    ]
    for tick, label in zip(steps, labels(steps), strict=True):
        anchor = "end" if across(tick) > size.width - size.right - 12 else "middle"
        parts.append(f'<text x="{across(tick)}" y="{bottom + 18}" text-anchor="{anchor}">')
        parts.append(f"{label}</text>")
    parts.append(
        f'<line class="axis" x1="{size.left}" x2="{size.width - size.right}" '
        f'y1="{bottom}" y2="{bottom}"/>'
    )
    parts += [
        f'<line class="curve c{number % COLORS}" x1="{across(value)}" x2="{across(value)}" '
        f'y1="{size.top}" y2="{bottom}"/>'
        for number, value in marks
    ]
    return Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" role="img" aria-label="{t}">{b}</svg>'
    ).format(w=size.width, h=size.height, t=title, b=Markup("".join(parts)))

"""Line charts as SVG, drawn here so that a page needs no library and follows the reader's colours.

A drawing has a fixed inner size and scales with its place; colours are classes of the page's style.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup, escape

from rl_training.resources import ASSETS

COLORS = 8
"""Different colours of the page; methods beyond them get dashes."""
DASHES = ("", "6 4", "2 3", "9 3 2 3")
HALF_LETTER = 3.4
"""Half the width of a letter of an axis."""
LEGEND_ROW = 18
LETTER = 7
"""Width of a letter in a legend, about."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve with its band and the thin lines below it."""

    label: str
    number: int
    """Gives colour and dashes."""
    points: tuple[Point, ...]
    band: tuple[tuple[float, float, float], ...] = ()
    """(x, low, high)."""
    faint: tuple[tuple[Point, ...], ...] = ()
    seconds: tuple[Point, ...] = ()
    """(step, seconds of training until then), for the reader who wants them across."""

    def ys(self) -> Iterable[float]:
        """Every height that must fit into the drawing."""
        yield from (y for _, y in self.points)
        yield from (y for _, low, high in self.band for y in (low, high))
        yield from (y for line in self.faint for _, y in line)


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Points of one kind."""

    label: str
    number: int
    """Gives the colour."""
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Inner size of a drawing, in its own units."""

    width: int
    height: int
    left: int = 56
    right: int = 14
    top: int = 12
    bottom: int = 30


WIDE = Size(width=920, height=360)
NARROW = Size(width=360, height=260, left=48, right=10)
SMALL = Size(width=340, height=190, left=50, right=10, top=10, bottom=26)


class Scale:
    """Maps numbers of a range to places of a drawing."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        """Return the place of a number."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


def line_chart(lines: Sequence[Line], size: Size, title: str) -> Markup:
    """Draw curves over steps.

    Args:
        lines: The curves; at least one has a point.
        size: Inner size.
        title: What a screen reader says of it.
    """
    parts = _drawing(lines, size)
    parts.append(
        f'<line class="cursor" y1="{size.top}" y2="{size.height - size.bottom}" x1="0" x2="0"/>'
    )
    return Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" role="img" aria-label="{t}" '
        'data-chart="{d}">{b}</svg>'
    ).format(w=size.width, h=size.height, t=title, d=_data(lines, size), b=Markup("".join(parts)))


def chart_file(
    lines: Sequence[Line], size: Size, title: str, *, across: str = "step", legend: bool = False
) -> str:
    """Return a drawing as a file of its own, on a card in the colours that the reader prefers.

    Args:
        lines: The curves; at least one has a point.
        size: Inner size.
        title: What a screen reader says of it.
        across: What the axis of x shows.
        legend: Name the curves above the drawing.
    """
    rows = _legend_rows(lines, size) if legend else []
    size = replace(size, top=size.top + LEGEND_ROW * len(rows))
    parts = [*_drawing(lines, size, across), *_legend(rows, size)]
    return _file(parts, size, title)


def scatter_file(clouds: Sequence[Cloud], size: Size, title: str, *, across: str, up: str) -> str:
    """Return points as a file of its own, with the line on which both figures are equal.

    Args:
        clouds: The points; at least one.
        size: Inner size, to which a row for the legend is added.
        title: What a screen reader says of it.
        across: What the axis of x shows.
        up: What the axis of y shows.
    """
    size = replace(size, top=size.top + LEGEND_ROW, height=size.height + LEGEND_ROW)
    points = [point for cloud in clouds for point in cloud.points]
    (x_low, x_high), (y_low, y_high) = (padded(values) for values in zip(*points, strict=True))
    x_scale = Scale(x_low, x_high, size.left, size.width - size.right)
    y_scale = Scale(y_low, y_high, size.height - size.bottom, size.top)
    marks = inside(ticks(x_low, x_high, 5), x_low, x_high)
    parts = [*_axes(size, x_scale, y_scale, marks, across)]
    parts.append(f'<text x="8" y="{size.top - 8}">{up}</text>')
    low, high = max(x_low, y_low), min(x_high, y_high)
    if low < high:
        ends = f"M{x_scale(low)} {y_scale(low)}L{x_scale(high)} {y_scale(high)}"
        parts.append(f'<path class="axis" stroke-dasharray="4 4" d="{ends}"/>')
    place = 8.0 + LETTER * len(up) + 24
    for cloud in clouds:
        color = f'class="c{cloud.number % COLORS}" style="fill: var(--c); opacity: .75"'
        parts += [
            f'<circle {color} cx="{x_scale(x)}" cy="{y_scale(y)}" r="3.4"/>'
            for x, y in cloud.points
        ]
        parts.append(f'<circle {color} cx="{place:g}" cy="{size.top - 12}" r="3.4"/>')
        parts.append(f'<text x="{place + 8:g}" y="{size.top - 8}">{escape(cloud.label)}</text>')
        place += 8 + LETTER * len(cloud.label) + 20
    return _file(parts, size, title)


def _file(parts: Sequence[str], size: Size, title: str) -> str:
    """Return a drawing as a file, on a card."""
    style = (ASSETS / "report" / "chart.css").read_text(encoding="utf-8")
    body = "".join(parts).replace("><", ">\n<")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{size.width}" '
        f'height="{size.height}" viewBox="0 0 {size.width} {size.height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n"
        '<rect style="fill: var(--card)" width="100%" height="100%" rx="8"/>\n'
        f"{body}\n</svg>\n"
    )


def _legend_rows(lines: Sequence[Line], size: Size) -> list[list[tuple[float, Line]]]:
    """Return the lines with their places from the left, in rows that fit."""
    rows: list[list[tuple[float, Line]]] = [[]]
    place: float = size.left
    for line in lines:
        width = 30 + LETTER * len(line.label) + 14
        if rows[-1] and place + width > size.width - size.right:
            rows.append([])
            place = size.left
        rows[-1].append((place, line))
        place += width
    return rows


def _legend(rows: Sequence[Sequence[tuple[float, Line]]], size: Size) -> Iterable[str]:
    first = size.top - LEGEND_ROW * len(rows) + 6
    for row, entries in enumerate(rows):
        y = first + LEGEND_ROW * row
        for x, line in entries:
            yield f'<path class="curve c{line.number % COLORS}"{_dashes(line)} '
            yield f'd="M{x:g} {y}H{x + 22:g}"/>'
            yield f'<text x="{x + 28:g}" y="{y + 4}">{escape(line.label)}</text>'


def _dashes(line: Line) -> str:
    dash = DASHES[line.number // COLORS % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _drawing(lines: Sequence[Line], size: Size, name: str = "step") -> list[str]:
    """Return axes and curves; `page.js` draws the same when the reader asks for something else."""
    xs = [x for line in lines for x, _ in line.points]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_low, y_high = padded([y for line in lines for y in line.ys()])
    across = Scale(x_low, x_high, size.left, size.width - size.right)
    up = Scale(y_low, y_high, size.height - size.bottom, size.top)
    x_ticks = ticks(x_low, x_high, 6 if size.width > 500 else 4)
    parts = [*_axes(size, across, up, inside(x_ticks, x_low, x_high), name)]
    for line in lines:
        parts += _drawn(line, across, up)
    return parts


def padded(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis that fits these values, with a little room at both ends."""
    low, high = min(values), max(values)
    room = max(abs(low) * 0.1, 0.5) if low == high else (high - low) * 0.04
    return low - room, high + room


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers from at or below `low` to at or above `high`, about `count` of them."""
    if low == high:
        low, high = padded([low])
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** max(math.floor(math.log10(raw)), -300)  # below, powers of ten are not numbers
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def inside(marks: Sequence[float], low: float, high: float) -> list[float]:
    """Return the marks between two limits."""
    room = 1e-9 * (high - low)
    return [mark for mark in marks if low - room <= mark <= high + room]


def labels(values: Sequence[float]) -> list[str]:
    """Write the numbers of an axis in one unit and with equally many decimals: 0, 2.5k, 5.0k."""
    size = max(map(abs, values), default=0.0)
    if 0 < size < 1e-3:
        power = math.floor(math.log10(size))
        return [f"{v / 10.0**power:.4g}e{power}" if v else "0" for v in values]
    limits = ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3), (0.0, "", 1.0))
    unit, scale = next((unit, scale) for limit, unit, scale in limits if size >= limit)
    shown = [v / scale for v in values]
    decimals = 0
    while decimals < 6 and any(abs(round(v, decimals) - v) > 1e-9 * size / scale for v in shown):
        decimals += 1
    return [f"{v:,.{decimals}f}{unit}" if v else "0" for v in shown]


def _axes(
    size: Size, across: Scale, up: Scale, x_ticks: Sequence[float], name: str
) -> Iterable[str]:
    right, bottom = size.width - size.right, size.height - size.bottom
    y_ticks = inside(ticks(up.low, up.high, 7), up.low, up.high)
    for tick, label in zip(y_ticks, labels(y_ticks), strict=True):
        y = up(tick)
        yield f'<line class="grid" x1="{size.left}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{size.left - 8}" y="{round(y + 4, 2)}" text-anchor="end">{label}</text>'
    free = size.left + 14.0
    for tick, label in zip(x_ticks, labels(x_ticks), strict=True):
        x, half = across(tick), len(label) * HALF_LETTER
        # A figure at the end would stick out, so it ends there.
        last = x > right - 12
        if x - half * (2 if last else 1) < free:
            continue
        free = x + (0 if last else half) + 6
        anchor = "end" if last else "middle"
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="{anchor}">{label}</text>'
    yield f'<text x="{size.left - 8}" y="{bottom + 18}" text-anchor="end">{name}</text>'
    yield f'<line class="axis" x1="{size.left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'


def _drawn(line: Line, across: Scale, up: Scale) -> list[str]:
    color = line.number % COLORS
    parts = []
    if len(line.band) > 1:
        there = [f"{across(x)},{up(high)}" for x, _, high in line.band]
        back = [f"{across(x)},{up(low)}" for x, low, _ in reversed(line.band)]
        parts.append(f'<polygon class="band c{color}" points="{" ".join(there + back)}"/>')
    parts += [f'<path class="faint c{color}" d="{_path(f, across, up)}"/>' for f in line.faint if f]
    path = _path(line.points, across, up)
    parts.append(f'<path class="curve c{color}"{_dashes(line)} d="{path}"/>')
    if len(line.points) < 25:
        parts += [
            f'<circle class="dot c{color}" cx="{across(x)}" cy="{up(y)}" r="2.6"/>'
            for x, y in line.points
        ]
    return parts


def _path(points: Sequence[Point], across: Scale, up: Scale) -> str:
    return "M" + "L".join(f"{across(x)} {up(y)}" for x, y in points)


def _data(lines: Sequence[Line], size: Size) -> str:
    """What the page's script needs to draw the chart again, as JSON."""
    margins = {name: getattr(size, name) for name in ("left", "right", "top", "bottom")}
    series = [
        {
            "label": line.label,
            "number": line.number,
            "color": line.number % COLORS,
            "dash": DASHES[line.number // COLORS % len(DASHES)],
            "points": line.points,
            "band": line.band,
            "faint": line.faint,
            "seconds": line.seconds,
        }
        for line in lines
    ]
    return json.dumps(margins | {"series": series}, separators=(",", ":"))


def swatch(number: int) -> Markup:
    """Draw the short line that represents a method."""
    dash = DASHES[number // COLORS % len(DASHES)]
    style = Markup(' stroke-dasharray="{}"').format(dash) if dash else ""
    return Markup(
        '<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">'
        '<path class="curve c{}"{} d="M1 4H21"/></svg>'
    ).format(number % COLORS, style)


def text(value: object) -> Markup:
    """Escape a text for the page."""
    return escape(value)

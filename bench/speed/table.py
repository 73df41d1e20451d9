"""The table in a terminal of 100 columns, one line as soon as its figure is there."""

from __future__ import annotations

import textwrap

from bench.speed.figures import Figure

WIDTH = 100
COLUMNS = (
    ("row", "<19"),
    ("unit", "<16"),
    ("ours", ">9"),
    ("eager", ">9"),
    ("fastest peer", ">18"),
    ("ratio", ">6"),
    ("bar", ">9"),
    ("met", ">4"),
)
_COLOURS = {"yes": "\x1b[32m", "no": "\x1b[31m"}


def format_number(value: float | None) -> str:
    """Three digits or more, and no more than can be read."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.3g}"


def _line(cells: list[str]) -> str:
    parts = [f"{cell:{layout}}" for cell, (_, layout) in zip(cells, COLUMNS, strict=True)]
    return " ".join(parts).rstrip()


def header() -> str:
    """Return the names of the columns, underlined."""
    names = _line([name for name, _ in COLUMNS])
    return f"{names}\n{'-' * len(names)}"


def format_figure(figure: Figure, *, colour: bool = False) -> str:
    """Return a figure's line, and its notes indented below."""
    peer = figure.fastest_peer
    met = {None: "", True: "yes", False: "no"}[figure.met]
    cells = [
        figure.label,
        figure.unit,
        format_number(figure.ours) or "failed",
        format_number(figure.eager),
        f"{peer} {format_number(figure.medians[peer])}" if peer else "",
        f"{figure.ratio:.2f}x" if figure.ratio is not None else "",
        str(figure.bar or ""),
        met,
    ]
    line = _line(cells)
    if colour and met:
        line = line.removesuffix(met) + f"{_COLOURS[met]}{met}\x1b[0m"
    return "\n".join([line, *(_note(note) for note in (*_others(figure), *figure.notes))])


def _others(figure: Figure) -> list[str]:
    """The peers that are not the fastest."""
    rest = {
        side: value
        for side, value in figure.medians.items()
        if side not in ("off", "compile", "graph", "ours", figure.fastest_peer)
    }
    if not rest:
        return []
    return ["other peers: " + ", ".join(f"{s} {format_number(v)}" for s, v in rest.items())]


def format_failure(row: str, reason: str) -> str:
    """Return the line of a row that could not be measured."""
    return f"{row:{COLUMNS[0][1]}} not measured\n{_note(reason)}"


def _note(text: str) -> str:
    indent = " " * 4
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)

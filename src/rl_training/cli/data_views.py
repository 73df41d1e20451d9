"""What the `data` commands show: statistics, a histogram of returns, findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rl_training.cli.styles import ERROR, NOTE, STRONG
from rl_training.data.datasets.check import LISTED, Finding
from rl_training.data.datasets.summary import DatasetSummary, Spread

BINS = 12
MOST_LINES = 12
"""Entries of observations or actions listed; the rest is counted."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
STYLES = {"error": ERROR, "warning": NOTE, "note": STRONG}


def print_summary(console: Console, summary: DatasetSummary, returns: NDArray[np.float64]) -> None:
    """Print everything that `data inspect` knows."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(summary):
        table.add_row(name, escape(value))
    console.print(table, highlight=False, soft_wrap=False)
    if len(returns) > 1 and np.isfinite(returns).all():
        console.print(f"\n[bold]returns of {len(returns):,} episodes[/]")
        for line in histogram(returns, min(console.width, 100), ascii_only=_ascii_only(console)):
            console.print(line, markup=False, highlight=False, no_wrap=True)
    _print_actions(console, summary)
    _print_entries(console, "observation", summary.observations, ())
    for note in summary.notes:
        console.print(Text.assemble(("note:", NOTE), f" {note}"))


def _facts(summary: DatasetSummary) -> list[tuple[str, str]]:
    ends = f"{summary.terminated:,} terminated, {summary.truncated:,} truncated"
    shape = "x".join(map(str, summary.observation_shape))
    actions = (
        f"discrete, {len(summary.action_counts)} different"
        if summary.action_counts
        else f"continuous, {_entry_count(len(summary.actions))}"
    )
    facts = [
        ("source", summary.source),
        ("task", summary.env_id or "not named"),
        ("transitions", f"{summary.rows:,} ({_size(summary.bytes)})"),
        ("episodes", f"{summary.episodes:,} ({ends})"),
        ("observations", f"{shape} {summary.observation_dtype}"),
        ("actions", actions),
        ("rewards", _spread(summary.rewards)),
        ("returns", _spread(summary.returns)),
        ("lengths", _spread(summary.lengths)),
    ]
    if summary.normalized_return is not None:
        scale = "score" if "scores" in summary.provenance else "D4RL score"
        facts.append((scale, f"{summary.normalized_return:.1f} (mean return)"))
    if summary.provenance:
        facts.append(("made by", _made_by(summary.provenance)))
    return [*facts, ("digest", summary.digest[:16])]


_LONG = ("recipe", "digest", "of")


def _made_by(provenance: Mapping[str, Any]) -> str:
    """Say how a dataset was made, in one line; --json has all of it."""
    plain = {k: v for k, v in provenance.items() if isinstance(v, str | int | float)}
    plain |= {k: f"{v:.4g}" for k, v in plain.items() if isinstance(v, float)}
    words = [f"{name} {value}" for name, value in plain.items() if name not in _LONG]
    return ", ".join([str(plain.get("recipe", "an unnamed recipe")), *words])


def _entry_count(count: int) -> str:
    return "1 entry" if count == 1 else f"{count or 'many'} entries"


def _spread(spread: Spread) -> str:
    mean = f"{number(spread.mean)} ± {number(spread.std)}"
    return f"{mean} [{number(spread.min)}, {number(spread.max)}]"


def number(value: float) -> str:
    """Write a number with four significant digits and no exponent where it can be helped."""
    if value == 0 or not np.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.3g}"
    digits = max(0, 3 - int(np.floor(np.log10(size))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def histogram(
    values: NDArray[np.float64], width: int, *, ascii_only: bool = False, bins: int = BINS
) -> list[str]:
    """Draw a histogram with lying bars, one line per bin."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [f"all are {number(low)}"]
    counts, edges = np.histogram(values, bins=bins)
    labels = [(number(edges[i]), number(edges[i + 1])) for i in range(bins)]
    side = max(len(text) for pair in labels for text in pair)
    figures = [f"{count:,}" for count in counts.tolist()]
    room = max(8, width - 2 * side - max(map(len, figures)) - 9)
    lines = []
    for (left, right), count, figure in zip(labels, counts.tolist(), figures, strict=True):
        bar = _bar(count / counts.max() * room, ascii_only)
        lines.append(f"  {left:>{side}} to {right:>{side}}  {bar} {figure}")
    return lines


def _bar(length: float, ascii_only: bool) -> str:
    if ascii_only:
        return "#" * round(length)
    eighths = round(length * 8)
    # Something that is there must be seen.
    eighths = max(eighths, 1) if length > 0 else 0
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _ascii_only(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _print_actions(console: Console, summary: DatasetSummary) -> None:
    _print_entries(console, "action", summary.actions, summary.saturation)
    if not summary.action_counts:
        return
    console.print("\n[bold]actions[/]")
    room = max(8, min(console.width, 100) - 40)
    most = max(summary.action_counts.values())
    shown = list(summary.action_counts.items())[:MOST_LINES]
    for action, count in shown:
        bar = _bar(count / most * room, _ascii_only(console))
        line = f"  {action:>4}  {bar} {count:,} ({count / summary.rows:.1%})"
        console.print(line, markup=False, highlight=False)
    _print_rest(console, len(summary.action_counts) - len(shown))


def _print_entries(
    console: Console, name: str, spreads: Sequence[Spread], saturation: Sequence[float]
) -> None:
    if not spreads:
        return
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    columns = [name, "mean", "std", "min", "max", *(["at its border"] if saturation else [])]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for entry, spread in enumerate(spreads[:MOST_LINES]):
        cells = [number(v) for v in (spread.mean, spread.std, spread.min, spread.max)]
        if saturation:
            cells.append(f"{saturation[entry]:.1%}")
        table.add_row(str(entry), *cells)
    console.print(table, highlight=False, soft_wrap=False)
    _print_rest(console, len(spreads) - MOST_LINES)


def _print_rest(console: Console, count: int) -> None:
    if count > 0:
        console.print(f"  and {count} more (--json has all)", highlight=False)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print findings, each with its place and what to do."""
    for finding in findings:
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
        table.add_column(no_wrap=True, width=8)
        table.add_column(overflow="fold")
        title = Text(finding.level, STYLES[finding.level])
        table.add_row(title, Text(finding.message[0].upper() + finding.message[1:], "bold"))
        if finding.rows or finding.episodes:
            table.add_row("", Text(_place(finding)))
        table.add_row(
            "", Text(f"→ {finding.advice}" if not _ascii_only(console) else finding.advice)
        )
        console.print(table, highlight=False, soft_wrap=False)


def _place(finding: Finding) -> str:
    """Say where: how many, the first rows, the first episodes."""
    parts = [f"{finding.count:,} in all"]
    for name, numbers in (("row", finding.rows), ("episode", finding.episodes)):
        if numbers:
            listed = ", ".join(map(str, numbers))
            more = ", ..." if len(numbers) == LISTED < finding.count else ""
            parts.append(f"{name}{'s' if len(numbers) > 1 else ''} {listed}{more}")
    return "; ".join(parts)

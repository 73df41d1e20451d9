"""The generated part of docs/benchmarks.md, and the plots in it, from the records of the suite."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.evidence.cells import SUITE, SUITES, Cell
from bench.evidence.rows import read
from bench.evidence.suite import PACE, SECONDS, Record
from bench.speed.table import format_number
from rl_training.errors import DataError
from rl_training.experiment.statistics import (
    LEVEL,
    Floats,
    aggregate,
    bootstrap_interval,
    improvement_over_tasks,
    interquartile_mean,
    normalised,
    performance_profile,
    profile_intervals,
    stratified_interval,
)
from rl_training.experiment.summary import curve_of
from rl_training.experiment.zoo import short_task
from rl_training.reporting.charts import Line, Size, chart_file
from rl_training.reporting.page import duration

PAGE = "benchmarks.md"
PUBLISHED = "published.csv"
"""Figures of others, in the folder above the records."""
REFERENCE = {"mujoco": "sac", "mujoco-300k": "sac", "atari": "human", "pixels": "human"}
"""Whose return counts as 1, where the figure of a suite is the return."""
WHOLE = {"score": 100.0, "success": 1.0}
"""What counts as 1 where it is another."""
AS_ONE = {
    "sac": "published SAC (Gymnasium's v4)",
    "human": "human",
    "score": "the run of SAC that the data is from",
    "success": "a policy that always succeeds",
}
PUBLISHED_AS = {"redq": "redq_utd20", "droq": "droq_utd20", "simba_v2": "simbav2_utd2"}
"""Our methods under the names that published figures have for our settings of them."""
SIZE = Size(width=640, height=240)
DASHED = 12
"""Grey dashes, see `Line.number`."""
MILESTONES = (100_000, 300_000, 1_000_000)
"""Steps at which evaluations are set beside published figures."""
THRESHOLDS = np.linspace(0.0, 1.5, 61)
_PART = re.compile(r"(<!-- generated: suite -->\n).*?(<!-- end generated -->)", re.DOTALL)


class Figure(NamedTuple):
    """A published figure."""

    method: str
    task: str
    step: int | None
    metric: str
    mean: float
    std: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What our records say of a cell."""

    cell: Cell
    record: Record

    def by_seed(self, metric: str) -> dict[int, dict[int, float]]:
        """Return a metric of the cell's seeds by step."""
        found: dict[int, dict[int, float]] = {}
        for row in self.record.rows:
            if row["metric"] == metric and int(row["seed"]) in self.cell.seeds:
                found.setdefault(int(row["seed"]), {})[int(row["step"])] = float(row["value"])
        return found

    @property
    def curves(self) -> dict[int, dict[int, float]]:
        """Evaluations during training of each seed, by step."""
        return self.by_seed(self.cell.evaluated)

    @property
    def whole(self) -> bool:
        """Whether every seed did all steps and was evaluated at the end."""
        reached = (self.record.reached(seed, self.cell.steps) for seed in self.cell.seeds)
        return all(each.done for each in reached)

    @property
    def finals(self) -> list[float]:
        """Mean return of each seed's last checkpoint."""
        logs = self.by_seed(self.cell.last)
        return [logs[seed][max(logs[seed])] for seed in sorted(logs)]

    def newest(self, metric: str) -> float | None:
        """Return the newest figure of what all seeds have together."""
        values = [log[max(log)] for log in self.by_seed(metric).values()]
        return max(values) if values else None


def read_published(path: Path) -> list[Figure]:
    """Return the figures of others."""
    return [
        Figure(
            row["method"],
            row["task"],
            int(row["step"]) if row["step"] else None,
            row["metric"],
            float(row["mean"]),
            float(row["std"]) if row["std"] else None,
            row["source"],
        )
        for row in read(path)
    ]


def _published(cell: Cell) -> str:
    """Name that published figures have for a cell's method."""
    return PUBLISHED_AS.get(cell.method, cell.method)


def _is_of(figure: Figure, cell: Cell) -> bool:
    """Tell whether a figure is of a cell's task, whatever its version."""
    return short_task(figure.task).replace("_", "") == cell.task.replace("_", "")


def _mean_text(values: Sequence[float]) -> str:
    spread = f" ± {format_number(float(np.std(values)))}" if len(values) > 1 else ""
    return f"{format_number(float(np.mean(values)))}{spread}"


def _figure_text(figure: Figure) -> str:
    spread = "" if figure.std is None else f" ± {format_number(figure.std)}"
    return f"{format_number(figure.mean)}{spread} ({figure.source})"


COLUMNS = (
    *("method", "task", "seeds", "steps", "last checkpoint", f"IQM [{LEVEL:.0%}]"),
    *("published at so many steps", "wall time", "env steps/s", "device"),
)


def section(folder: Path, records: Path, cells: Sequence[Cell] = SUITE) -> str:
    """Return the tables of all suites.

    Args:
        folder: Where plots are, as the page links to them.
        records: Folder of the records.
        cells: All cells, in order.
    """
    published = read_published(records.parent / PUBLISHED)
    known = [Measured(cell=cell, record=Record(records, cell)) for cell in cells]
    lines: list[str] = []
    for suite in SUITES:
        own = [one for one in known if one.cell.suite == suite]
        if own:
            lines += ["", f"### Suite `{suite}`", "", *_table(own, published)]
            lines += _on_the_way(own, published)
            lines += _over_tasks(folder, own, published, suite)
            lines += _beside(own, published)
            lines += _plots(folder, own)
    return "\n".join(lines[1:])


def _table(known: Sequence[Measured], published: Sequence[Figure]) -> list[str]:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(_row(one, published))} |" for one in known]
    whole = sum(one.whole for one in known)
    return [*lines, "", f"{whole} of {len(known)} cells are whole."]


def _row(one: Measured, published: Sequence[Figure]) -> list[str]:
    cell = one.cell
    beside = [
        _figure_text(figure)
        for figure in published
        if (figure.method, figure.step, figure.metric)
        == (_published(cell), cell.steps, cell.figure)
        and _is_of(figure, cell)
    ]
    cells = [cell.method, cell.short, f"{cell.seeds[0]} to {cell.seeds[-1]}", f"{cell.steps:,}"]
    seconds, pace = one.newest(SECONDS), one.newest(PACE)
    clock = ["" if seconds is None else duration(seconds), "" if pace is None else f"{pace:,.0f}"]
    device = str(one.record.facts.get("machine", {}).get("device", ""))
    if not one.whole:
        return [*cells, f"missing: {_how_far(one)}", "", "; ".join(beside), *clock, device]
    low, high = map(format_number, bootstrap_interval(one.finals, interquartile_mean))
    middle = format_number(float(interquartile_mean(one.finals)))
    figures = [_mean_text(one.finals), f"{middle} [{low}, {high}]"]
    return [*cells, *figures, "; ".join(beside), *clock, device]


def _how_far(one: Measured) -> str:
    """Say how far a cell that is not whole has got."""
    reached = [one.record.reached(seed, one.cell.steps) for seed in one.cell.seeds]
    if not any(each.steps for each in reached):
        return "not run"
    done = sum(each.done for each in reached)
    logs = [log for log in one.curves.values() if log]
    common = sorted(set.intersection(*map(set, logs))) if logs else []
    last = ""
    if common:
        values = [log[common[-1]] for log in logs]
        last = f", {_mean_text(values)} at {common[-1]:,} (evaluations of {len(values)} seeds)"
    least = min(each.steps for each in reached)
    return f"{done} of {len(reached)} seeds whole, the others at {least:,}{last}"


def _on_the_way(known: Sequence[Measured], published: Sequence[Figure]) -> list[str]:
    """Return evaluations during training beside published figures of the same method and step."""
    lines = []
    for one in known:
        logs = list(one.curves.values())
        for figure in published:
            same = figure.method == _published(one.cell) and _is_of(figure, one.cell)
            if not same or figure.metric != one.cell.figure or figure.step not in MILESTONES:
                continue
            values = [log[figure.step] for log in logs if figure.step in log]
            if not values or len(values) < len(logs):
                continue
            enough = figure.mean - (figure.std or 0.0) <= float(np.mean(values))
            row = (one.cell.method, one.cell.short, f"{figure.step:,}", _mean_text(values))
            verdict = "yes" if enough else "**no**"
            lines.append(f"| {' | '.join((*row, _figure_text(figure), verdict))} |")
    if not lines:
        return []
    return [
        "",
        "On the way: mean ± deviation over seeds of single evaluations during training; *reached*: "
        "no more than one published deviation below.",
        "",
        "| method | task | step | ours | published | reached |",
        "| --- | --- | --- | --- | --- | --- |",
        *lines,
    ]


def _scores(known: Sequence[Measured], published: Sequence[Figure]) -> dict[str, dict[str, Floats]]:
    """Return normalised finals by method and task, of the cells that are whole."""
    scores: dict[str, dict[str, Floats]] = {}
    for one in known:
        if not one.whole:
            continue
        low: float | None = 0.0
        high = WHOLE.get(one.cell.figure)
        if high is None:
            low = _reference("random", one.cell, published)
            high = _reference(REFERENCE[one.cell.suite], one.cell, published)
        if low is not None and high is not None:
            task = scores.setdefault(one.cell.method, {})
            task[one.cell.short] = normalised(one.finals, random=low, reference=high)
    return scores


def _reference(method: str, cell: Cell, published: Sequence[Figure]) -> float | None:
    """Return a method's figure of a task: at the cell's steps, or at none where it has none."""
    fitting = [f for f in published if f.method == method and f.metric == "return"]
    found = [f.mean for f in fitting if _is_of(f, cell) and f.step in (None, cell.steps)]
    return found[0] if found else None


def _over_tasks(
    folder: Path, known: Sequence[Measured], published: Sequence[Figure], suite: str
) -> list[str]:
    scores = _scores(known, published)
    if not scores:
        return []
    who = AS_ONE[REFERENCE.get(suite, known[0].cell.figure)]
    least = "no success" if known[0].cell.figure == "success" else "a random policy's return"
    lines = [
        "",
        f"Over tasks, 0 is {least} and 1 that of {who}; interquartile means, "
        f"{LEVEL:.0%} intervals by the stratified bootstrap:",
        "",
        f"| method | tasks | IQM [{LEVEL:.0%}] | beats, on the tasks of both |",
        "| --- | --- | --- | --- |",
    ]
    for method, tasks in scores.items():
        samples = list(tasks.values())
        low, high = stratified_interval(samples)
        middle = aggregate(samples)
        beats = "; ".join(
            text for other in scores if other != method and (text := _beats(scores, method, other))
        )
        lines.append(
            f"| {method} | {len(tasks)} | {middle:.2f} [{low:.2f}, {high:.2f}] | {beats} |"
        )
    return [*lines, "", f"![performance profiles, {suite}]({(folder / suite).as_posix()}.svg)"]


def _beats(scores: Mapping[str, Mapping[str, Floats]], method: str, other: str) -> str:
    common = [task for task in scores[method] if task in scores[other]]
    if not common:
        return ""
    samples = ([scores[name][task] for task in common] for name in (method, other))
    middle, (low, high) = improvement_over_tasks(*samples)
    return f"{other} with {middle:.2f} [{low:.2f}, {high:.2f}] ({len(common)})"


def _beside(known: Sequence[Measured], published: Sequence[Figure]) -> list[str]:
    """Return one table of our methods and all published ones, at the cells' steps."""
    tasks = list(dict.fromkeys(one.cell.short for one in known))
    cells = {one.cell.short: one.cell for one in reversed(known)}
    table: dict[str, dict[str, str]] = {}
    for one in known:
        if one.whole:
            steps = one.cell.steps
            other = "" if steps == cells[one.cell.short].steps else f" (at {steps:,})"
            row = table.setdefault(f"**{one.cell.method}, ours**", {})
            row[one.cell.short] = f"{_mean_text(one.finals)}{other}"
    for figure in published:
        for task in tasks:
            cell = cells[task]
            if figure.metric == cell.figure and _is_of(figure, cell):
                if figure.step not in (None, cell.steps):
                    continue
                spread = "" if figure.std is None else f" ± {format_number(figure.std)}"
                row = table.setdefault(f"{figure.method} ({figure.source})", {})
                row[task] = f"{format_number(figure.mean)}{spread}"
    at = ", ".join(f"{step:,}" for step in sorted({cell.steps for cell in cells.values()}))
    lines = ["", f"Beside published figures, mean ± deviation over seeds at {at} steps:", ""]
    lines += [f"| method | {' | '.join(tasks)} |", f"|{' --- |' * (len(tasks) + 1)}"]
    for name, row in table.items():
        lines.append(f"| {name} | {' | '.join(row.get(task, '') for task in tasks)} |")
    return lines


def _plots(folder: Path, known: Sequence[Measured]) -> list[str]:
    lines = []
    for one in known:
        if one.curves:
            facts = one.record.facts
            machine = facts.get("machine", {})
            told = ", ".join(
                str(machine[name]) for name in ("device", "processor") if name in machine
            )
            lines += [
                "",
                f"![{_title(one)}]({(folder / one.cell.slug).as_posix()}.svg)",
                "",
                f"`{facts.get('command', '')}`, {told}, torch {machine.get('torch')}, "
                f"{str(machine.get('date'))[:10]}.",
            ]
    return lines


def _title(one: Measured) -> str:
    seeds = len(one.curves)
    return f"{one.cell.method} on {one.cell.short}: {one.cell.figure} over steps, {seeds} seeds"


def plot(one: Measured, published: Sequence[Figure]) -> str:
    """Return the learning curve of a cell as an SVG file; published means are dashed."""
    logs = one.curves
    points = [p for p in curve_of(list(logs.values())) if p.iqm is not None]
    lines = [
        Line(
            label=one.cell.slug,
            number=0,
            points=tuple((p.step, p.iqm) for p in points if p.iqm is not None),
            band=tuple((p.step, p.low or 0.0, p.high or 0.0) for p in points),
            faint=tuple(tuple(sorted(log.items())) for log in logs.values()),
        )
    ]
    others = [f for f in published if f.method == _published(one.cell) and _is_of(f, one.cell)]
    curve = {f.step: f.mean for f in reversed(others) if f.step and f.metric == one.cell.figure}
    if len(curve) > 1:
        lines.append(Line(label="published", number=DASHED, points=tuple(sorted(curve.items()))))
    return chart_file([line for line in lines if line.points], SIZE, _title(one))


def profile_plot(scores: Mapping[str, Mapping[str, Floats]], suite: str) -> str:
    """Return the performance profiles of all methods as an SVG file."""
    lines = []
    for number, (method, tasks) in enumerate(scores.items()):
        samples = list(tasks.values())
        shares = performance_profile(samples, THRESHOLDS)
        ends = profile_intervals(samples, THRESHOLDS, resamples=2000)
        lines.append(
            Line(
                label=method,
                number=number,
                points=tuple(zip(THRESHOLDS.tolist(), shares.tolist(), strict=True)),
                band=tuple(
                    (x, low, high)
                    for x, (low, high) in zip(THRESHOLDS.tolist(), ends.tolist(), strict=True)
                ),
            )
        )
    title = f"Share of runs above a score, {suite}: {', '.join(scores)}"
    return chart_file(lines, SIZE, title, across="score", legend=True)


def render(records: Path, cells: Sequence[Cell] = SUITE) -> Path | None:
    """Write the plots, and the part of the page two folders above; returns the page if it is there.

    Raises:
        DataError: When a record cannot be read, the page has no place, or a file cannot be written.
    """
    page = records.parent.parent / PAGE
    published = read_published(records.parent / PUBLISHED)
    known = [Measured(cell=cell, record=Record(records, cell)) for cell in cells]
    try:
        for one in known:
            if one.curves:
                path = records / f"{one.cell.slug}.svg"
                path.write_text(plot(one, published), encoding="utf-8")
        for suite in SUITES:
            scores = _scores([one for one in known if one.cell.suite == suite], published)
            if scores:
                path = records / f"{suite}.svg"
                path.write_text(profile_plot(scores, suite), encoding="utf-8")
        if not page.is_file():
            return None
        text = page.read_text(encoding="utf-8")
        if not _PART.search(text):
            raise DataError(
                f"{page} has no place for the suite; write <!-- generated: suite --> and, below, "
                "<!-- end generated --> where it belongs"
            )
        part = section(Path(os.path.relpath(records, page.parent)), records, cells)
        page.write_text(_PART.sub(lambda m: f"{m[1]}{part}\n{m[2]}", text), encoding="utf-8")
    except (OSError, csv.Error) as error:
        raise DataError(f"the records in {records} cannot be rendered ({error})") from None
    return page

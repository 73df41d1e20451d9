"""Curves of others, read from a CSV file with one number a row, beside our own runs.

The columns are those of the records in docs/studies/suite: method, task, seed, step, metric, value.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.errors import DataError
from rl_training.experiment.summary import RETURN
from rl_training.experiment.zoo import short_task
from rl_training.output_files import written_beside
from rl_training.reporting.charts import WIDE, Line, chart_file
from rl_training.reporting.figures import curve, thin
from rl_training.reporting.gather import Method, Run, Task
from rl_training.validation import suggest

COLUMNS = ("method", "task", "seed", "step", "metric", "value")
GRID = 100
"""Points of curves whose seeds were evaluated at different steps."""
Curves = dict[str, dict[str, dict[int, dict[int, float]]]]
"""Values by task, method, seed and step."""


@dataclass(frozen=True, kw_only=True)
class Published(Run):
    """A seed of a method in a file."""

    log: Mapping[int, float]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The curve as lines of a log."""
        return [{"step": s, "kind": "eval", RETURN: value} for s, value in self.log.items()]

    @cached_property
    def evaluations(self) -> dict[int, float]:
        """Value by step."""
        return dict(self.log)


def read_curves(path: Path, metric: str | None = None) -> Curves:
    """Return the curves of a file.

    Args:
        path: The file.
        metric: Which one; None takes `eval_return_mean`, or the only one there is.

    Raises:
        DataError: In one sentence, with the row: the first line of the file is row 1.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a CSV file: it holds bytes that are not text") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    if not text.strip():
        raise DataError(f"{path} is empty; its first line must be {','.join(COLUMNS)}")
    table = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]}; its first line must name {', '.join(COLUMNS)}"
        )
    numbered = list(enumerate(table, 2))
    chosen = _metric({row["metric"] for _, row in numbered}, metric, path)
    found: Curves = {}
    for number, row in numbered:
        seed, step = (_whole(row, name, path, number) for name in ("seed", "step"))
        value = _number(row, path, number)
        if row["metric"] != chosen:
            continue
        log = found.setdefault(row["task"], {}).setdefault(row["method"], {}).setdefault(seed, {})
        if step in log:
            raise DataError(
                f"{path}, row {number}: {row['method']} on {row['task']}, seed {seed}, step {step} "
                f"is there already"
            )
        log[step] = value
    return found


def _metric(known: set[str], asked: str | None, path: Path) -> str:
    if not known:
        raise DataError(f"{path} has no rows below its first line")
    if asked is None:
        if RETURN in known or len(known) > 1:
            asked = RETURN
        else:
            return next(iter(known))
    if asked not in known:
        raise DataError(
            f"{path} has no metric {asked}{suggest(asked, known)}; choose with --metric"
        )
    return asked


def _whole(row: Mapping[str, str | None], name: str, path: Path, number: int) -> int:
    try:
        value = float(row[name] or "")
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise DataError(
            f"{path}, row {number}: {name} is {row[name]!r}, not a whole number"
        ) from None
    return int(value)


def _number(row: Mapping[str, str | None], path: Path, number: int) -> float:
    try:
        value = float(row["value"] or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}, row {number}: value is {row['value']!r}, not a number")
    return value


def beside(
    tasks: Sequence[Task], files: Mapping[Path, Curves], task: str | None = None
) -> list[Task]:
    """Return tasks with the methods of files beside the runs'.

    Args:
        tasks: Of our runs; there may be none.
        files: What the files hold.
        task: What the files call the runs' task, where that is another name.

    Raises:
        DataError: When a file has no curve of the tasks.
    """
    own = {each.name: each for each in tasks}
    if task is not None and len(own) > 1:
        raise DataError(f"--task {task} stands for one task, but the runs are of {', '.join(own)}")
    if not own:
        names = dict.fromkeys(name for curves in files.values() for name in curves)
        own = {name: Task(name=name, methods=()) for name in names if task in (None, name)}
    for path, curves in files.items():
        called = {name: name if task is None else task for name in own}
        if not any(curves.get(name) for name in called.values()):
            raise DataError(
                f"{path} has curves of {', '.join(curves)}, none of "
                f"{', '.join(called.values())}; --task says what the file calls the runs' task"
            )
        for name, theirs in called.items():
            methods = list(_methods(curves.get(theirs, {}), path, len(own[name].methods)))
            own[name] = replace(own[name], methods=(*own[name].methods, *methods))
    return list(own.values())


def _methods(
    curves: Mapping[str, Mapping[int, Mapping[int, float]]], path: Path, first: int
) -> Iterator[Method]:
    for number, (method, logs) in enumerate(curves.items(), first):
        runs = tuple(
            Published(folder=path, config={"algo": method, "seed": seed}, system={}, log=log)
            for seed, log in sorted(_aligned(logs).items())
        )
        yield Method(
            label=f"{method} ({path.stem})", number=number, runs=runs, settings={"algo": method}
        )


def _aligned(logs: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
    """Return curves that share their steps: as they are, or between the points of each."""
    common = set.intersection(*(set(log) for log in logs.values()))
    if len(common) > 1 or len(logs) == 1:
        return {seed: dict(sorted(log.items())) for seed, log in logs.items()}
    low, high = max(map(min, logs.values())), min(map(max, logs.values()))
    if low >= high:
        return {seed: dict(sorted(log.items())) for seed, log in logs.items()}
    steps = np.unique(np.linspace(low, high, GRID).round().astype(int))
    return {
        seed: dict(zip(steps.tolist(), _between(log, steps), strict=True))
        for seed, log in logs.items()
    }


def _between(log: Mapping[int, float], steps: Any) -> list[float]:
    known = sorted(log)
    values: list[float] = np.interp(steps, known, [log[step] for step in known]).tolist()
    return values


def lines_of(task: Task) -> list[Line]:
    """Return the curves of a task: interquartile means, intervals, and each seed behind them."""
    lines = []
    for method in task.methods:
        points = [p for p in curve(method) if p.iqm is not None]
        if points:
            several = len(method.runs) > 1
            lines.append(
                Line(
                    label=method.label,
                    number=method.number,
                    points=tuple((p.step, p.iqm or 0.0) for p in points),
                    band=tuple((p.step, p.low or 0.0, p.high or 0.0) for p in points),
                    faint=tuple(
                        tuple((s, run.evaluations[s]) for s in thin(sorted(run.evaluations)))
                        for run in method.runs
                        if several and np.isfinite([*run.evaluations.values()]).all()
                    ),
                    seconds=training_seconds(method),
                )
            )
    return lines


def training_seconds(method: Method) -> tuple[tuple[float, float], ...]:
    """Return how long the runs had trained by each step that all of them logged, on average."""
    clocks = [run.clock for run in method.runs if run.clock]
    if not clocks:
        return ()
    common = thin(sorted(set.intersection(*(set(clock) for clock in clocks))))
    return tuple((s, round(float(np.mean([c[s] for c in clocks])), 2)) for s in common)


def write_drawings(tasks: Sequence[Task], target: Path) -> list[Path]:
    """Write an SVG per task; of several, each has the name of its task at the end.

    Raises:
        DataError: When a task has no curve, or a file cannot be written.
    """
    paths = []
    for task in tasks:
        lines = lines_of(task)
        if not lines:
            raise DataError(f"{task.name}: no method has two seeds or more with a step in common")
        name = f"{target.stem}_{short_task(task.name)}{target.suffix}"
        path = target if len(tasks) == 1 else target.with_name(name)
        drawing = chart_file(lines, WIDE, f"Return by step on {task.name}", legend=True)
        try:
            with written_beside(path) as part:
                part.write_text(drawing, encoding="utf-8")
        except OSError as error:
            raise DataError(
                f"{path} cannot be written ({error.strerror}); choose another with -o"
            ) from None
        paths.append(path)
    return paths

"""The figures of a comparison: final, last and best returns over seeds, and who beats whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_training.errors import DataError
from rl_training.experiment.statistics import (
    LEVEL,
    bootstrap_interval,
    improvement_interval,
    interquartile_mean,
    probability_of_improvement,
)
from rl_training.experiment.summary import CurvePoint, curve_of
from rl_training.reporting.gather import Method, Run, Task

LAST_SHARE = 0.1
"""Part of a run whose evaluations make its `last` figure."""
MOST_POINTS = 160
"""Points of a curve; more cannot be told apart on a page."""
KINDS = ("final", "last", "best")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """An interquartile mean over seeds and its interval."""

    iqm: float
    low: float
    high: float
    values: tuple[float, ...]
    """One per seed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one method reached."""

    method: Method
    final: Figure | None
    """Evaluation at the end of the run."""
    last: Figure | None
    """Mean of the evaluations in the last tenth of the run."""
    best: Figure | None
    """Highest evaluation of the run: it flatters, since the highest of noisy figures is taken."""
    score: Figure | None
    """The same as `final` between a random policy's return, 0, and an expert's, 100."""
    success: Figure | None
    """Share of episodes that succeeded in the final evaluation, where the task says so."""
    steps: int
    """Steps that every seed has done."""
    seconds: float | None
    """Training time, mean over seeds trained side by side or one by one."""

    def figure(self, kind: str) -> Figure | None:
        """Return one of `KINDS`."""
        found: Figure | None = getattr(self, kind)
        return found


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """How likely a run of one method beats a run of another."""

    probability: float
    low: float
    high: float


def rows_of(task: Task) -> list[Row]:
    """Return a row per method, in the order of the task."""
    return [_row(method) for method in task.methods]


def ranked(task: Task, kind: str = "final") -> list[Row]:
    """Return the rows, best first; those never evaluated come last.

    Raises:
        DataError: When `kind` is not one of `KINDS`.
    """
    if kind not in KINDS:
        raise DataError(f"a ranking is by {', '.join(KINDS)}, got {kind!r}")

    def key(row: Row) -> float:
        figure = row.figure(kind)
        return -math.inf if figure is None or math.isnan(figure.iqm) else figure.iqm

    return sorted(rows_of(task), key=key, reverse=True)


def improvements(rows: Sequence[Row], kind: str = "final") -> list[list[Improvement | None]]:
    """Return who beats whom, row over column; None on the diagonal and where figures lack."""
    return [[_improvement(row, other, kind) for other in rows] for row in rows]


def curve(method: Method) -> tuple[CurvePoint, ...]:
    """Return the learning curve over seeds."""
    logs = [run.evaluations for run in method.runs if run.evaluations]
    if not logs:
        return ()
    common = sorted(set.intersection(*(set(log) for log in logs)))
    kept = set(thin(common))
    return curve_of([{s: v for s, v in log.items() if s in kept} for log in logs])


def thin(steps: Sequence[int]) -> list[int]:
    """Return at most `MOST_POINTS` of the steps, evenly, the last among them."""
    if len(steps) <= MOST_POINTS:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, MOST_POINTS).round().astype(int)
    return [steps[place] for place in places]


def _row(method: Method) -> Row:
    evaluated = [run for run in method.runs if run.evaluations]
    seconds = [s for run in method.runs if (s := _seconds(run)) is not None]
    return Row(
        method=method,
        final=_figure([run.evaluations[max(run.evaluations)] for run in evaluated]),
        last=_figure([_last(run) for run in evaluated]),
        best=_figure([max(run.evaluations.values()) for run in evaluated]),
        score=_final([run.scores for run in evaluated]),
        success=_final([run.successes for run in evaluated]),
        steps=min(run.step for run in method.runs),
        seconds=float(np.mean(seconds)) if seconds else None,
    )


def _final(series: Sequence[Mapping[int, float]]) -> Figure | None:
    """Return the figure of the last values of the runs, if every run has some."""
    return _figure([values[max(values)] for values in series]) if all(series) else None


def _last(run: Run) -> float:
    end = max(run.evaluations)
    return float(np.mean([v for s, v in run.evaluations.items() if s >= (1 - LAST_SHARE) * end]))


def _seconds(run: Run) -> float | None:
    """Return how long a run has trained."""
    return run.clock[max(run.clock)] if run.clock else None


def _figure(values: Sequence[float]) -> Figure | None:
    if not values:
        return None
    low, high = bootstrap_interval(values, interquartile_mean, level=LEVEL)
    return Figure(
        iqm=float(interquartile_mean(values)), low=low, high=high, values=tuple(map(float, values))
    )


def _improvement(row: Row, other: Row, kind: str) -> Improvement | None:
    first, second = row.figure(kind), other.figure(kind)
    if row is other or first is None or second is None:
        return None
    low, high = improvement_interval(first.values, second.values)
    probability = float(probability_of_improvement(first.values, second.values))
    return (
        None
        if math.isnan(probability)
        else Improvement(probability=probability, low=low, high=high)
    )

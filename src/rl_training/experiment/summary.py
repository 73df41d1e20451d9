"""The summary of a group, `summary.json` in the group's folder.

Returns over time come from the seeds' logs, not from what this process saw, so that a resumed run
has its whole curve.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from rl_training.errors import DataError, RLTrainingError
from rl_training.experiment.checkpoint.files import is_plain
from rl_training.experiment.grid import Member, point_text
from rl_training.experiment.logging import number_in, read_metrics
from rl_training.experiment.statistics import (
    LEVEL,
    RESAMPLES,
    bootstrap_interval,
    bootstrap_intervals,
    interquartile_mean,
)
from rl_training.validation import StrictModel

SUMMARY_FILE = "summary.json"
RETURN = "eval_return_mean"
SUCCESS = "eval_success_rate"
"""Metric of an evaluation: share of episodes whose last step says that they succeeded."""


class SeedSummary(StrictModel):
    """One member; what was never evaluated, or is not finite, is null."""

    seed: int
    point: dict[str, float] = Field(default_factory=dict)
    """The member's values of the settings that vary; none without a grid."""
    final_return: float | None
    """Mean return of the last evaluation."""
    best_return: float | None
    """Mean return of the best evaluation."""
    best_step: int | None
    """Step of the best evaluation, the first of equals."""
    steps: int
    gradient_steps: int


class FinalReturn(StrictModel):
    """Figures over the final returns of the seeds."""

    mean: float | None
    median: float | None
    iqm: float | None
    iqm_low: float | None
    iqm_high: float | None
    min: float | None
    max: float | None


class CurvePoint(StrictModel):
    """Interquartile mean of one evaluation, and its interval."""

    step: int
    iqm: float | None
    low: float | None
    high: float | None


class PointSummary(StrictModel):
    """What the seeds of one point of a grid reached."""

    point: dict[str, float]
    best: bool
    """Whether no point has a higher interquartile mean of its final returns."""
    final_return: FinalReturn
    curve: tuple[CurvePoint, ...]
    """The evaluations that every seed of the point has."""


class GroupSummary(StrictModel):
    """What a group reached: its seeds, or with a grid each point with all seeds."""

    num_seeds: int
    """Different seeds; with a grid each point has that many."""
    level: float
    """Of the intervals."""
    resamples: int
    """Of the bootstrap."""
    final_return: FinalReturn
    """Over all members, whatever their point."""
    seeds: tuple[SeedSummary, ...]
    """The members: point by point, in the order of the run's `seeds`."""
    curve: tuple[CurvePoint, ...]
    """The evaluations that every member has."""
    points: tuple[PointSummary, ...] = ()
    """The points of a grid, in its order; none without one."""

    def metrics(self) -> dict[str, float]:
        """Return what `TrainResult.metrics` of a group holds beside the means; null is NaN."""
        final = self.final_return
        values = {"iqm": final.iqm, "iqm_low": final.iqm_low, "iqm_high": final.iqm_high}
        return {f"eval_return_{n}": math.nan if v is None else v for n, v in values.items()}

    def curves(self) -> dict[str, tuple[CurvePoint, ...]]:
        """Return the curves worth drawing by their names: the group's, or one per point."""
        if self.points:
            return {point_text(point.point): point.curve for point in self.points}
        return {f"IQM, {self.level:.0%} interval": self.curve} if self.curve else {}


def summarize_group(
    members: Sequence[Member], folders: Sequence[Path], finals: Sequence[Mapping[str, float]]
) -> GroupSummary:
    """Put the logs and final metrics of a group's members together."""
    logs = [evaluations(folder) for folder in folders]
    returns = [metrics[RETURN] for metrics in finals]
    return GroupSummary(
        num_seeds=len({member.seed for member in members}),
        level=LEVEL,
        resamples=RESAMPLES,
        final_return=over_seeds(returns),
        seeds=tuple(
            _one_member(member, metrics, log)
            for member, metrics, log in zip(members, finals, logs, strict=True)
        ),
        curve=curve_of(logs),
        points=_points(members, returns, logs) if members[0].point else (),
    )


def _points(
    members: Sequence[Member], finals: Sequence[float], logs: Sequence[dict[int, float]]
) -> tuple[PointSummary, ...]:
    """Summarise the seeds of each point by themselves."""
    rows: dict[tuple[float, ...], list[int]] = {}
    for index, member in enumerate(members):
        rows.setdefault(tuple(member.point.values()), []).append(index)
    returns = [over_seeds([finals[index] for index in row]) for row in rows.values()]
    best = max((r.iqm for r in returns if r.iqm is not None), default=math.nan)
    return tuple(
        PointSummary(
            point=dict(members[row[0]].point),
            best=final.iqm == best,
            final_return=final,
            curve=curve_of([logs[index] for index in row]),
        )
        for row, final in zip(rows.values(), returns, strict=True)
    )


def write_summary(folder: Path, summary: GroupSummary) -> Path:
    """Write `summary.json`; a reader sees the old file or the new one, never a half.

    Raises:
        RLTrainingError: When the disk refuses.
    """
    target, temporary = folder / SUMMARY_FILE, folder / f".{SUMMARY_FILE}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(summary.model_dump(mode="json"), file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise RLTrainingError(
            f"{target} cannot be written ({error.strerror}); the run is saved, make room or make "
            f"the folder writable, then `rl-training resume --checkpoint {folder}` writes it"
        ) from error
    return target


def read_summary(folder: Path) -> GroupSummary | None:
    """Read a group's summary; None where there is none.

    Raises:
        DataError: When the file is not a summary.
    """
    path = folder / SUMMARY_FILE
    if not is_plain(path):
        return None
    try:
        return GroupSummary.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(
            f"{path} is not a summary of this version ({error.error_count()} mistakes); "
            f"`rl-training resume --checkpoint {folder}` writes it again"
        ) from None


def evaluations(folder: Path) -> dict[int, float]:
    """Return the mean return by step."""
    rows = read_metrics(folder, "eval")
    return {row["step"]: mean for row in rows if (mean := number_in(row, RETURN)) is not None}


def _one_member(member: Member, metrics: Mapping[str, float], log: dict[int, float]) -> SeedSummary:
    finite = {step: value for step, value in log.items() if math.isfinite(value)}
    best = max(finite, key=finite.__getitem__, default=None)
    return SeedSummary(
        seed=member.seed,
        point=dict(member.point),
        final_return=_finite(metrics[RETURN]),
        best_return=None if best is None else finite[best],
        best_step=best,
        steps=int(metrics["global_step"]),
        gradient_steps=int(metrics["gradient_steps"]),
    )


def over_seeds(returns: Sequence[float]) -> FinalReturn:
    """Return the figures over one return per member."""
    interval = bootstrap_interval(returns, interquartile_mean)
    values = {
        "mean": np.mean(returns),
        "median": np.median(returns),
        "iqm": interquartile_mean(returns),
        "iqm_low": interval.low,
        "iqm_high": interval.high,
        "min": np.min(returns),
        "max": np.max(returns),
    }
    return FinalReturn(**{name: _finite(float(value)) for name, value in values.items()})


def curve_of(logs: Sequence[dict[int, float]]) -> tuple[CurvePoint, ...]:
    """Return interquartile means over members at the evaluations that all of them have."""
    # Seeds resumed alone for a while may have evaluations that the others lack.
    steps = sorted(set.intersection(*(set(log) for log in logs)))
    if not steps:
        return ()
    rows = np.array([[log[step] for log in logs] for step in steps])  # [T, S]
    middles = interquartile_mean(rows)  # [T]
    intervals = bootstrap_intervals(rows, interquartile_mean)  # [T, 2]
    return tuple(
        CurvePoint(step=step, iqm=_finite(iqm), low=_finite(low), high=_finite(high))
        for step, iqm, (low, high) in zip(steps, middles.tolist(), intervals.tolist(), strict=True)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

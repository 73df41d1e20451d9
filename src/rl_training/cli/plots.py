"""Learning curves of a run as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.experiment.logging import read_metrics
from rl_training.experiment.statistics import LEVEL
from rl_training.runtime.summary import RETURN, CurvePoint

MOST_NAMED = 8
"""Seeds that a legend names; more would cover the curves."""

PANELS = (
    ("eval", RETURN, "evaluation return"),
    ("train", "rollout/return_mean", "training return (last 100 episodes)"),
    ("train", "critic_loss", "critic loss"),
    ("train", "actor_loss", "actor loss"),
    ("train", "loss", "loss"),
    ("train", "entropy", "policy entropy"),
    ("train", "q_value_mean", "mean Q"),
    ("train", "value_loss", "value loss"),
)


def write_plots(
    run_dir: Path, members: Sequence[Path] = (), group: Sequence[CurvePoint] = ()
) -> Path | None:
    """Draw the run's curves, one line per seed; returns the picture, or None without matplotlib.

    Args:
        run_dir: Folder of the run; the picture goes there.
        members: Folders of a group's seeds.
        group: Interquartile mean of the group, drawn over its evaluation returns.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    folders = list(members) or [run_dir]
    curves = [
        (title, lines, group if name == RETURN else ())
        for kind, name, title in PANELS
        if (lines := [_curve(folder, kind, name) for folder in folders]) and any(map(len, lines))
    ]
    if not curves:
        return None
    figure = Figure(figsize=(5.0 * min(2, len(curves)), 3.2 * ((len(curves) + 1) // 2)))
    FigureCanvasAgg(figure)
    for index, (title, lines, band) in enumerate(curves):
        axis = figure.add_subplot((len(curves) + 1) // 2, min(2, len(curves)), index + 1)
        _draw_seeds(axis, lines, folders, faint=bool(band))
        _draw_group(axis, band)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.tight_layout()
    target = run_dir / "curves.png"
    figure.savefig(target, dpi=110)
    return target


def _curve(folder: Path, kind: str, name: str) -> list[tuple[int, float]]:
    rows = read_metrics(folder, kind)
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), float)]


def _draw_seeds(
    axis: Any,
    lines: Sequence[Sequence[tuple[int, float]]],
    folders: Sequence[Path],
    *,
    faint: bool,
) -> None:
    look = {"linewidth": 0.9, "alpha": 0.5} if faint else {"linewidth": 1.4}
    for line, folder in zip(lines, folders, strict=True):
        if line:
            steps, values = zip(*line, strict=True)
            label = folder.name if 1 < len(folders) <= MOST_NAMED else None
            axis.plot(steps, values, marker="o", markersize=3, label=label, **look)


def _draw_group(axis: Any, points: Sequence[CurvePoint]) -> None:
    """Draw the interquartile mean and its interval; evaluations without a figure leave a gap."""
    if not points:
        return
    steps = [point.step for point in points]
    # None becomes NaN, where matplotlib breaks the line.
    iqm, low, high = np.array([(p.iqm, p.low, p.high) for p in points], dtype=np.float64).T
    axis.fill_between(steps, low, high, color="black", alpha=0.15, linewidth=0)
    axis.plot(steps, iqm, color="black", linewidth=2.2, label=f"IQM, {LEVEL:.0%} interval")

"""Learning curves of a run as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training.experiment.logging import read_metrics

PANELS = (
    ("eval", "eval_return_mean", "evaluation return"),
    ("train", "rollout/return_mean", "training return (last 100 episodes)"),
    ("train", "critic_loss", "critic loss"),
    ("train", "actor_loss", "actor loss"),
    ("train", "loss", "loss"),
    ("train", "entropy", "policy entropy"),
    ("train", "q_value_mean", "mean Q"),
    ("train", "value_loss", "value loss"),
)


def write_plots(run_dir: Path, members: Sequence[Path] = ()) -> Path | None:
    """Draw the run's curves, one line per seed; returns the picture, or None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    folders = list(members) or [run_dir]
    curves = [
        (title, lines)
        for kind, name, title in PANELS
        if (lines := [_curve(folder, kind, name) for folder in folders]) and any(map(len, lines))
    ]
    if not curves:
        return None
    figure = Figure(figsize=(5.0 * min(2, len(curves)), 3.2 * ((len(curves) + 1) // 2)))
    FigureCanvasAgg(figure)
    for index, (title, lines) in enumerate(curves):
        axis = figure.add_subplot((len(curves) + 1) // 2, min(2, len(curves)), index + 1)
        _draw(axis, title, lines, folders)
    figure.tight_layout()
    target = run_dir / "curves.png"
    figure.savefig(target, dpi=110)
    return target


def _curve(folder: Path, kind: str, name: str) -> list[tuple[int, float]]:
    rows = read_metrics(folder, kind)
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), float)]


def _draw(
    axis: Any, title: str, lines: Sequence[Sequence[tuple[int, float]]], folders: Sequence[Path]
) -> None:
    for line, folder in zip(lines, folders, strict=True):
        if line:
            steps, values = zip(*line, strict=True)
            label = folder.name if len(folders) > 1 else None
            axis.plot(steps, values, marker="o", markersize=3, linewidth=1.4, label=label)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.grid(alpha=0.3)
    if len(folders) > 1:
        axis.legend(fontsize=7)

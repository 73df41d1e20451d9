"""Learning curves of a run as a picture, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.experiment.logging import read_metrics
from rl_training.experiment.summary import RETURN, CurvePoint
from rl_training.output_files import written_beside

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


def draw_plots(
    run_dir: Path, members: Sequence[Path], groups: Mapping[str, Sequence[CurvePoint]]
) -> Path | str:
    """Draw as `write_plots` does; without a picture return why not, for the run itself is whole."""
    try:
        drawn = write_plots(run_dir, members, groups)
    except OSError as error:
        return error.strerror or str(error)
    if drawn is None and importlib.util.find_spec("matplotlib") is not None:
        return "nothing was logged"
    return drawn or 'pip install "rl-training[report]"'


def write_plots(
    run_dir: Path,
    members: Sequence[Path] = (),
    groups: Mapping[str, Sequence[CurvePoint]] | None = None,
) -> Path | None:
    """Draw the run's curves, one line per member; returns the picture, or None without matplotlib.

    Args:
        run_dir: Folder of the run; the picture goes there.
        members: Folders of a group's members.
        groups: Interquartile means drawn over the evaluation returns, by what a legend calls them:
            one for a group of seeds, or one per point of a grid, whose members follow each other.

    Raises:
        OSError: When the picture cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    folders, groups = list(members) or [run_dir], groups or {}
    looks = _looks(folders, list(groups))
    curves = [
        (title, lines, groups if name == RETURN else {})
        for kind, name, title in PANELS
        if (lines := [_curve(folder, kind, name) for folder in folders]) and any(map(len, lines))
    ]
    if not curves:
        return None
    figure = Figure(figsize=(5.0 * min(2, len(curves)), 3.2 * ((len(curves) + 1) // 2)))
    FigureCanvasAgg(figure)
    for index, (title, lines, bands) in enumerate(curves):
        axis = figure.add_subplot((len(curves) + 1) // 2, min(2, len(curves)), index + 1)
        _draw_members(axis, lines, looks, faint=bool(bands))
        for place, (label, points) in enumerate(bands.items()):
            _draw_group(axis, points, label, "black" if len(bands) == 1 else f"C{place}")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.tight_layout()
    target = run_dir / "curves.png"
    with written_beside(target) as part:
        figure.savefig(part, dpi=110)
    return target


def _curve(folder: Path, kind: str, name: str) -> list[tuple[int, float]]:
    rows = read_metrics(folder, kind)
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), float)]


def _looks(folders: Sequence[Path], points: Sequence[str]) -> list[dict[str, Any]]:
    """Return name and colour of each member: its own, or in a grid those of its point."""
    if len(points) < 2:
        named = 1 < len(folders) <= MOST_NAMED
        return [{"label": folder.name if named else None} for folder in folders]
    size = len(folders) // len(points)
    return [
        {"label": None if i % size else points[i // size], "color": f"C{i // size}"}
        for i in range(len(folders))
    ]


def _draw_members(
    axis: Any,
    lines: Sequence[Sequence[tuple[int, float]]],
    looks: Sequence[Mapping[str, Any]],
    *,
    faint: bool,
) -> None:
    width = {"linewidth": 0.9, "alpha": 0.5} if faint else {"linewidth": 1.4}
    for line, look in zip(lines, looks, strict=True):
        if line:
            steps, values = zip(*line, strict=True)
            # The band over a point's members has the name already.
            own = {**look, "label": None} if faint and "color" in look else look
            axis.plot(steps, values, marker="o", markersize=3, **width, **own)


def _draw_group(axis: Any, points: Sequence[CurvePoint], label: str, color: str) -> None:
    """Draw the interquartile mean and its interval; evaluations without a figure leave a gap."""
    if not points:
        return
    steps = [point.step for point in points]
    # None becomes NaN, where matplotlib breaks the line.
    iqm, low, high = np.array([(p.iqm, p.low, p.high) for p in points], dtype=np.float64).T
    axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axis.plot(steps, iqm, color=color, linewidth=2.2, label=label)

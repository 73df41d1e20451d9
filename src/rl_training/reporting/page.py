"""The report: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from rl_training._version import __version__
from rl_training.errors import DataError, MissingExtraError
from rl_training.experiment.checkpoint.files import open_regular
from rl_training.experiment.statistics import LEVEL
from rl_training.reporting.beside import lines_of, training_seconds
from rl_training.reporting.charts import NARROW, SMALL, WIDE, Line, line_chart, swatch
from rl_training.reporting.figures import Figure, Row, improvements, ranked, thin
from rl_training.reporting.gather import (
    ABSENT,
    Method,
    Run,
    Task,
    short_key,
    shown_folders,
    value_text,
    without_folders,
)
from rl_training.reporting.recorded import recorded_data
from rl_training.resources import ASSETS

MOST_VIDEO_BYTES = 20 * 2**20
FEW_SEEDS = 5
"""Below so many seeds an interval says little."""
HIDDEN_METRICS = frozenset({"gradient_steps", "rollout/episodes", "time/elapsed_seconds"})
HEALTH_KINDS = {"model": "fit of the model", "imagined": "imagined rollouts"}
NOTHING = "-"
MODEL_PARTS = "world model (real, reconstructed, predicted without looking, prediction less real), "
MEDIA = {".mp4": "video/mp4", ".webm": "video/webm", ".gif": "image/gif"}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A small chart and its name."""

    title: str
    chart: Markup


@dataclass(frozen=True, kw_only=True)
class Video:
    """A video of an agent, inside the page; one that is too large is linked."""

    method: Method
    name: str
    is_video: bool
    source: str
    is_inside: bool = True


def write_report(tasks: Sequence[Task], target: Path, title: str) -> Path:
    """Write the page.

    Raises:
        MissingExtraError: Without jinja2.
        DataError: When the file cannot be written.
    """
    html = render(tasks, title, target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A title from the command line may hold bytes that are not text.
        target.write_text(html, encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error.strerror}); choose another with -o"
        ) from None
    return target


def render(tasks: Sequence[Task], title: str, place: Path) -> str:
    """Return the page's HTML; `place` is the folder that it will be in."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MissingExtraError('report needs jinja2; pip install "rl-training[report]"') from None
    environment = Environment(
        loader=FileSystemLoader(ASSETS / "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"swatch": swatch, "level": f"{LEVEL:.0%}", "few": FEW_SEEDS}
    environment.filters |= {
        "figure": figure_text,
        "number": number,
        "value": value_text,
        "key": short_key,
        "duration": duration,
    }
    return environment.get_template("page.html.jinja").render(
        title=title,
        version=__version__,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        tasks=[_task_view(task, place) for task in tasks],
        folders=shown_folders([run for task in tasks for m in task.methods for run in m.runs]),
        systems=_systems([run for task in tasks for m in task.methods for run in m.runs]),
    )


def _task_view(task: Task, place: Path) -> dict[str, Any]:
    """Return everything that the page shows of a task."""
    rows = ranked(task)
    datasets, problems = recorded_data(rows)
    return {
        "datasets": datasets,
        "name": task.name,
        "rows": rows,
        "scored": any(row.score is not None for row in rows),
        "succeeding": any(row.success is not None for row in rows),
        "curves": _curves(task),
        "forest": _forest(rows),
        "improvements": improvements(rows) if len(rows) > 1 else [],
        "shared": {n: v for n, v in task.differences.items() if ABSENT not in v},
        "own": {n: v for n, v in task.differences.items() if ABSENT in v},
        "methods": task.methods,
        "health": {
            name: panels for kind, name in HEALTH_KINDS.items() if (panels := _panels(task, kind))
        },
        "training": _panels(task, "train"),
        "videos": [
            video
            for method in task.methods
            for of_model in (False, True)
            if (video := _video(method, place, of_model=of_model)) is not None
        ],
        "notes": list(
            dict.fromkeys(
                without_folders(text)
                for text in (
                    *(note for m in task.methods for run in m.runs for note in run.notes),
                    *problems,
                )
            )
        ),
        "uneven": len({row.steps for row in rows}) > 1,
        "fewest": min(len(method.runs) for method in task.methods),
    }


def _curves(task: Task) -> list[Markup]:
    """Return the learning curves in a wide and a narrow drawing; none without evaluations."""
    lines = lines_of(task)
    title = f"Evaluation return by step on {task.name}"
    return [line_chart(lines, size, title) for size in (WIDE, NARROW)] if lines else []


def _panels(task: Task, kind: str) -> list[Panel]:
    """Draw each metric of a kind of log line: mean over seeds, band from lowest to highest."""
    names: dict[str, None] = {}
    for run in (run for method in task.methods for run in method.runs):
        for row in run.rows:
            if row.get("kind") == kind:
                names |= dict.fromkeys(row)
    shown = [n for n in names if n not in HIDDEN_METRICS and n not in ("step", "kind")]
    panels = []
    for name in shown:
        lines = [line for m in task.methods if (line := _metric_line(m, kind, name)) is not None]
        if lines:
            panels.append(Panel(title=name, chart=line_chart(lines, SMALL, f"{name} by step")))
    return panels


def _metric_line(method: Method, kind: str, name: str) -> Line | None:
    logs = [log for run in method.runs if (log := run.series(kind, name))]
    if not logs:
        return None
    steps = thin(sorted(set.intersection(*(set(log) for log in logs))))
    table = {step: [log[step] for log in logs] for step in steps}
    if not table:
        return None
    return Line(
        label=method.label,
        number=method.number,
        points=tuple((step, float(np.mean(values))) for step, values in table.items()),
        band=tuple((s, min(v), max(v)) for s, v in table.items()) if len(logs) > 1 else (),
        seconds=training_seconds(method),
    )


def _forest(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the final figures as places between the lowest and the highest, in percent."""
    found = [(row, row.final) for row in rows if row.final is not None]
    ends = [v for _, f in found for v in (*f.values, f.low, f.high) if math.isfinite(v)]
    if not ends:
        return {}
    low, high = min(ends), max(ends)
    width = (high - low) or 1.0

    def place(value: float) -> float:
        return round(2 + 96 * (value - low) / width, 2)

    bars = [
        {
            "row": row,
            "low": place(figure.low),
            "width": round(place(figure.high) - place(figure.low), 2),
            "iqm": place(figure.iqm),
            "seeds": [(place(value), number(value)) for value in figure.values],
        }
        for row, figure in found
        if math.isfinite(figure.iqm)
    ]
    return {"bars": bars, "low": number(low), "high": number(high)}


def _video(method: Method, place: Path, *, of_model: bool) -> Video | None:
    """Return the video of the method's best run that has one: of the agent, or of its model."""

    def reached(run: Run) -> float:
        return max(run.evaluations.values(), default=-math.inf)

    for run in sorted(method.runs, key=reached, reverse=True):
        path = run.video(of_model=of_model)
        if path is None:
            continue
        media = MEDIA[path.suffix]
        video = partial(
            Video,
            method=method,
            name=f"{MODEL_PARTS if of_model else ''}seed {run.seed}, {path.name}",
            is_video=media.startswith("video"),
        )
        if path.stat().st_size > MOST_VIDEO_BYTES:
            link = quote(Path(os.path.relpath(path, place.resolve())).as_posix())
            return video(source=link, is_inside=False)
        with open_regular(path, str(path)) as file:
            data = base64.b64encode(file.read(MOST_VIDEO_BYTES)).decode()
        return video(source=f"data:{media};base64,{data}")
    return None


def _systems(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what the runs ran on, one entry per different system, with its number of runs."""
    systems: dict[str, dict[str, Any]] = {}
    for run in runs:
        facts = _facts(run)
        entry = systems.setdefault(repr(facts), {"facts": facts, "runs": 0, "commands": {}})
        entry["runs"] += 1
        command = _command(run.system.get("command"))
        if command:
            entry["commands"][command] = None
    return list(systems.values())


def _command(words: object) -> str:
    """Return what to type to do a run again; nothing where it was begun by a program."""
    if not isinstance(words, list) or not words:
        return ""
    program = Path(str(words[0])).name
    given = [shlex.quote(without_folders(str(word))) for word in words[1:]]
    if program in ("rl-training", "__main__.py"):
        return " ".join(["rl-training", *given])
    # A job of a sweep: its description is a configuration like any other.
    return f"rl-training train --config {given[0]}" if program == "worker.py" and given else ""


def _facts(run: Run) -> list[tuple[str, str]]:
    system = run.system
    packages, git = (_mapping(system.get(name)) for name in ("packages", "git"))
    pairs = {
        "rl-training": system.get("rl_training"),
        "Python": system.get("python"),
        "platform": system.get("platform"),
        "processors": system.get("processors"),
        "device": system.get("device") or run.config.get("device"),
        "commit": str(git.get("commit") or "")[:12] + (" (changed)" if git.get("dirty") else ""),
        **packages,
    }
    return [(name, str(value)) for name, value in pairs.items() if value]


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def number(value: float) -> str:
    """Write a figure with as many decimals as it needs."""
    if not math.isfinite(value):
        return NOTHING
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def figure_text(figure: Figure | None) -> Markup:
    """Write an interquartile mean with its interval."""
    if figure is None or not math.isfinite(figure.iqm):
        return Markup(NOTHING)
    return Markup('<b>{}</b> <span class="ci">[{}, {}]</span>').format(
        number(figure.iqm), number(figure.low), number(figure.high)
    )


def duration(seconds: float | None) -> str:
    """Write a time as 45 s, 12 min or 3.4 h."""
    if seconds is None:
        return NOTHING
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

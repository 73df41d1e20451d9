"""Finds runs on disk and puts those together that differ in their seed alone.

A *method* is a configuration without its seed; a *task* is an environment with its keywords.  Only
logs and descriptions are read, so a run may still be running.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from rl_training.data.datasets.scores import SCORE
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.checkpoint.files import is_plain
from rl_training.experiment.config import flat_settings
from rl_training.experiment.grid import number_text
from rl_training.experiment.logging import METRICS_FILE, number_in, read_metrics
from rl_training.experiment.runs import RUN_FILE, read_description
from rl_training.experiment.summary import SUCCESS, evaluations
from rl_training.experiment.yaml_loader import load_yaml

CIRCUMSTANCES = frozenset(
    {
        "seed",
        "seeds",
        "grid",
        "output_dir",
        "run_name",
        "tags",
        "tensorboard",
        "trackers",
        "log_interval",
        "checkpoint_interval",
        "checkpoint_minutes",
        "keep_checkpoints",
        "device",
        "threads",
        "accelerate",
        "vector_mode",
    }
)
"""Fields that do not make another method of a run."""
MOST_DEEP = 4
"""Folders below a given one in which runs are looked for."""
VIDEOS = (".mp4", ".webm", ".gif")
MODEL_VIDEO = "model_"
"""How the name of a video begins that training makes of a world model's predictions."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One seed of one method."""

    folder: Path
    config: Mapping[str, Any]
    """As `config.yaml` has it, every default filled in."""
    system: Mapping[str, Any]
    """As `run.json` has it; empty where there is none."""

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config.get("seed", 0))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every line of its log."""
        return read_metrics(self.folder)

    @cached_property
    def clock(self) -> dict[int, float]:
        """Seconds of training by step; those of a run that was resumed are added up."""
        before, last, clock = 0.0, 0.0, {}
        for step, seconds in self.series("train", "time/elapsed_seconds").items():
            if seconds < last:
                before += last
            last = seconds
            clock[step] = before + seconds
        return clock

    @cached_property
    def evaluations(self) -> dict[int, float]:
        """Mean evaluation return by step."""
        return evaluations(self.folder)

    @cached_property
    def scores(self) -> dict[int, float]:
        """Normalised score of each evaluation by step, where the task has one."""
        return self.series("eval", SCORE)

    @cached_property
    def successes(self) -> dict[int, float]:
        """Success rate of each evaluation by step, where the task says so."""
        return self.series("eval", SUCCESS)

    def series(self, kind: str, name: str) -> dict[int, float]:
        """Return a metric by step, where it is a finite number."""
        numbers = {row["step"]: number_in(row, name) for row in self.rows if row["kind"] == kind}
        return {s: value for s, value in numbers.items() if value is not None and isfinite(value)}

    @property
    def notes(self) -> list[str]:
        """What the log says about the run's data."""
        texts = [row.get("text") for row in self.rows if row["kind"] == "note"]
        return [text for text in texts if isinstance(text, str)]

    @property
    def step(self) -> int:
        """The last step of the log."""
        return max((row["step"] for row in self.rows), default=0)

    def video(self, *, of_model: bool = False) -> Path | None:
        """Return the newest video in the run's folder: of the agent, or of its world model."""
        found = [
            path
            for folder in (self.folder, self.folder / "videos")
            if folder.is_dir() and (folder == self.folder or not folder.is_symlink())
            for path in folder.iterdir()
            # A link could put any file of this machine onto a page that is sent around.
            if path.suffix in VIDEOS and is_plain(path)
            if path.name.startswith(MODEL_VIDEO) is of_model
        ]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Runs that differ in their seed alone."""

    label: str
    number: int
    """Place in its task, which gives its colour."""
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    """Flat: what makes the method, by dotted key."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment and the methods that were tried on it."""

    name: str
    methods: tuple[Method, ...]
    differences: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings in which the methods differ, with the value of each."""


def gather(paths: Sequence[Path]) -> list[Task]:
    """Return the tasks of all runs in the given folders.

    Args:
        paths: Run folders, folders of groups, or folders that hold such.

    Raises:
        DataError: When a folder is not there or holds no run.
        ConfigError: When a run's `config.yaml` cannot be read.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        found = sorted(_run_folders(Path(path), MOST_DEEP))
        if not found:
            raise DataError(
                f"{path} holds no run: give the folder of a run, of a group, or one above them "
                "(a run's folder has config.yaml and metrics.jsonl)"
            )
        folders |= dict.fromkeys(folder.resolve() for folder in found)
    return _tasks([_read_run(folder) for folder in folders])


def shown_folders(runs: Sequence[Run]) -> dict[Path, str]:
    """Return where each run is, seen from the folder that holds them all."""
    common = Path(os.path.commonpath([run.folder.parent for run in runs])) if runs else Path()
    return {run.folder: run.folder.relative_to(common.parent).as_posix() for run in runs}


def _run_folders(path: Path, depth: int) -> Iterable[Path]:
    if is_plain(path / "config.yaml") and is_plain(path / METRICS_FILE):
        yield path
    elif depth and path.is_dir():
        for folder in path.iterdir():
            if folder.is_dir() and not folder.name.startswith("."):
                yield from _run_folders(folder, depth - 1)


def _read_run(folder: Path) -> Run:
    path = folder / "config.yaml"
    config = load_yaml(path).data
    for name, kind, word in (
        ("algo", str, "text"),
        ("env_id", str, "text"),
        ("seed", int, "a number"),
        ("algo_kwargs", dict, "settings"),
        ("env_kwargs", dict, "settings"),
    ):
        value = config.get(name, None if kind is str else kind())
        if value is None:
            raise ConfigError(f"{path} has no {name}, so it describes no run")
        if type(value) is not kind:
            raise ConfigError(
                f"{path}: {name} is {str(value)[:80]!r} and must be {word}, so it describes no run;"
                " restore the file, or leave that folder out"
            )
    return Run(folder=folder, config=config, system=_read_system(folder))


def _read_system(folder: Path) -> dict[str, Any]:
    """Read `run.json`, of the run or of the group it belongs to."""
    described = folder if is_plain(folder / RUN_FILE) else folder.parent
    return read_description(described)  # a run that lost it still has its curves


def _tasks(runs: Sequence[Run]) -> list[Task]:
    tasks: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        env = {"env_id": run.config["env_id"], "env_kwargs": run.config.get("env_kwargs") or {}}
        methods = tasks.setdefault(json.dumps(env, sort_keys=True), {})
        methods.setdefault(json.dumps(_method_of(run), sort_keys=True), []).append(run)
    names = _task_names(list(tasks))
    result: list[Task] = []
    for name, groups in zip(names, tasks.values(), strict=True):
        settings = [flat_settings(_method_of(group[0])) for group in groups.values()]
        differing = _differences(settings)
        labels = _labels(settings)
        methods_found = []
        for number, (label, flat, group) in enumerate(
            zip(labels, settings, groups.values(), strict=True)
        ):
            ordered = tuple(sorted(group, key=lambda run: (run.seed, str(run.folder))))
            methods_found.append(Method(label=label, number=number, runs=ordered, settings=flat))
        result.append(Task(name=name, methods=tuple(methods_found), differences=differing))
    return result


def _method_of(run: Run) -> dict[str, Any]:
    return {
        name: value
        for name, value in run.config.items()
        if name not in CIRCUMSTANCES and name not in ("env_id", "env_kwargs")
    }


def _task_names(keys: Sequence[str]) -> list[str]:
    """Name tasks by their id, and by their keywords too where two share it."""
    parsed = [json.loads(key) for key in keys]
    ids = [str(env["env_id"]) for env in parsed]
    return [
        name if ids.count(name) == 1 else f"{name} {json.dumps(env['env_kwargs'])}"
        for name, env in zip(ids, parsed, strict=True)
    ]


def _differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    names = dict.fromkeys(name for flat in settings for name in flat)
    table = {name: tuple(flat.get(name, ABSENT) for flat in settings) for name in names}
    return {name: row for name, row in table.items() if any(v != row[0] for v in row[1:])}


class _Absent:
    """Value of a setting that a method does not have."""

    def __repr__(self) -> str:
        return "-"


ABSENT = _Absent()


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name methods by algorithm, and by what differs where two are of the same one."""
    labels = []
    for flat in settings:
        alike = [other for other in settings if other["algo"] == flat["algo"]]
        own = _differences(alike)
        parts = [f"{short_key(name)} {value_text(flat.get(name, ABSENT))}" for name in own]
        shown = ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")
        labels.append(f"{flat['algo']} · {shown}" if shown else str(flat["algo"]))
    # Two that differ only in what is not shown are told apart by a number.
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: i + 1].count(label)})"
        for i, label in enumerate(labels)
    ]


def short_key(name: str) -> str:
    """Return a setting's name without the group that all of them share."""
    return name.removeprefix("algo_kwargs.")


FOLDERS = re.compile(r"(?<![\w:/.~…-])/(?:[^\s/'\"`,;:()<>|]+/)+(?=[^\s/])")
"""What is before the last name of an absolute path."""


def without_folders(text: str) -> str:
    """Return a text without the folders of this machine: a page is sent around."""
    return FOLDERS.sub("…/", text)


def value_text(value: Any) -> str:
    """Write the value of a setting short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return number_text(value) if isinstance(value, float) else without_folders(str(value))

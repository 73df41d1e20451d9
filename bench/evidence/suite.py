"""`python -m bench.evidence --suite mujoco`: the proof at benchmark scale.

A cell is a method on a task, or on a data set that `rl-training data make` has put into `--data`;
all its seeds train in one process, cells train side by side
(`--jobs`).  When `--minutes` are over every process saves and ends, this one with 75, and the same
command with the same `--runs` goes on bit-exactly where it stood; cells whose record is whole are
left out.  Of every finished cell the last checkpoint of each seed plays 100 episodes from common
start states.  Records are CSV files, one per method and task, in `--out`.

    python -m bench.evidence --suite mujoco --methods sac --minutes 8 --jobs 5 --runs runs/suite
    python -m bench.evidence --suite mujoco atari --list
    python -m bench.evidence --suite mujoco atari pixels --render
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.evidence.cells import FIGURES, LAST, RETURN, SUITE, SUITES, Cell
from bench.evidence.gates import CIRCUMSTANCES, EPISODES, seeds_text
from bench.evidence.jobs import STOPPED, Ended, run_all
from bench.evidence.rows import Row, read, write_rows
from bench.evidence.training import FINAL_FILE, Job
from bench.speed.compare import ROOT
from bench.speed.machine import describe
from rl_training.cli.commands import parse_seeds
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.config import load_config
from rl_training.output_files import written_beside
from rl_training.resources import preset_names
from rl_training.transfer import device_name
from rl_training.validation import suggest

RECORDS = ROOT / "docs" / "studies" / "suite"
COLUMNS = ("method", "task", "seed", "step", "metric", "value")
SECONDS = "seconds"
"""Metric: wall time until this step of the process that trains all seeds of the cell."""
PACE = "env_steps_per_second"
"""Metric: environment steps of all seeds of the cell in a second, everything included."""
ONLY_NEWEST = (SECONDS, PACE)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """How far a seed of a cell is, as its record says."""

    steps: int
    done: bool


class Record:
    """The rows of a cell and what they were measured with, in two files."""

    def __init__(self, folder: Path, cell: Cell) -> None:
        """Read what is there."""
        self.path, self.facts_path = folder / f"{cell.slug}.csv", folder / f"{cell.slug}.json"
        self.rows = read(self.path)
        self.facts: dict[str, Any] = {}
        try:
            if self.facts_path.is_file():
                self.facts = json.loads(self.facts_path.read_text(encoding="utf-8"))
        except ValueError:
            raise DataError(f"{self.facts_path} is not JSON; remove it with {self.path}") from None
        if self.rows and set(self.rows[0]) != set(COLUMNS):
            raise DataError(f"{self.path} has other columns than {', '.join(COLUMNS)}")

    def reached(self, seed: int, steps: int) -> Reached:
        """Return how far a seed is, of so many steps."""
        own = [row for row in self.rows if row["seed"] == str(seed)]
        done = any(row["metric"] == LAST and int(row["step"]) >= steps for row in own)
        return Reached(steps=max((int(row["step"]) for row in own), default=0), done=done)

    def require_same(self, settings: Sequence[str]) -> None:
        """Refuse to mix what was measured with other settings.

        Raises:
            DataError: Saying so.
        """
        known = self.facts.get("settings", settings)
        if known != settings:
            raise DataError(
                f"{self.path} was recorded with the settings {known}, this run has {settings}; "
                "name another folder with --out"
            )

    def add(self, rows: Sequence[Row], facts: dict[str, Any]) -> None:
        """Put the rows of some seeds in place of older ones, unless those went further.

        Raises:
            DataError: When the older ones were measured with other settings.
        """
        self.require_same(facts["settings"])
        new: dict[str, list[Row]] = {}
        for row in rows:
            new.setdefault(row["seed"], []).append(row)
        old: dict[str, list[Row]] = {}
        for row in self.rows:
            old.setdefault(row["seed"], []).append(row)
        for seed, own in new.items():
            if _length(own) >= _length(old.get(seed, [])):
                old[seed] = own
        self.rows = [row for seed in sorted(old, key=int) for row in old[seed]]
        self.facts = facts
        write_rows(self.path, COLUMNS, self.rows)
        with written_beside(self.facts_path) as part:
            part.write_text(f"{json.dumps(facts, indent=1)}\n", encoding="utf-8")


def _length(rows: Sequence[Row]) -> tuple[bool, int]:
    """Return how far a seed is: its evaluation at the end counts more than any step."""
    done = any(row["metric"] == LAST for row in rows)
    return done, max((int(row["step"]) for row in rows), default=-1)


def rows_of(job: Job, figure: str = "return") -> list[Row]:
    """Return what the logs of a job say, and what its last checkpoints got.

    Args:
        job: The run.
        figure: What the task is judged by, one of `FIGURES`, beside the return.
    """
    evaluated, last = FIGURES[figure]
    rows: dict[tuple[int, str, int], Row] = {}

    def add(seed: int, step: int, metric: str, value: float) -> None:
        place = (seed, metric, 0 if metric in ONLY_NEWEST else step)
        rows[place] = {
            "method": job.config.algo,
            "task": job.config.env_id,
            "seed": str(seed),
            "step": str(step),
            "metric": metric,
            "value": f"{value:.3f}",
        }

    for point in job.points():
        if point.metric in (RETURN, evaluated):
            add(point.member.seed, point.step, point.metric, point.value)
        elif point.metric == SECONDS and point.value > 0:
            pace = len(job.members) * point.step / point.value
            add(point.member.seed, point.step, SECONDS, point.value)
            add(point.member.seed, point.step, PACE, pace)
    final = job.run / FINAL_FILE
    if final.is_file():
        facts = json.loads(final.read_text(encoding="utf-8"))
        for seed, returns in facts["returns"].items():
            add(int(seed), facts["step"], LAST, math.fsum(returns) / len(returns))
            if figure != "return":
                add(int(seed), facts["step"], last, facts["metrics"][seed][evaluated])
    return sorted(
        rows.values(), key=lambda row: (int(row["seed"]), row["metric"], int(row["step"]))
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", nargs="+", required=True, choices=SUITES, help="which cells")
    add("--methods", help="only these: sac,ppo")
    add("--tasks", help="only these: halfcheetah,pong")
    add("--seeds", help="others than a cell's own: 2000..2009")
    add("--minutes", type=float, help="stop and save after so many")
    add("--jobs", type=int, default=1, help="processes side by side (1)")
    add("--patience", type=float, default=90, help="seconds that runs have to save (90)")
    add("--tell", type=float, default=30, help="seconds between two reports (30)")
    add("--runs", type=Path, default=Path("runs/suite"), help="folder of the runs (runs/suite)")
    add("--out", type=Path, default=RECORDS, help="folder of the records (docs/studies/suite)")
    add(
        "--data",
        type=Path,
        default=Path("datasets"),
        help="folder of what data make made (datasets)",
    )
    add("--policies", type=Path, help="folder for the first seed's policy of each finished cell")
    add("--steps", type=int, help="a try: another budget than a cell's own")
    add("--episodes", type=int, default=EPISODES, help=f"a try: others than {EPISODES}")
    add("--list", action="store_true", help="print the cells and how far they are, and run nothing")
    add("--render", action="store_true", help="run nothing, only render the records")
    add(
        *("--set", "-s"),
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"how it runs on this machine: {', '.join(RUNS_WITH)}; anything else makes it a try",
    )
    return parser


RUNS_WITH = (
    *(*CIRCUMSTANCES, "env_threads", "precision", "overlap", "checkpoint_minutes"),
    *("log_interval", "eval_interval", "algo_kwargs.eval_interval"),
)
"""Settings that a record may be made with: they are in it, and on the page."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, record, render; returns 75 when it was cut, 2 when a cell failed."""
    options = make_parser().parse_args(arguments)
    _check(options)
    cells = chosen(options)
    code = 0
    if options.list:
        for cell in cells:
            print(progress_line(cell, options.out))
        return code
    if not options.render:
        code = _run(cells, options)
    from bench.evidence.suite_page import render  # it reads the records of this file

    page = render(options.out)
    print(f"rendered {page}" if page else f"no page beside {options.out}")
    return code


def chosen(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that are asked for, changed as a try asks for.

    Raises:
        ConfigError: When a method or a task is in none of them.
    """
    cells = [cell for cell in SUITE if cell.suite in options.suite]
    pick: tuple[tuple[str, Callable[[Cell], str]], ...] = (
        ("methods", lambda cell: cell.method),
        ("tasks", lambda cell: cell.short),
    )
    for option, name_of in pick:
        given = getattr(options, option)
        if given is None:
            continue
        names, known = given.split(","), {name_of(cell): None for cell in cells}
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"--{option} {name}: not in the suite {' '.join(options.suite)}"
                    f"{suggest(name, known)}"
                )
        cells = [cell for cell in cells if name_of(cell) in names]
    seeds = None if options.seeds is None else tuple(parse_seeds(options.seeds))
    return [
        replace(cell, steps=options.steps or cell.steps, seeds=seeds or cell.seeds)
        for cell in cells
    ]


def _check(options: argparse.Namespace) -> None:
    for name in ("jobs", "steps", "minutes", "episodes"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} must be above 0, got {value:g}")
    tries = [f"--set {s}" for s in options.settings if s.partition("=")[0] not in RUNS_WITH]
    tries += [f"--steps {options.steps}"] if options.steps else []
    tries += [f"--episodes {options.episodes}"] if options.episodes != EPISODES else []
    if tries and options.out.resolve() == RECORDS.resolve():
        raise ConfigError(
            f"{tries[0]} makes this a try, not the suite: name another folder for its records with "
            "--out"
        )


def job_of(cell: Cell, seeds: Sequence[int], options: argparse.Namespace) -> Job:
    """Return the run of these seeds of a cell."""
    name = f"{cell.slug}-{seeds_text(seeds)}"
    changes: dict[str, Any] = {
        "total_timesteps": cell.steps,
        "output_dir": str(options.runs.resolve()),
        "run_name": name,
        "seeds": list(seeds),
        "tensorboard": False,
        "checkpoint_interval": 0,
    }
    settings = [*cell.all_settings(options.data.resolve()), *options.settings]
    config = load_config(cell.preset, settings, changes)
    return Job(name, config, options.runs, metrics=sorted({RETURN, cell.evaluated}))


def facts_of(cell: Cell, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a record says of how it was measured."""
    facts = describe(threads=job.config.threads)
    machine = {name: facts[name] for name in ("processor", "cores", "python", "torch", "date")}
    words = ["python", "-m", "bench.evidence", "--suite", cell.suite, "--methods", cell.method]
    words += ["--tasks", cell.short, *(w for s in options.settings for w in ("--set", s))]
    return {
        "preset": cell.preset,
        "steps": cell.steps,
        "episodes": options.episodes,
        "settings": sorted(options.settings),
        "command": shlex.join(words),
        "machine": machine | {"device": device_name(job.config.device)},
    }


def _planned(cells: Sequence[Cell], options: argparse.Namespace) -> dict[str, tuple[Cell, Job]]:
    """Return the runs of what is missing, by their names; wrong settings are told now."""
    jobs: dict[str, tuple[Cell, Job]] = {}
    for cell in cells:
        if cell.preset not in preset_names():
            print(f"{cell.slug}: there is no preset {cell.preset} yet", flush=True)
            continue
        if cell.data and not (options.data / cell.data).is_dir():
            print(
                f"{cell.slug}: {options.data} has no {cell.data}; make it with "
                f"`rl-training data make {cell.data}`, or name another folder with --data",
                flush=True,
            )
            continue
        record = Record(options.out, cell)
        seeds = [seed for seed in cell.seeds if not record.reached(seed, cell.steps).done]
        if seeds:
            record.require_same(sorted(options.settings))
            job = job_of(cell, seeds, options)
            jobs[job.name] = cell, job
    return jobs


class _Recorder:
    """What is written and said while runs train."""

    def __init__(self, jobs: dict[str, tuple[Cell, Job]], options: argparse.Namespace) -> None:
        self.jobs, self.options, self.failed = jobs, options, False
        self.over: set[str] = set()
        self.start = self.told = time.monotonic()

    def note(self, one: Ended) -> None:
        """Record a run that was stopped, or one that was never begun."""
        if one.code is not None:
            cell, job = self.jobs[one.work.name]
            facts = facts_of(cell, job, self.options)
            Record(self.options.out, cell).add(rows_of(job, cell.figure), facts)
        print(f"{one.work.name}: {one.outcome}", flush=True)

    def ended(self, one: Ended) -> None:
        """Record a run that ended by itself."""
        self.note(one)
        self.over.add(one.work.name)
        if not one.done:
            self.failed = True
            print(one.last_line, flush=True)

    def watch(self) -> None:
        """Say how far all are, when it is time to."""
        if time.monotonic() - self.told > self.options.tell:
            self.told = time.monotonic()
            for name, (_, job) in self.jobs.items():
                if job.run.is_dir() and name not in self.over:
                    seconds = self.told - self.start
                    print(f"{seconds:5.0f} s  {job.progress()}", flush=True)


def _run(cells: Sequence[Cell], options: argparse.Namespace) -> int:
    """Train what is missing, record it, and return the exit code."""
    recorder = _Recorder(_planned(cells, options), options)
    more = ["--episodes", str(options.episodes)]
    if options.policies is not None:
        more += ["--policies", str(options.policies.resolve())]
    left = run_all(
        [job.work(*more) for _, job in recorder.jobs.values()],
        options.jobs,
        recorder.ended,
        seconds=60 * options.minutes if options.minutes else math.inf,
        patience=options.patience,
        watch=recorder.watch,
    )
    for one in left:
        recorder.note(one)
    if recorder.failed:
        return 2
    return STOPPED if left else 0


def progress_line(cell: Cell, folder: Path) -> str:
    """Say in a line how far a cell is."""
    record = Record(folder, cell)
    reached = [record.reached(seed, cell.steps) for seed in cell.seeds]
    if all(each.done for each in reached):
        return f"{cell.slug}: whole, seeds {seeds_text(cell.seeds)}, {cell.steps:,} steps"
    done, least = sum(each.done for each in reached), min(each.steps for each in reached)
    missing = "" if cell.preset in preset_names() else f"; there is no preset {cell.preset}"
    return (
        f"{cell.slug}: {done} of {len(reached)} seeds whole, the others at {least:,} of "
        f"{cell.steps:,} steps{missing}"
    )

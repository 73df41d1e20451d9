"""`python -m bench.evidence.models STUDY ...`: longer runs of methods that learn a model.

A study is a preset with what differs from it and seeds that chose no setting.  All its seeds, and
all values of a grid, train in one process; studies train side by side.  When `--minutes` are over,
every run is told to stop, saves and can be taken up: the same command goes on where the last one
ended.  What the logs say by then goes into one small file, beside what was there before.

    python -m bench.evidence.models --list
    python -m bench.evidence.models dreamer-boxing mbpo-hopper --minutes 8.5 --out models.csv
    python -m bench.evidence.models --table models.csv
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.evidence.jobs import Ended, run_all
from bench.evidence.rows import Row, read, write_rows
from bench.evidence.training import Job
from rl_training.cli.commands import parse_seeds
from rl_training.experiment.config import load_config


@dataclass(frozen=True, kw_only=True)
class Study:
    """One row of the table."""

    preset: str
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...]
    data: str | None = None
    """File of recorded data it learns from, in the folder `--data`."""
    grid: tuple[float, ...] = ()
    """Values of `penalty_coef`, each with all seeds."""


TEN, FIVE, THREE = tuple(range(100, 110)), tuple(range(100, 105)), tuple(range(100, 103))
EVALUATED = "eval_episodes=20"
CLIPPED = (
    *("total_timesteps=50000", "algo_kwargs.eval_interval=10000"),
    "algo_kwargs.normalize_dataset_actions=true",  # those recorded were not clipped
)
STUDIES = {
    # One seed each: the published curves have five, of games that take minutes here.
    "dreamer-boxing": Study(preset="dreamer/boxing_atari", seeds=(100,)),
    "dreamer-breakout": Study(preset="dreamer/breakout_atari", seeds=(100,)),
    "dreamer-pong": Study(preset="dreamer/pong_atari", seeds=(100,)),
    "mbpo-pendulum": Study(preset="mbpo/pendulum", settings=(EVALUATED,), seeds=TEN),
    "mbpo-pendulum-known-reward": Study(
        preset="mbpo/pendulum",
        settings=(EVALUATED, "algo_kwargs.reward_function=auto"),
        seeds=TEN,
    ),
    "mbpo-inverted-pendulum": Study(
        preset="mbpo/inverted_pendulum",
        settings=("total_timesteps=5000", "algo_kwargs.eval_interval=500"),
        seeds=TEN,
    ),
    "mbpo-hopper": Study(preset="mbpo/hopper", seeds=FIVE),
    "mbpo-halfcheetah": Study(preset="mbpo/halfcheetah", seeds=THREE),
    "mbpo-walker2d": Study(preset="mbpo/walker2d", seeds=THREE),
    "pets-cartpole": Study(preset="pets/cartpole", seeds=FIVE),
    "pets-reacher": Study(preset="pets/reacher", seeds=THREE),
    "pets-pusher": Study(preset="pets/pusher", seeds=THREE),
    "pets-halfcheetah": Study(
        # An evaluation takes as long as thousands of steps, and training plans as well as it does.
        preset="pets/halfcheetah",
        settings=("algo_kwargs.eval_interval=20000",),
        seeds=THREE,
    ),
    "mopo-halfcheetah": Study(
        preset="mopo/halfcheetah",
        settings=CLIPPED,
        seeds=THREE,
        data="halfcheetah-suboptimal-drex.npz",
        grid=(0.0, 1.0, 5.0),
    ),
    "mopo-halfcheetah-expert": Study(
        preset="mopo/halfcheetah",
        settings=CLIPPED,
        seeds=THREE,
        data="halfcheetah-expert-cs285-v4.npz",
        grid=(0.0, 1.0, 5.0),
    ),
    "mopo-hopper": Study(
        preset="mopo/hopper",
        settings=CLIPPED,
        seeds=THREE,
        data="hopper-suboptimal-drex.npz",
        grid=(0.0, 1.0, 5.0),
    ),
}


COLUMNS = ("method", "task", "variant", "seed", "step", "episodes", "metric", "value")
KEY = (*COLUMNS[:5], "metric")
"""What tells rows apart; `episodes` and `value` are what is known of one."""


def rows_of(job: Job) -> Iterator[Row]:
    """Return what the logs of a job's members say."""
    for point in job.points():
        values = [f"{name} {value:g}" for name, value in point.member.point.items()]
        yield {
            "method": job.config.algo,
            "task": job.config.env_id,
            "variant": ", ".join((job.name, *job.settings, *values)),
            "seed": str(point.member.seed),
            "step": str(point.step),
            "episodes": "" if point.episodes is None else str(point.episodes),
            "metric": point.metric,
            "value": f"{point.value:.2f}",
        }


def merge(out: Path, rows: Sequence[Row]) -> None:
    """Put rows into the file of records, in place of older ones of the same."""
    known = {_key(row): row for row in (*read(out), *rows)}
    write_rows(out, COLUMNS, list(known.values()))


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def settings_for(name: str, given: Sequence[str]) -> list[str]:
    """Return those of the settings `KEY=VALUE` and `STUDY:KEY=VALUE` that are for a study."""
    chosen = []
    for text in given:
        key, equals, value = text.partition("=")
        study, colon, own = key.rpartition(":")
        if not colon or study == name:
            chosen.append(f"{own}{equals}{value}")
        elif study not in STUDIES:
            raise SystemExit(f"--set {text}: {study} is not a study; --list prints them")
    return chosen


def job_of(name: str, options: argparse.Namespace) -> Job:
    """Return the run of a study with what the command line says."""
    study, given = STUDIES[name], settings_for(name, options.settings)
    settings = [*study.settings, *given]
    if study.data is not None:
        path = Path(options.data).resolve() / study.data
        settings += ["algo_kwargs.dataset_kind=npz", f"algo_kwargs.dataset_path={path}"]
    changes: dict[str, Any] = {
        "output_dir": str(options.runs.resolve()),
        "run_name": name,
        "seeds": parse_seeds(options.seeds) if options.seeds else list(study.seeds),
        "tensorboard": False,
        "checkpoint_interval": 0,
    }
    if study.grid:
        changes["grid"] = {"penalty_coef": list(study.grid)}
    config = load_config(study.preset, settings, changes)
    return Job(name, config, options.runs, given)


def run(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Train side by side until all have finished or the time is up, and record what was reached."""
    start = told = time.monotonic()

    def watch() -> None:
        nonlocal told
        if time.monotonic() - told > options.tell:
            told = time.monotonic()
            _tell(jobs, told - start)
            _record(jobs, options.out)

    ended: list[Ended] = []
    left = run_all(
        [job.work() for job in jobs],
        len(jobs),
        ended.append,
        seconds=60 * options.minutes if options.minutes else math.inf,
        patience=options.patience,
        watch=watch,
    )
    _tell(jobs, time.monotonic() - start)
    _record(jobs, options.out)
    outcomes = {one.work.name: one.outcome for one in (*ended, *left)}
    for job in jobs:
        print(f"{job.name}: {outcomes[job.name]}")


def _tell(jobs: Sequence[Job], seconds: float) -> None:
    for job in jobs:
        print(f"{seconds:4.0f} s  {job.progress()}", flush=True)


def _record(jobs: Sequence[Job], out: Path | None) -> None:
    if out is not None:
        merge(out, [row for job in jobs for row in rows_of(job)])


def table_of(rows: Sequence[Row]) -> str:
    """Return the last evaluation that all seeds of each study have, as a table."""
    lines = ["| study | task | seeds | steps | returns of the seeds | mean | worst | wall time |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        found = [row for row in own if row["metric"] == "eval_return_mean"]
        seeds = sorted({int(row["seed"]) for row in own})
        curves: dict[int, list[Row]] = {}
        for row in found:
            curves.setdefault(int(row["step"]), []).append(row)
        steps = [step for step, members in curves.items() if len(members) == len(seeds)]
        if not steps:
            continue
        last = max(steps)
        returns = np.array([float(row["value"]) for row in curves[last]])
        clock = [
            float(row["value"])
            for row in own
            if row["metric"] == "seconds" and int(row["step"]) <= last
        ]
        wall = f"{max(clock) / 60:.1f} min" if clock else "not noted"
        each = ", ".join(f"{value:.1f}" for value in returns)
        ends = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
        lines.append(
            f"| {variant} | {own[0]['task']} | {ends} | {last:,} | {each} | {returns.mean():.1f} | "
            f"{returns.min():.1f} | {wall} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run studies, or print what they reached."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.evidence.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY")
    add("--list", action="store_true", help="print the studies")
    add("--seeds", help="others than a study's own: 0..4")
    add("--minutes", type=float, help="stop and save after so many")
    add("--patience", type=float, default=60, help="seconds that runs have to save (60)")
    add("--tell", type=float, default=30, help="seconds between two reports (30)")
    add("--data", default=".", help="folder with recorded data")
    add("--runs", type=Path, default=Path("runs/studies"), help="folder of the runs (runs/studies)")
    add("--out", type=Path, help="file of records, CSV")
    add("--table", type=Path, help="print the table of such a file")
    add(
        "--set",
        "-s",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another setting, of all studies or as STUDY:KEY=VALUE of one",
    )
    options = parser.parse_args(arguments)
    for name in STUDIES if options.list else ():
        print(name)
    if options.studies:
        run([job_of(name, options) for name in options.studies], options)
    if options.table is not None:
        print(table_of(read(options.table)))


if __name__ == "__main__":
    main()

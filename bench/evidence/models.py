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
import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.cli.commands import parse_seeds
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.logging import number_in, read_metrics
from rl_training.experiment.runs import SAVED_FILE, member_folders


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
POINTS = 100
"""Lines of training that are recorded of a whole run, at most."""
Row = dict[str, str]


class Job:
    """The run of a study in a process of its own."""

    def __init__(
        self, name: str, config: TrainConfig, folder: Path, settings: Sequence[str] = ()
    ) -> None:
        """Take hold of a study.

        Args:
            name: Of the study, and of its run's folder.
            config: What is trained.
            folder: Where runs are, with their settings and what they print.
            settings: What of the settings is not the study's own.
        """
        self.name, self.config, self.folder, self.settings = name, config, folder, settings
        self.run = folder / name
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Train, or go on with what was saved."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / f"{self.name}.yaml"
        settings.write_text(self.config.to_yaml(), encoding="utf-8")
        if all((member / SAVED_FILE).is_file() for member in self._members()):
            order = ["resume", "--checkpoint", str(self.run)]
        else:
            shutil.rmtree(self.run, ignore_errors=True)  # it was stopped before it saved anything
            order = ["train", "--config", str(settings)]
        with open(self.folder / f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rl_training", *order], stdout=log, stderr=log
            )

    def _members(self) -> list[Path]:
        return member_folders(self.run, self.config)

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Ask it to save and end."""
        if self.is_running:
            assert self.process is not None
            self.process.terminate()

    def end(self) -> None:
        """End it, saved or not."""
        if self.is_running:
            assert self.process is not None
            self.process.kill()
            self.process.wait()

    def outcome(self) -> str:
        """Say how its process ended."""
        code = None if self.process is None else self.process.poll()
        words = {None: "still running", 0: "finished", 75: "saved, to be continued"}
        said = words.get(code)
        return said or f"ended with {code}, see {self.folder / self.name}.log"

    def rows(self) -> Iterator[Row]:
        """Return what the logs of its members say."""
        for member, folder in zip(self.config.members, self._members(), strict=True):
            point = [f"{name} {value:g}" for name, value in member.point.items()]
            common = {
                "method": self.config.algo,
                "task": self.config.env_id,
                "variant": ", ".join((self.name, *self.settings, *point)),
                "seed": str(member.seed),
            }
            for numbers in self._lines(folder):
                yield common | numbers

    def _lines(self, folder: Path) -> Iterator[Row]:
        every = max(1, self.config.total_timesteps // POINTS)
        due, before, earlier = 0, 0.0, 0.0
        for line in read_metrics(folder):
            step = int(line["step"])
            if line["kind"] == "eval":
                episodes = number_in(line, "eval_episodes")
                yield from _numbers(line, ("eval_return_mean",), int(episodes or 0))
            elif line["kind"] == "train":
                seconds = number_in(line, "time/elapsed_seconds") or 0.0
                # The clock of a run begins again when it is taken up.
                earlier += before if seconds < before else 0.0
                before = seconds
                if step >= due:
                    due = step - step % every + every
                    whole = {"step": step, "seconds": earlier + seconds}
                    yield from _numbers(line | whole, ("rollout/return_mean", "seconds"))

    def progress(self) -> str:
        """Say in a line how far it is."""
        lines = read_metrics(self._members()[0])
        step = max((int(line["step"]) for line in lines), default=0)
        last = [
            f"{name} {value:.1f}"
            for name in ("rollout/return_mean", "eval_return_mean")
            for value in [_last(lines, name)]
            if value is not None
        ]
        seed = self.config.members[0].seed
        return f"{self.name} {step:,} steps; seed {seed}: {', '.join(last) or 'nothing yet'}"


def _numbers(line: dict[str, Any], names: Sequence[str], episodes: int | str = "") -> Iterator[Row]:
    for name in names:
        value = number_in(line, name)
        if value is not None:
            yield {
                "step": str(line["step"]),
                "episodes": str(episodes),
                "metric": name,
                "value": f"{value:.2f}",
            }


def _last(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [value for line in lines if (value := number_in(line, name)) is not None]
    return values[-1] if values else None


def merge(out: Path, rows: Sequence[Row]) -> None:
    """Put rows into the file of records, in place of older ones of the same."""
    known = {_key(row): row for row in (*read(out), *rows)}
    temporary = out.with_name(f".{out.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known.values())
    os.replace(temporary, out)


def read(path: Path) -> list[Row]:
    """Return the rows of a file of records; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    start = told = time.monotonic()
    end = start + 60 * options.minutes if options.minutes else float("inf")
    try:
        for job in jobs:
            job.start()
        while any(job.is_running for job in jobs) and not asked and time.monotonic() < end:
            time.sleep(0.2)
            if time.monotonic() - told > options.tell:
                told = time.monotonic()
                _tell(jobs, told - start)
                _record(jobs, options.out)
        for job in jobs:
            job.stop()
        patience = time.monotonic() + options.patience
        while any(job.is_running for job in jobs) and time.monotonic() < patience:
            time.sleep(0.2)
    finally:
        for job in jobs:
            job.end()
        signal.signal(signal.SIGTERM, before)
    _tell(jobs, time.monotonic() - start)
    _record(jobs, options.out)
    for job in jobs:
        print(f"{job.name}: {job.outcome()}")


def _tell(jobs: Sequence[Job], seconds: float) -> None:
    for job in jobs:
        print(f"{seconds:4.0f} s  {job.progress()}", flush=True)


def _record(jobs: Sequence[Job], out: Path | None) -> None:
    if out is not None:
        merge(out, [row for job in jobs for row in job.rows()])


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

"""`python -m bench.evidence.models STUDY`: longer runs of MBPO, MOPO and PETS, seeds side by side.

A study is a preset with what differs from it and seeds that chose no setting.  All its seeds, and
all values of a grid, train in one process.  The curve is written after every evaluation, so that a
run cut short by `--minutes` or by hand still says what it reached.

    python -m bench.evidence.models --list
    python -m bench.evidence.models mbpo-pendulum --out models.json
    python -m bench.evidence.models --table models.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.cli.commands import parse_seeds
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.train import train


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
        preset="pets/halfcheetah", settings=("algo_kwargs.eval_interval=5000",), seeds=THREE
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


class Recorder(Callback):
    """Writes the curve after every evaluation, and stops after some minutes."""

    def __init__(self, record: dict[str, Any], out: Path | None, minutes: float | None) -> None:
        self.record, self.out, self.minutes = record, out, minutes
        self.start = time.perf_counter()

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        """Note the mean return of every member of the group."""
        seconds = time.perf_counter() - self.start
        means = [round(float(np.mean(episodes)), 1) for episodes in returns]
        self.record["curve"].append({"step": state.step, "seconds": seconds, "returns": means})
        print(f"{self.record['study']} {state.step:,} steps, {seconds:.0f} s: {means}", flush=True)
        if self.out is not None:
            write(self.out, self.record)
        if self.minutes is not None and seconds > 60 * self.minutes:
            state.request_stop("the minutes are over")


def write(out: Path, record: dict[str, Any]) -> None:
    """Put a record into the file of records, in place of an older one of the study."""
    records = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    records[record["study"]] = record
    out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def config_of(study: Study, settings: Sequence[str], changes: dict[str, Any]) -> TrainConfig:
    """Return the run of all members of a study."""
    if study.grid:
        changes = changes | {"grid": {"penalty_coef": list(study.grid)}}
    return load_config(study.preset, (*study.settings, *settings), changes)


def run(name: str, options: argparse.Namespace) -> None:
    """Run a study."""
    study = STUDIES[name]
    seeds = parse_seeds(options.seeds) if options.seeds else list(study.seeds)
    settings = list(options.settings)
    if study.data is not None:
        path = Path(options.data) / study.data
        settings += ["algo_kwargs.dataset_kind=npz", f"algo_kwargs.dataset_path={path}"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {
        "study": name,
        "preset": study.preset,
        "settings": [*study.settings, *options.settings],
        "data": study.data,
        "seeds": list(seeds),
        "grid": list(study.grid),
        "device": device,
        "curve": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"output_dir": folder, "tensorboard": False, "checkpoint_interval": 0}
        config = config_of(study, settings, quiet | {"seeds": list(seeds)})
        train(config, callbacks=[Recorder(record, options.out, options.minutes)])


def table_of(records: dict[str, dict[str, Any]]) -> str:
    """Return the last point of each curve as a table."""
    lines = ["| study | seeds | steps | returns of the seeds | mean | worst | wall time |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for name, record in records.items():
        last = record["curve"][-1]
        values, seeds = record["grid"] or [None], record["seeds"]
        parts = np.array(last["returns"]).reshape(len(values), len(seeds))
        for value, returns in zip(values, parts, strict=True):
            title = name if value is None else f"{name}, penalty {value:g}"
            each = ", ".join(f"{r:.0f}" for r in returns)
            figures = f"{returns.mean():.0f} | {returns.min():.0f} | {last['seconds'] / 60:.1f} min"
            ends = f"{seeds[0]} to {seeds[-1]}"
            lines.append(f"| {title} | {ends} | {last['step']:,} | {each} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Run studies, or print what they reached."""
    parser = argparse.ArgumentParser(prog="python -m bench.evidence.models", description=__doc__)
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY")
    parser.add_argument("--list", action="store_true", help="print the studies")
    parser.add_argument("--seeds", help="others than a study's own: 0..4")
    parser.add_argument("--minutes", type=float, help="stop at the first evaluation after so many")
    parser.add_argument("--data", default=".", help="folder with recorded data")
    parser.add_argument("--out", type=Path, help="file to which curves are written")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    parser.add_argument(
        "--set", "-s", dest="settings", action="append", default=[], metavar="KEY=VALUE"
    )
    options = parser.parse_args()
    if options.table is not None:
        print(table_of(json.loads(options.table.read_text(encoding="utf-8"))))
    for name in STUDIES if options.list else ():
        print(name)
    for name in options.studies:
        run(name, options)


if __name__ == "__main__":
    main()

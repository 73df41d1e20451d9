"""A run in a process of its own, cut and taken up: what studies, the suite and gates share.

    python -m bench.evidence.training SETTINGS.yaml [--episodes 100] [--policies FOLDER]

trains what the file says, or goes on with the run of that name, and ends with 75 when it was
stopped and has saved.  With `--episodes` the last checkpoint of every seed is then evaluated on the
same start states, which is written beside the run, and with `--policies` the first seed's policy is
put into a folder, as `rl-training zoo add` does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from bench.evidence.gates import EPISODE_SEED
from bench.evidence.jobs import STOPPED, Work
from rl_training.cli.display import display_for
from rl_training.errors import ConfigError, RLTrainingError
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.grid import Member
from rl_training.experiment.logging import number_in, read_metrics
from rl_training.experiment.runs import SAVED_FILE, member_folders
from rl_training.output_files import written_beside
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.results import EvalResult, TrainingInterrupted, TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import evaluate_checkpoint, evaluate_group, resume_training
from rl_training.sweeps.worker import follow
from rl_training.tools.zoo import add_entry

FINAL_FILE = "final.json"
"""What the last checkpoint of every seed got, in the folder of the run."""
POINTS = 100
"""Lines of training that are told of a whole run, at most."""


class Point(NamedTuple):
    """A number that the log of a member has."""

    member: Member
    step: int
    metric: str
    value: float
    episodes: int | None = None
    """That an evaluation had."""


class Job:
    """The run of a study or of the suite in a process of its own."""

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        folder: Path,
        settings: Sequence[str] = (),
        metrics: Sequence[str] = ("eval_return_mean",),
    ) -> None:
        """Take hold of a run.

        Args:
            name: Of the run's folder.
            config: What is trained.
            folder: Where runs are, with their settings and what they print.
            settings: What of the settings is not the study's own.
            metrics: What is told of evaluations.
        """
        self.name, self.config, self.folder, self.settings = name, config, folder, settings
        self.metrics = metrics
        self.run = folder / name

    def work(self, *options: str) -> Work:
        """Return what its process is to do: train, or go on with what was saved."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / f"{self.name}.yaml"
        settings.write_text(self.config.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "bench.evidence.training", str(settings), *options]
        return Work(self.name, command, self.folder / f"{self.name}.log")

    @property
    def members(self) -> list[tuple[Member, Path]]:
        """Its members and their folders."""
        return list(zip(self.config.members, member_folders(self.run, self.config), strict=True))

    def points(self) -> Iterator[Point]:
        """Return what the logs of its members say: evaluations, and at most `POINTS` others."""
        for member, folder in self.members:
            yield from self._points(member, folder)

    def _points(self, member: Member, folder: Path) -> Iterator[Point]:
        every = max(1, self.config.total_timesteps // POINTS)
        due, before, earlier = 0, 0.0, 0.0
        for line in read_metrics(folder):
            step = int(line["step"])
            if line["kind"] == "eval":
                episodes = number_in(line, "eval_episodes")
                yield from _numbers(member, line, self.metrics, int(episodes or 0))
            elif line["kind"] == "train":
                seconds = number_in(line, "time/elapsed_seconds") or 0.0
                # The clock of a run begins again when it is taken up.
                earlier += before if seconds < before else 0.0
                before = seconds
                if step >= due:
                    due = step - step % every + every
                    whole = {"seconds": earlier + seconds}
                    yield from _numbers(member, line | whole, ("rollout/return_mean", "seconds"))

    def progress(self) -> str:
        """Say in a line how far it is."""
        member, folder = self.members[0]
        lines = read_metrics(folder)
        step = max((int(line["step"]) for line in lines), default=0)
        last = [
            f"{name} {value:.1f}"
            for name in ("rollout/return_mean", "eval_return_mean")
            for value in [_last(lines, name)]
            if value is not None
        ]
        return f"{self.name} {step:,} steps; seed {member.seed}: {', '.join(last) or 'nothing yet'}"


def _numbers(
    member: Member, line: dict[str, Any], names: Sequence[str], episodes: int | None = None
) -> Iterator[Point]:
    for name in names:
        value = number_in(line, name)
        if value is not None:
            yield Point(member, int(line["step"]), name, value, episodes)


def _last(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [value for line in lines if (value := number_in(line, name)) is not None]
    return values[-1] if values else None


def train_or_resume(
    config: TrainConfig, folder: Path, callbacks: Sequence[Callback] = ()
) -> TrainResult:
    """Train, or go on with the run of the same settings that is in the folder.

    Raises:
        ConfigError: When the folder holds a run of other settings.
    """
    if not folder.exists():
        return train(config, callbacks=callbacks)
    known, wanted = (
        {name: value for name, value in c.resolved().items() if name != "output_dir"}
        for c in (load_config(folder / "config.yaml"), config)
    )
    other = [name for name, value in wanted.items() if known[name] != value]
    if other:
        raise ConfigError(
            f"{folder} holds a run with another {', '.join(other)}; remove it, or name another "
            "folder with --runs"
        )
    if all((member / SAVED_FILE).is_file() for member in member_folders(folder, config)):
        return resume_training(folder, callbacks=callbacks)
    shutil.rmtree(folder)  # it was stopped before it saved anything
    return train(config, callbacks=callbacks)


def last_evaluations(run: Path, config: TrainConfig, episodes: int) -> dict[int, EvalResult]:
    """Return what the last checkpoint of every seed gets from common start states."""
    if not config.is_group:
        result = evaluate_checkpoint(run, episodes, seed=EPISODE_SEED, device=config.device)
        return {config.members[0].seed: result}
    found = evaluate_group(run, episodes, seed=EPISODE_SEED, device=config.device)
    return {member.seed: found[member.folder] for member in config.members}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, evaluate, keep the policy; returns 75 when it was stopped."""
    parser = argparse.ArgumentParser(prog="python -m bench.evidence.training", description=__doc__)
    parser.add_argument("settings", type=Path)
    parser.add_argument("--episodes", type=int, default=0)
    parser.add_argument("--policies", type=Path)
    options = parser.parse_args(arguments)
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    try:
        _do(options)
    except TrainingInterrupted as error:
        print(error, file=sys.stderr)
        return STOPPED
    except RLTrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _do(options: argparse.Namespace) -> None:
    config = load_config(options.settings, may_import=True)
    run = Path(config.output_dir) / str(config.run_name)
    result = train_or_resume(config, run, [display_for(Console(stderr=True), quiet=False)])
    if options.episodes:
        found = last_evaluations(run, config, options.episodes)
        facts = {
            "step": min(int(r.metrics["global_step"]) for r in result.per_seed or (result,)),
            "returns": {str(seed): one.returns for seed, one in found.items()},
            "metrics": {str(seed): one.metrics for seed, one in found.items()},
        }
        with written_beside(run / FINAL_FILE) as part:
            part.write_text(json.dumps(facts), encoding="utf-8")
    if options.policies is not None:
        add_entry(member_folders(run, config)[0], options.policies, episodes=0, replace=True)


if __name__ == "__main__":
    sys.exit(main())

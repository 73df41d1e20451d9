"""A job is one ordinary run, described by a file; doing it again continues where it stopped.

`jobs/NAME.yaml` is the whole description and `NAME/outcome.json` says that it is done.  Whoever
does a job, on whatever machine shares the folder, needs nothing else, so that a job may be repeated
at any time: a done one is not run again, a broken one resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import Field, ValidationError

from rl_training.errors import ConfigError, RLTrainingError
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.results import TrainingInterrupted, TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.validation import StrictModel

OUTCOME_FILE = "outcome.json"
STOP_FILE = "stop-asked"
JOBS_FOLDER = "jobs"
ASKED = "asked to stop"
LOCK_SECONDS = 60.0
"""How long a job waits for one who does it already, such as a killed parent's child, saving."""


class Outcome(StrictModel):
    """How a job ended."""

    state: Literal["done", "stopped", "interrupted", "failed"]
    """`stopped`: ended early because somebody asked; `interrupted`: saved, wants to continue."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    message: str = ""
    """Of a failure."""

    @property
    def is_final(self) -> bool:
        """Whether doing the job again would change nothing."""
        return self.state in ("done", "stopped")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to be done."""

    name: str
    config: TrainConfig
    """With `output_dir` and `run_name` set, so that its folder is known."""

    @property
    def folder(self) -> Path:
        """Where the run is, or will be."""
        return Path(self.config.output_dir) / self.name

    @property
    def file(self) -> Path:
        """The job's description."""
        return Path(self.config.output_dir) / JOBS_FOLDER / f"{self.name}.yaml"

    def outcome(self) -> Outcome | None:
        """Return how the job ended; None when it has not."""
        return read_outcome(self.folder)

    def ask_to_stop(self) -> None:
        """Ask whoever does the job to end it at its next evaluation."""
        if self.folder.is_dir():
            (self.folder / STOP_FILE).touch()


def make_job(config: TrainConfig, folder: Path, name: str) -> Job:
    """Return the job that trains `config` in `folder`/`name`."""
    placed = config.replace(output_dir=str(folder.resolve()), run_name=name)
    return Job(name=name, config=placed)


def write_jobs(jobs: Sequence[Job]) -> None:
    """Write the descriptions of jobs.

    Raises:
        ConfigError: When a job of that name is described otherwise, or the disk refuses.
    """
    for job in jobs:
        text = job.config.to_yaml()
        try:
            if job.file.is_file() and job.file.read_text(encoding="utf-8") != text:
                raise ConfigError(
                    f"{job.file} describes another run of that name; take another --output folder, "
                    "or the settings that the folder was begun with"
                )
            job.file.parent.mkdir(parents=True, exist_ok=True)
            job.file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{job.file} cannot be written ({error.strerror})") from None


class _StopWatch(Callback):
    """Ends a run when its stop file appears."""

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:  # noqa: ARG002
        """Look for the file."""
        if (state.run_dir / STOP_FILE).exists():
            state.request_stop(ASKED)


def do_job(file: Path, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Do the job described by a file, or what is left of it, and write its outcome.

    A mistake of the user is an outcome, not an error; anything else is raised.
    """
    config = load_config(file, may_import=True)
    job = Job(name=str(config.run_name), config=config)
    done = job.outcome()
    if done is not None:
        return done
    try:
        result = _start_or_resume(job, [*callbacks, _StopWatch()])
    except TrainingInterrupted as error:
        return Outcome(state="interrupted", message=str(error))
    except RLTrainingError as error:
        return Outcome(state="failed", message=str(error))
    asked = result.stop_reason == ASKED
    outcome = Outcome(state="stopped" if asked else "done", metrics=_plain(result))
    _write(job.folder / OUTCOME_FILE, outcome)
    return outcome


def _start_or_resume(job: Job, callbacks: Sequence[Callback]) -> TrainResult:
    folder = job.folder
    _wait_for(folder)
    if (folder / "config.yaml").is_file():
        return resume_training(folder, callbacks=callbacks)
    if folder.is_dir():
        shutil.rmtree(folder)  # killed before it could say what it was: there is nothing to keep
    return train(job.config, callbacks=callbacks)


def _wait_for(folder: Path) -> None:
    """Wait until nobody else holds the folder."""
    if not folder.is_dir():
        return
    try:
        with FileLock(folder / ".lock", timeout=LOCK_SECONDS):
            return
    except Timeout:
        return  # the run itself says in its own words who holds what


def _plain(result: TrainResult) -> dict[str, float | None]:
    return {n: float(v) if math.isfinite(v) else None for n, v in result.metrics.items()}


def _write(target: Path, outcome: Outcome) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(json.dumps(outcome.model_dump(mode="json"), indent=2), encoding="utf-8")
    os.replace(temporary, target)


def read_outcome(folder: Path) -> Outcome | None:
    """Return what `outcome.json` says; None where there is none, or none that can be read."""
    try:
        return Outcome.model_validate_json((folder / OUTCOME_FILE).read_bytes())
    except (OSError, ValidationError):
        return None

"""Who does the jobs: one interface, here with processes of this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl_training.errors import ConfigError
from rl_training.sweeps.jobs import Job, Outcome
from rl_training.sweeps.worker import EXIT_CODES

POLL_SECONDS = 0.1
SAVE_SECONDS = 60.0
"""How long an interrupted job may take to save."""


class Runner(Protocol):
    """Does jobs side by side."""

    @property
    def slots(self) -> int:
        """How many may be started before one has ended."""
        ...

    def start(self, job: Job) -> None:
        """Begin a job."""
        ...

    def ended(self) -> list[tuple[Job, Outcome]]:
        """Return the jobs that have ended since the last call, without waiting."""
        ...

    def close(self) -> None:
        """Save and end what still runs."""
        ...


@dataclass
class _Attempt:
    job: Job
    process: subprocess.Popen[bytes]
    tries: int


class LocalRunner:
    """Processes of this machine; one that dies is started again and resumes."""

    def __init__(self, slots: int = 1, retries: int = 2) -> None:
        """Say how many at once, and how often a job that died is begun again.

        Raises:
            ConfigError: When a number is out of range.
        """
        if slots < 1:
            raise ConfigError(f"--jobs must be >= 1, got {slots}")
        if retries < 0:
            raise ConfigError(f"--retries must be >= 0, got {retries}")
        self._slots, self._retries = slots, retries
        self._running: list[_Attempt] = []

    @property
    def slots(self) -> int:
        """How many processes run side by side."""
        return self._slots

    def start(self, job: Job) -> None:
        """Begin a job; what it prints goes to a file beside its description."""
        self._running.append(_Attempt(job, self._spawn(job), 0))

    def _spawn(self, job: Job) -> subprocess.Popen[bytes]:
        with log_file(job).open("ab") as log:
            # A group of its own: Ctrl-C reaches the parent alone, which lets the children save.
            return subprocess.Popen(
                [sys.executable, "-m", "rl_training.sweeps.worker", str(job.file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self) -> list[tuple[Job, Outcome]]:
        """Return what has ended, and start what died again."""
        found, left = [], []
        for attempt in self._running:
            code = attempt.process.poll()
            if code is None:
                left.append(attempt)
                continue
            outcome = _outcome(attempt.job, code)
            again = outcome.state != "done" and code not in (0, EXIT_CODES["failed"])
            if again and attempt.tries < self._retries:
                process = self._spawn(attempt.job)
                left.append(_Attempt(attempt.job, process, attempt.tries + 1))
            else:
                found.append((attempt.job, outcome))
        self._running = left
        return found

    def close(self) -> None:
        """Ask what runs to save, and wait for it."""
        for attempt in self._running:
            attempt.process.terminate()
        limit = time.monotonic() + SAVE_SECONDS
        for attempt in self._running:
            while attempt.process.poll() is None and time.monotonic() < limit:
                time.sleep(POLL_SECONDS)
            attempt.process.kill()
            attempt.process.wait()
        self._running = []


def log_file(job: Job) -> Path:
    """Return where a job's own words go."""
    return job.file.with_suffix(".log")


def _outcome(job: Job, code: int) -> Outcome:
    done = job.outcome()
    if done is not None:
        return done
    state = next((name for name, c in EXIT_CODES.items() if c == code and c != 0), "failed")
    lines = log_file(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    died = "" if code == EXIT_CODES["failed"] else f"exit code {code}: "
    return Outcome(
        state="interrupted" if state == "interrupted" else "failed", message=f"{died}{last}"
    )


@contextmanager
def closing(runner: Runner) -> Iterator[Runner]:
    """Save and end what still runs when the block is left."""
    try:
        yield runner
    finally:
        runner.close()


def do_all(
    jobs: Iterable[Job],
    runner: Runner,
    on_start: Callable[[Job], None] = lambda _: None,
    on_end: Callable[[Job, Outcome], None] = lambda *_: None,
) -> dict[str, Outcome]:
    """Do jobs, skipping those that are done; returns the outcome of each by name."""
    outcomes: dict[str, Outcome] = {}
    waiting: list[Job] = []
    for job in jobs:
        before = job.outcome()
        if before is not None and before.is_final:
            outcomes[job.name] = before
        else:
            waiting.append(job)
    running = 0
    while waiting or running:
        while waiting and running < runner.slots:
            job = waiting.pop(0)
            on_start(job)
            runner.start(job)
            running += 1
        for job, outcome in runner.ended():
            running -= 1
            outcomes[job.name] = outcome
            on_end(job, outcome)
        time.sleep(POLL_SECONDS)
    return outcomes


def make_runner(name: str, jobs: int, retries: int, options: RayOptions) -> Runner:
    """Return the runner of a name.

    Raises:
        ConfigError: For another name, or options out of range.
        MissingExtraError: For `ray` without Ray.
    """
    if name == "local":
        return LocalRunner(jobs, retries)
    if name == "ray":
        from rl_training.sweeps.ray_runner import RayRunner

        return RayRunner(options, retries)
    raise ConfigError(f"--runner must be local or ray, got {name!r}")


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Where a Ray runner finds its cluster, and what each job takes of it."""

    address: str | None = None
    """Of a running cluster, or `auto`; None begins one on this machine."""
    cpus: float = 1.0
    gpus: float = 0.0


def failures(outcomes: dict[str, Outcome]) -> Sequence[tuple[str, Outcome]]:
    """Return the jobs that are not done."""
    return [(name, outcome) for name, outcome in outcomes.items() if not outcome.is_final]

"""Several processes side by side, and nothing is lost: gates, studies, the suite.

One that fails does not hold the others up.  On SIGTERM, on Ctrl-C or when the time is over every
process is asked to save its run and end; called again, the runs go on where they were.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bench.speed.machine import available_cores

POLL_SECONDS = 0.1
SAVE_SECONDS = 90.0
"""How long processes may take to save when they are stopped."""
STOPPED = 75
"""Exit code of a process that was stopped and has saved its run."""


@dataclass(frozen=True)
class Work:
    """What one process is to do."""

    name: str
    command: Sequence[str]
    log: Path
    """File for what it prints."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    work: Work
    code: int | None
    """0: it did its work; anything else: failed or stopped; None: it was never begun."""
    last_line: str = ""
    """What it said last."""

    @property
    def done(self) -> bool:
        """Whether it did its work."""
        return self.code == 0

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        words = {
            None: "not begun",
            0: "finished",
            STOPPED: "saved, to be continued",
            -signal.SIGTERM: "stopped before it had begun to train, or while it evaluated",
        }
        return words.get(self.code) or f"ended with {self.code}, see {self.work.log}"


@dataclass(frozen=True)
class _Running:
    work: Work
    process: subprocess.Popen[bytes]


def run_all(
    works: Sequence[Work],
    jobs: int,
    on_end: Callable[[Ended], None],
    *,
    seconds: float = math.inf,
    patience: float = SAVE_SECONDS,
    watch: Callable[[], None] = lambda: None,
) -> list[Ended]:
    """Run a process for each work, so many at a time.

    Args:
        works: What to do, in order.
        jobs: How many at once.
        on_end: Called whenever one has ended by itself.
        seconds: After so many all are stopped, as by a signal.
        patience: Seconds that they have to save when they are stopped.
        watch: Called again and again while they run.

    Returns:
        Those that were stopped, and those that were not begun.
    """
    for folder in {work.log.parent for work in works}:
        folder.mkdir(parents=True, exist_ok=True)
    waiting, running = list(works), list[_Running]()
    share = max(available_cores() // jobs, 1)
    end = time.monotonic() + seconds
    with _stop_signals() as stopped:
        while (waiting or running) and not stopped and time.monotonic() < end:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0), share))
            running = _reap(running, on_end)
            watch()
            time.sleep(POLL_SECONDS)
        _stop(running, patience)
    left = [one for one in running if one.process.returncode != 0]
    _reap([one for one in running if one not in left], on_end)
    return [*map(_ended, left), *(Ended(work, None) for work in waiting)]


def _start(work: Work, share: int) -> _Running:
    """Start a process that compiles on its share of the cores."""
    limits = {"TORCHINDUCTOR_COMPILE_THREADS": str(share), "OMP_NUM_THREADS": "1"}
    with work.log.open("ab") as file:
        # A session of its own: Ctrl-C reaches the parent alone, which lets the children save.
        process = subprocess.Popen(
            work.command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=limits | os.environ,
            start_new_session=True,
        )
    return _Running(work, process)


def _reap(running: Sequence[_Running], on_end: Callable[[Ended], None]) -> list[_Running]:
    """Report those that have ended; returns the others."""
    left = []
    for one in running:
        if one.process.poll() is None:
            left.append(one)
        else:
            on_end(_ended(one))
    return left


def _ended(one: _Running) -> Ended:
    return Ended(one.work, one.process.returncode, _last_line(one.work.log))


def _stop(running: Sequence[_Running], patience: float) -> None:
    """Ask what runs to save, wait for it, and end what does not."""
    for one in running:
        one.process.terminate()
    limit = time.monotonic() + patience
    for one in running:
        while one.process.poll() is None and time.monotonic() < limit:
            time.sleep(POLL_SECONDS)
        one.process.kill()
        one.process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Note signals that ask to stop, in a list that is empty until one comes."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

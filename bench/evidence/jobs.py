"""Several gates at once, each in a process of its own: the longest first, and nothing is lost.

A gate's process writes its record when it is done.  One that fails does not hold the others up.  On
SIGTERM or Ctrl-C every process saves its run and ends; called again with the same folders, gates
that have a record are skipped (`--missing`) and the others go on where they were.
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

from bench.evidence.gates import Gate
from bench.evidence.record import read_earlier, read_records
from bench.speed.machine import available_cores

POLL_SECONDS = 0.1
SAVE_SECONDS = 90.0
"""How long processes may take to save when they are stopped."""
STOPPED = 75
"""Exit code of a process that was stopped and has saved its run."""


@dataclass(frozen=True)
class Ended:
    """How the process of a gate ended."""

    gate: Gate
    code: int
    """0: measured, whatever its record says; anything else: failed or stopped."""
    last_line: str
    """What it said last."""

    @property
    def measured(self) -> bool:
        """Whether it wrote a record."""
        return self.code == 0


@dataclass(frozen=True)
class _Running:
    gate: Gate
    process: subprocess.Popen[bytes]
    log: Path


def longest_first(gates: Sequence[Gate], folders: Sequence[Path]) -> list[Gate]:
    """Sort gates by how long they took when last measured; those never measured come first.

    Args:
        gates: What to sort.
        folders: With records; what a later one says counts.
    """
    seconds: dict[str, float] = {}
    for folder in folders:
        seconds |= {name: each.seconds for name, each in read_earlier(folder, gates).items()}
        seconds |= {name: record.seconds for name, record in read_records(folder, gates).items()}
    return sorted(gates, key=lambda gate: -seconds.get(gate.preset, math.inf))


def run_all(
    gates: Sequence[Gate],
    jobs: int,
    command: Callable[[Gate], Sequence[str]],
    logs: Path,
    on_end: Callable[[Ended], None],
) -> list[Gate]:
    """Run a process for each gate, so many at a time.

    Args:
        gates: What to run, in order.
        jobs: How many at once.
        command: What a gate's process is to do; it writes the gate's record.
        logs: Folder for what the processes print, a file for each gate.
        on_end: Called whenever one has ended.

    Returns:
        The gates that were not measured because a signal came.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running = list(gates), list[_Running]()
    share = max(available_cores() // jobs, 1)
    with _stop_signals() as stopped:
        while (waiting or running) and not stopped:
            while waiting and len(running) < jobs:
                gate = waiting.pop(0)
                running.append(_start(gate, command(gate), logs / f"{gate.slug}.log", share))
            running = _reap(running, on_end)
            time.sleep(POLL_SECONDS)
        _stop(running)
    left = [one.gate for one in running if one.process.returncode != 0]
    _reap([one for one in running if one.gate not in left], on_end)
    return [*left, *waiting]


def _start(gate: Gate, command: Sequence[str], log: Path, share: int) -> _Running:
    """Start a process that compiles on its share of the cores."""
    limits = {"TORCHINDUCTOR_COMPILE_THREADS": str(share), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        # A session of its own: Ctrl-C reaches the parent alone, which lets the children save.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=limits | os.environ,
            start_new_session=True,
        )
    return _Running(gate, process, log)


def _reap(running: Sequence[_Running], on_end: Callable[[Ended], None]) -> list[_Running]:
    """Report those that have ended; returns the others."""
    left = []
    for one in running:
        code = one.process.poll()
        if code is None:
            left.append(one)
        else:
            on_end(Ended(one.gate, code, _last_line(one.log)))
    return left


def _stop(running: Sequence[_Running]) -> None:
    """Ask what runs to save, wait for it, and end what does not."""
    for one in running:
        one.process.terminate()
    limit = time.monotonic() + SAVE_SECONDS
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

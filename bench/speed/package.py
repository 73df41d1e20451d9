"""The package as a whole: how long it takes to import it and to ask it for help."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from bench.speed.compare import ROOT
from bench.speed.figures import Figure
from bench.speed.options import BenchError, Options
from bench.speed.rows import Row

_IMPORT = """
import time
start = time.perf_counter()
import rl_training
print(time.perf_counter() - start)
"""


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise BenchError(f"python {arguments[0]} failed: {last[0]}")
    return done.stdout


def import_seconds() -> float:
    """Import the package in a fresh process; the interpreter's own start is not counted."""
    return float(_run("-c", _IMPORT))


def help_seconds() -> float:
    """Run `rl-training --help`, all of it."""
    start = time.perf_counter()
    _run("-m", "rl_training", "--help")
    return time.perf_counter() - start


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Time both in fresh processes; the first of each fills the caches of the disk."""
    measured: dict[str, Callable[[], float]] = {"import": import_seconds, "--help": help_seconds}
    for name, seconds in measured.items():
        samples = [seconds() for _ in range(options.repeats + 1)][1:]
        yield Figure(
            row=row.name,
            label=f"{row.name} {name}",
            unit="seconds",
            samples={"ours": samples},
            bar=row.bars[name],
        )

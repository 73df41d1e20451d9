"""How many CPU threads a run gets: asked for, or measured once per kind of work and remembered.

Small products gain nothing from a second thread, and beside another busy process every thread waits
for the slowest.  What was measured on a quiet machine is remembered, and used again only while that
many cores are idle.  Results depend on the number in their last bits, so that a resumed run keeps
its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.experiment.config import MAX_THREADS
from rl_training.runtime.compile.cache import CompileError, cache_folder, processor

GAIN = 1.2
"""How much faster more threads must be to be chosen."""
REPEATS = 7
SLACK = 0.5
"""Cores of those that a run wants that others may keep busy: no machine is ever quite idle."""


@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads, and what the user should know about it."""

    threads: int
    note: str | None = None


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """Compute on so many CPU threads; afterwards the caller has the number it had before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_threads(asked: int, learner: AnyLearner, saved: int | None = None) -> ThreadChoice:
    """Return the number of threads of a run.

    Args:
        asked: The setting; 0 leaves the choice to `OMP_NUM_THREADS`, then to what was saved, then
            to what is fastest.
        learner: Whose products are measured.
        saved: What the run had until now, if it is resumed.
    """
    given = asked or _given_by_environment()
    if given is not None:
        return ThreadChoice(given)
    cores = len(_available_cores())
    if learner.device.type != "cpu":
        return ThreadChoice(1)  # the device computes, whose results do not depend on our threads
    if saved is not None:
        return ThreadChoice(saved, _crowding(saved, cores))
    return _fastest_choice(learner, cores)


def _given_by_environment() -> int | None:
    """Return what `OMP_NUM_THREADS` says; a list is for nested regions, of which we have none."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(text), MAX_THREADS) if text.isdecimal() and int(text) > 0 else None


def _crowding(saved: int, cores: int) -> str | None:
    """Return a warning where the threads of a resumed run have to share cores."""
    idle = float(cores) if saved == 1 else _idle_cores()
    if saved <= idle + SLACK:
        return None
    return (
        f"the run keeps its {saved} threads, because its last bits depend on them, although only "
        f"{idle:.1f} of {cores} cores are idle: resume with --threads 1 where speed matters more"
    )


def _fastest_choice(learner: AnyLearner, cores: int) -> ThreadChoice:
    if cores == 1:
        return ThreadChoice(1)
    left, right = _typical_product(learner)
    key = f"{processor()} / {cores} cores / {tuple(left.shape)} x {tuple(right.shape)}"
    try:
        file = cache_folder().parent / "threads.json"
        known = _read(file)
        best = known.get(key)
        if best == 1:
            return ThreadChoice(1)
        idle = _idle_cores()
        if best is None:
            best, is_limited = _fastest(left, right, cores, idle)
            if not is_limited:
                _write(file, known | {key: best})
    except (CompileError, OSError):
        return ThreadChoice(1)  # what cannot be remembered must not vary
    if best == 1 or best <= idle + SLACK:
        return ThreadChoice(best)
    return ThreadChoice(
        1,
        f"one thread, because only {idle:.1f} of {cores} cores are idle; on a quiet machine this "
        f"run would get {best} and other last bits: set threads to fix the number",
    )


def _available_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _idle_cores() -> float:
    """Return how many of our cores have nothing to do while this process sleeps."""
    busy = psutil.cpu_percent(interval=0.2, percpu=True)
    return sum(1 - busy[core] / 100 for core in _available_cores() if core < len(busy))


def _typical_product(learner: AnyLearner) -> tuple[Tensor, Tensor]:
    """Return a batch and weights of the size of the learner's largest product."""
    weights = [p for o in learner.optimizers() for p in o.parameters if p.ndim >= 3]
    largest = max(weights, key=lambda weight: weight.numel()).detach().flatten(0, -3)
    settings: Any = learner.config
    rows = int(getattr(settings, "batch_size", 0) or getattr(settings, "minibatch_size", 256))
    return torch.ones(largest.shape[0], rows, largest.shape[1]), torch.ones_like(largest)


def _fastest(left: Tensor, right: Tensor, cores: int, idle: float) -> tuple[int, bool]:
    """Return the best number for the idle cores, and whether a quiet machine might differ."""
    best, threads = 1, 2
    with thread_count(1):
        best_seconds = _seconds(left, right, 1) if threads <= idle + SLACK else 0.0
        while threads <= min(cores, idle + SLACK):
            seconds = _seconds(left, right, threads)
            if seconds * GAIN < best_seconds:
                best, best_seconds = threads, seconds
            threads *= 2
    # A number far below the largest that was tried would not change with still more cores.
    return best, threads <= cores and best * 4 >= threads


def _seconds(left: Tensor, right: Tensor, threads: int) -> float:
    """Return the shortest time of a few products, each with what comes after it in a network."""
    torch.set_num_threads(threads)
    shortest = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(10):
            torch.relu_(torch.bmm(left, right))
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def _read(file: Path) -> dict[str, int]:
    try:
        known: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return known


def _write(file: Path, known: dict[str, int]) -> None:
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
    os.replace(temporary, file)

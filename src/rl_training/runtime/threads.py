"""How many CPU threads a run gets: measured once per kind of work on a machine, then remembered.

Small products gain nothing from a second thread, and beside another busy process lose several-fold.
The choice is kept on disk, because results depend on it in their last bits: the same run must get
the same number again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.runtime.compiling import CompileError, cache_folder, processor

GAIN = 1.2
"""How much faster more threads must be to be chosen."""
REPEATS = 7
BUSY_PERCENT = 30.0
"""Share of the cores' time that others may take while threads are compared."""


def choose_threads(asked: int, learner: AnyLearner) -> int:
    """Return the number of threads: what was asked for, what is remembered, or what is fastest."""
    if asked:
        return asked
    cores = _available_cores()
    if cores == 1 or learner.device.type != "cpu":
        return 1
    left, right = _typical_product(learner)
    key = f"{processor()} / {cores} cores / {tuple(left.shape)} x {tuple(right.shape)}"
    try:
        file = cache_folder().parent / "threads.json"
        known = _read(file)
        if key not in known:
            if _others_are_busy():
                return 1  # a figure taken now would be remembered when they are gone
            known[key] = _fastest(left, right, cores)
            _write(file, known)
    except (CompileError, OSError):
        return 1  # what cannot be remembered must not vary
    return known[key]


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _others_are_busy() -> bool:
    """Whether the cores have work while this process has none."""
    return psutil.cpu_percent(interval=0.2) > BUSY_PERCENT


def _typical_product(learner: AnyLearner) -> tuple[Tensor, Tensor]:
    """Return a batch and weights of the size of the learner's largest product."""
    weights = [p for o in learner.optimizers() for p in o.parameters if p.ndim >= 3]
    largest = max(weights, key=lambda weight: weight.numel()).detach().flatten(0, -3)
    settings: Any = learner.config
    rows = int(getattr(settings, "batch_size", 0) or getattr(settings, "minibatch_size", 256))
    return torch.ones(largest.shape[0], rows, largest.shape[1]), torch.ones_like(largest)


def _fastest(left: Tensor, right: Tensor, cores: int) -> int:
    before = torch.get_num_threads()
    best, best_seconds = 1, _seconds(left, right, 1)
    threads = 2
    while threads <= cores:
        seconds = _seconds(left, right, threads)
        if seconds * GAIN < best_seconds:
            best, best_seconds = threads, seconds
        threads *= 2
    torch.set_num_threads(before)
    return best


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

"""What the benchmark ran on; does not import torch, so that our own process stays small."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from rl_training.experiment.zoo import processor

BUSY = 0.3
"""Load, as a share of the cores, from which figures are called rough."""


def describe(threads: int) -> dict[str, Any]:
    """Return processor, cores, versions, threads, date and load."""
    return {
        "processor": processor(),
        "cores": available_cores(),
        "threads": threads,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "rl_training": _version("rl-training"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load": load(),
    }


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """Return the mean number of running processes over the last minute, where the system says."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def headline(machine: dict[str, Any], repeats: int) -> str:
    """Return the conditions of a table in two or three lines."""
    threads = machine["threads"]
    text = (
        f"{machine['processor']}, {machine['cores']} cores; torch {machine['torch']}, "
        f"{threads} thread{'s' if threads > 1 else ''}\n"
        f"{machine['date']}, median of {repeats}, sides in turns"
    )
    if machine["load"] is not None and machine["load"] > BUSY * machine["cores"]:
        text += f"\nload {machine['load']} from other processes, so figures are rough"
    return text


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

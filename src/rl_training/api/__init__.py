"""The managed classes: `SAC(config).learn()` and its kin."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from rl_training.api import algorithms

    if name.startswith("_") or name == "algorithms":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(algorithms, name)


def __dir__() -> list[str]:
    from rl_training.experiment.registry import class_names

    return sorted(["Agent", *class_names()])

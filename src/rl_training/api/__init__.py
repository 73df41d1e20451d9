"""The managed classes, `SAC(config).learn()` and the others, as people call them from Python.

They hold no logic of training: everything they do is a call into `runtime`.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Importing the submodule below asks for it here first; answering by importing would not end.
    if name.startswith("_") or name == "algorithms":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rl_training.api import algorithms

    return getattr(algorithms, name)


def __dir__() -> list[str]:
    from rl_training.experiment.registry import class_names

    return sorted(["Agent", *class_names()])

"""Reinforcement-learning agents in PyTorch: train, evaluate, resume bit-exactly, predict.

`from rl_training import SAC, TrainConfig` gives the managed classes; `SACAlgorithm` is the learner
behind `SAC`.  Names are loaded when first used, so that importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rl_training._version import __version__

__all__ = [
    "Callback",
    "OfflineDataset",
    "PruneTrial",
    "SaveEvery",
    "StopOnReturn",
    "TrainConfig",
    "TrainerState",
    "__version__",
]
TOP_LEVEL = {
    "TrainConfig": "rl_training.experiment.config",
    "OfflineDataset": "rl_training.data",
    **dict.fromkeys(
        ("Callback", "PruneTrial", "SaveEvery", "StopOnReturn", "TrainerState"),
        "rl_training.runtime.callbacks",
    ),
}
"""Names beside the methods, by the module that each is in."""


def __getattr__(name: str) -> Any:
    if name in TOP_LEVEL:
        return getattr(import_module(TOP_LEVEL[name]), name)
    from rl_training.experiment.registry import class_names, get_algorithm_spec

    names = class_names()
    if name in names:
        from rl_training.api import algorithms

        return getattr(algorithms, name)
    if name.removesuffix("Algorithm") in names and name.endswith("Algorithm"):
        return get_algorithm_spec(names[name.removesuffix("Algorithm")]).learner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from rl_training.experiment.registry import class_names

    names = class_names()
    return sorted([*__all__, *names, *(f"{name}Algorithm" for name in names)])

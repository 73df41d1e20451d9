"""A run in progress: loops, session, collection, evaluation, callbacks, resume.

What a method computes is in `algorithms`, what is on disk in `experiment`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.results import EvalResult, TrainingInterrupted, TrainResult

if TYPE_CHECKING:
    from rl_training.algorithms.optim import learning_rate_factor, linear
    from rl_training.runtime.callbacks import StopRule

__all__ = [
    "Callback",
    "EvalResult",
    "StopRule",
    "TrainResult",
    "TrainerState",
    "TrainingInterrupted",
    "learning_rate_factor",
    "linear",
]

# Loaded when first used, so that commands that only read runs start without PyTorch.
_LATER = {
    "StopRule": "rl_training.runtime.callbacks",
    "learning_rate_factor": "rl_training.algorithms.optim",
    "linear": "rl_training.algorithms.optim",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

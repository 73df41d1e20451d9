"""A run in progress: loops, session, collection, evaluation, callbacks, resume.

What a method computes is in `algorithms`, what is on disk in `experiment`.
"""

from rl_training.algorithms.schedules import learning_rate_factor, linear
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.early_stopping import StopRule
from rl_training.runtime.results import EvalResult, TrainingInterrupted, TrainResult

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

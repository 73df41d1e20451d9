"""The experiment manager: a configuration in, a trainer out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.results import TrainResult
from rl_training.runtime.train import train


@dataclass(frozen=True)
class Trainer:
    """A run that is ready to start."""

    config: TrainConfig
    callbacks: Sequence[Callback] = field(default=())

    def train(self) -> TrainResult:
        """Train to the end."""
        return train(self.config, callbacks=self.callbacks)


class ExperimentManager:
    """Sets up runs of any registered algorithm."""

    def setup(self, config: TrainConfig, *, callbacks: Sequence[Callback] = ()) -> Trainer:
        """Return a trainer for `config`; an unknown algorithm is an error here, not later."""
        get_algorithm_spec(config.algo)
        return Trainer(config, tuple(callbacks))

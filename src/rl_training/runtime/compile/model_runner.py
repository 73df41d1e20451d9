"""Fits a model of the dynamics, with compiled gradient steps when that is due.

A fit begins eagerly and changes over by a rule that depends on the settings, the number of rows and
the counts in the checkpoint alone, so that a fit cut between two epochs goes on in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.dynamics.fit import DynamicsTrainer
from rl_training.algorithms.dynamics.imagination import Imagination
from rl_training.runtime.compile.cuda_graph import CapturedCall
from rl_training.runtime.compile.programs import (
    MASKED_MODEL_STEP,
    MODEL_STEP,
    model_batch_shape,
    model_sources,
)
from rl_training.runtime.compile.runner import EAGER_SECONDS, ReplayRunner, seconds_on_cpu


class ModelRunner:
    """Takes the gradient steps of a learner's model."""

    def __init__(self, learner: AnyLearner, imagination: Imagination, runner: ReplayRunner) -> None:
        self.learner, self.imagination, self.runner = learner, imagination, runner
        self._programs: dict[str, Callable[..., Any]] | None = None

    def fit(self, rows: Tensor, pause: Callable[[], None]) -> dict[str, Tensor]:
        """Fit the model to the table `rows`; `pause` is called between epochs and may leave."""
        trainer = self.imagination.trainer

        def on_epoch(_: DynamicsTrainer) -> None:
            pause()
            self._choose(rows)

        self._choose(rows)
        try:
            return self.imagination.fit(rows, on_epoch)
        finally:
            trainer.run_step = trainer.step

    def _choose(self, rows: Tensor) -> None:
        trainer = self.imagination.trainer
        steps = trainer.epoch.value * trainer.epoch_steps(rows)
        trainer.run_step = self._step if self._is_due(steps) else trainer.step

    def _is_due(self, steps: int) -> bool:
        """Tell whether programs are to be used after so many steps of the fit in progress."""
        first = self.runner.first_update
        if first == math.inf:
            return False
        size = self.imagination.config.model_batch_size
        seconds = seconds_on_cpu([self.imagination.trainer.optimizer], size)
        return self.learner.num_updates.value >= first or steps * seconds >= EAGER_SECONDS

    def _step(self, rows: Tensor, active: Tensor | None = None) -> dict[str, Tensor]:
        if self._programs is None:
            accelerator = self.runner.accelerator
            found = accelerator.programs(list(model_sources(self.learner).values()))
            self._programs = {
                name: CapturedCall(program) if accelerator.captures else program
                for name, program in found.items()
            }
        name = MODEL_STEP if active is None else MASKED_MODEL_STEP
        if name not in self._programs or rows.shape != model_batch_shape(self.imagination):
            return self.imagination.trainer.step(rows, active)
        arguments = (rows,) if active is None else (rows, active)
        result: dict[str, Tensor] = self._programs[name](*arguments)
        return result

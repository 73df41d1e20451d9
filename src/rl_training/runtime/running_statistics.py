"""Running statistics of what a run sees, moved at every step of its loop.

The learner has the statistics, so that they are saved, loaded and exported with its policy; here
are the returns of the episodes in progress, which belong to the environments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.runtime.checkpoints.saver import Part
from rl_training.runtime.collector import CollectedStep


class RunningStatistics:
    """Shows steps to a learner that keeps statistics, and costs nothing with one that does not."""

    def __init__(self, learner: AnyLearner, num_envs: int) -> None:
        self._learner = learner
        self._returns = learner.initial_returns(num_envs)
        self.idle = self._returns is None and not learner.counts_observations
        """Whether there is nothing to show."""

    def parts(self) -> dict[str, Part]:
        """Return what a checkpoint must hold beside the learner, by name."""
        return {} if self._returns is None else {"returns": self._returns}

    def begin(self, starts: Tensor) -> None:
        """Begin the returns of episodes that are at their start `[S, n]`, once a run is restored.

        An environment whose state could not be kept has begun a new episode by then.
        """
        if self._returns is not None:
            self._returns.returns.masked_fill_(starts, 0.0)

    def see(self, seen: CollectedStep) -> None:
        """Take in a step of all environments."""
        if self.idle:
            return
        step, device = seen.step, self._learner.device
        arrays = (seen.obs, step.reward, step.terminated | step.truncated)
        obs, reward, ended = (torch.from_numpy(array).to(device) for array in arrays)
        self._learner.see_step(obs, reward, ended, self._returns)

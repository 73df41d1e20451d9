"""Steps the environments with a learner's actions and keeps the books of episodes.

Shapes: S seeds, n environments per seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.vector import Step
from rl_training.state import StateDict, require_same_keys

WINDOW = 100
"""Episodes over which training returns are averaged."""


@dataclass(frozen=True)
class CollectedStep:
    """One step of all environments: what was seen, done, and what came of it."""

    obs: NDArray[Any]
    action: NDArray[Any]
    step: Step


class Collector:
    """The environments, their current observations, and running returns."""

    def __init__(self, envs: SeedVectorEnv, device: torch.device) -> None:
        self.envs, self.device = envs, device
        self._on_cpu = device.type == "cpu"
        shape = (envs.num_seeds, envs.num_envs)
        self.obs: NDArray[Any] = np.zeros((*shape, *envs.spec.obs_shape), np.float32)
        self.episode_return = np.zeros(shape, np.float64)
        self.episode_length = np.zeros(shape, np.int64)
        self.recent = np.zeros((envs.num_seeds, WINDOW, 2), np.float64)
        self.episodes = np.zeros(envs.num_seeds, np.int64)

    def start(self) -> None:
        """Reset all environments."""
        self.obs = self.envs.reset()

    def observation(self) -> Tensor:
        """Return the current observations on the learner's device, `[S, n, ...]`."""
        obs = torch.from_numpy(self.obs)
        return obs if self._on_cpu else obs.to(self.device)

    def step(self, action: Tensor) -> CollectedStep:
        """Act in every environment with learner-unit actions `[S, n, ...]`."""
        array = action.numpy() if self._on_cpu else action.cpu().numpy()
        before = self.obs
        step = self.envs.step(array)
        self.obs = step.obs
        self.episode_return += step.reward
        self.episode_length += 1
        ended = step.terminated | step.truncated
        if ended.any():
            self._close_episodes(ended)
        return CollectedStep(before, array, step)

    def _close_episodes(self, ended: NDArray[np.bool_]) -> None:
        for seed, env in zip(*np.nonzero(ended), strict=True):
            slot = self.episodes[seed] % WINDOW
            self.recent[seed, slot] = self.episode_return[seed, env], self.episode_length[seed, env]
            self.episodes[seed] += 1
        self.episode_return[ended] = 0.0
        self.episode_length[ended] = 0

    def summary(self, seed: int) -> dict[str, float]:
        """Return mean return and length of the last episodes of a seed (empty before the first)."""
        count = min(int(self.episodes[seed]), WINDOW)
        if count == 0:
            return {}
        mean_return, mean_length = self.recent[seed, :count].mean(0)
        return {
            "rollout/return_mean": float(mean_return),
            "rollout/length_mean": float(mean_length),
            "rollout/episodes": float(self.episodes[seed]),
        }

    _ARRAYS = ("obs", "episode_return", "episode_length", "recent", "episodes")

    def state_dict(self) -> StateDict:
        """Return observations, running returns and a snapshot of the environments."""
        state: StateDict = {name: np.array(getattr(self, name)) for name in self._ARRAYS}
        return state | {"envs": self.envs.snapshot()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore; returns messages about environments that had to begin a new episode."""
        require_same_keys({**dict.fromkeys(self._ARRAYS), "envs": None}, state, "Collector")
        for name in self._ARRAYS:
            setattr(self, name, np.array(state[name]))
        report = self.envs.restore(state["envs"])
        for flat in report.restarted:
            seed, env = divmod(flat, self.envs.num_envs)
            self.obs[seed, env] = report.obs[seed, env]
            self.episode_return[seed, env] = 0.0
            self.episode_length[seed, env] = 0
        return report.messages

"""An environment with the sizes of the comparison and nothing else, so that stepping is free."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from bench.speed.sizes import SAC


class Task(gymnasium.Env[Any, Any]):
    """Observations are zeros, rewards too, and no episode ends."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (SAC.obs,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (SAC.action,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        return np.zeros(SAC.obs, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do nothing."""
        return np.zeros(SAC.obs, np.float32), 0.0, False, False, {}

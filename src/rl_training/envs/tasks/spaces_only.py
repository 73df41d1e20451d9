"""A task of which only the spaces are known: what is learned from data without an environment.

It can be made and stepped, because everything that trains asks a task for its spaces, but it plays
nothing: evaluating on it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.spec import Array
from rl_training.errors import ConfigError

SPACES_ONLY = "rl_training/SpacesOnly-v0"


class SpacesOnly(gym.Env[Array, Any]):
    """Observations of zeros and no reward; an episode is one step."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        obs_dtype: str = "float32",
        num_actions: int | None = None,
        action_sizes: Sequence[int] | None = None,
        action_low: Sequence[float] | None = None,
        action_high: Sequence[float] | None = None,
    ) -> None:
        """Set the spaces.

        Args:
            obs_shape: Shape of an observation.
            obs_dtype: `float32`, or `uint8` for images.
            num_actions: Number of discrete actions; None for all others.
            action_sizes: Numbers of values of the parts of a multi-discrete action.
            action_low: Lower bound of each entry of a continuous action.
            action_high: Upper bounds.
        """
        low, high = (0, 255) if obs_dtype == "uint8" else (-np.inf, np.inf)
        dtype: Any = np.dtype(obs_dtype).type
        self.observation_space = spaces.Box(low, high, tuple(obs_shape), dtype)
        if num_actions is not None:
            self.action_space: spaces.Space[Any] = spaces.Discrete(num_actions)
        elif action_sizes is not None:
            self.action_space = spaces.MultiDiscrete(list(action_sizes))
        elif action_low is not None and action_high is not None:
            least, most = np.asarray(action_low, np.float32), np.asarray(action_high, np.float32)
            self.action_space = spaces.Box(least, most, dtype=np.float32)
        else:
            raise ConfigError("give num_actions, action_sizes, or action_low and action_high")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Show nothing."""
        super().reset(seed=seed, options=options)
        return self._nothing(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
        """Pay nothing, and end."""
        return self._nothing(), 0.0, False, True, {}

    def _nothing(self) -> Array:
        return np.zeros(self.observation_space.shape or (), self.observation_space.dtype)


def require_environment(env_id: str) -> None:
    """Refuse to play a task of which only the spaces are known.

    Raises:
        ConfigError: Saying what to do instead.
    """
    if env_id == SPACES_ONLY:
        raise ConfigError(
            "this policy was learned from data without an environment: there is nothing to play; "
            "evaluate it with env=..., or from data with evaluate_offline(dataset) or "
            "`rl-training ope`"
        )


def register_spaces_only() -> None:
    """Register the id, once."""
    if SPACES_ONLY not in gym.registry:
        gym.register(SPACES_ONLY, entry_point=f"{__name__}:SpacesOnly", max_episode_steps=1)

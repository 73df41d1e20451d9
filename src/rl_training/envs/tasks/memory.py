"""Tasks that need a memory, without an extra: a T-maze, and classic tasks with hidden velocities.

All can be continued exactly from a snapshot (`get_state`, `set_state`).
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv

from rl_training.envs.spec import Array
from rl_training.errors import ConfigError

NORTH, EAST, SOUTH, WEST = range(4)
START, CORRIDOR, JUNCTION = ((0, 1, 1), (1, 1, 0)), (1, 0, 1), (0, 1, 0)
"""What is seen: at the start, by where the goal is; in the corridor; at the junction."""
GOAL_REWARD, BLOCKED_REWARD = 4.0, -0.1
STEPS_PER_CELL = 10
"""Of the time limit."""


class TMaze(gym.Env[Array, Any]):
    """Bakker's T-maze (2002, "Reinforcement Learning with Long Short-Term Memory", Section 4.1).

    A corridor ends in a junction; the sign at its beginning tells whether the goal is to the north
    or to the south of it, and is not seen again.  Reward 4 for turning the right way, which ends
    the episode as does the wrong way, and -0.1 for that and for walking into a wall.  Who does not
    remember the sign is right every second time: 1.95 on average, where 4 is best.

    Deviation: a time limit of ten steps for each cell.
    """

    def __init__(self, length: int = 10) -> None:
        """Set the maze up.

        Args:
            length: Cells of the corridor, the first included and the junction not.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(f"env_kwargs.length must be a whole number >= 1, got {length!r}")
        self.length = length
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(4)
        self.place = self.goal = self.steps = 0

    def _obs(self) -> Array:
        seen = START[self.goal] if self.place == 0 else CORRIDOR
        return np.array(JUNCTION if self.place == self.length else seen, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin at the sign, with the goal on a random side."""
        super().reset(seed=seed, options=options)
        self.place, self.steps = 0, 0
        self.goal = int(self.np_random.integers(2))
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Walk one cell, or turn at the junction."""
        self.steps += 1
        at_junction, turns = self.place == self.length, action in (NORTH, SOUTH)
        if at_junction and turns:
            right = (action == SOUTH) == bool(self.goal)
            reward = GOAL_REWARD if right else BLOCKED_REWARD
            return self._obs(), reward, True, False, {"is_success": right}
        place = self.place + {EAST: 1, WEST: -1}.get(int(action), 0)
        blocked = turns or not 0 <= place <= self.length
        self.place = min(max(place, 0), self.length)
        late = self.steps >= STEPS_PER_CELL * self.length
        seen = {"is_success": False} if late else {}
        return self._obs(), BLOCKED_REWARD if blocked else 0.0, False, late, seen

    def get_state(self) -> dict[str, Any]:
        """Return where the walker is."""
        return {"place": self.place, "goal": self.goal, "steps": self.steps}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.place, self.goal, self.steps = state["place"], state["goal"], state["steps"]


class MaskedCartPole(gym.ObservationWrapper[Array, Any, Array]):
    """CartPole-v1 of which only the positions of cart and pole are seen."""

    def __init__(self) -> None:
        super().__init__(CartPoleEnv())
        self.observation_space = _part(self.env.observation_space, slice(0, None, 2))

    def observation(self, observation: Array) -> Array:
        """Leave the velocities out."""
        return observation[::2]


class MaskedPendulum(gym.ObservationWrapper[Array, Any, Array]):
    """Pendulum-v1 of which only the angle is seen, as its cosine and sine."""

    def __init__(self) -> None:
        super().__init__(PendulumEnv())
        self.observation_space = _part(self.env.observation_space, slice(0, 2))

    def observation(self, observation: Array) -> Array:
        """Leave the velocity out."""
        return observation[:2]


def _part(space: gym.Space[Any], entries: slice) -> spaces.Box:
    assert isinstance(space, spaces.Box)
    return spaces.Box(space.low[entries], space.high[entries], dtype=np.float32)

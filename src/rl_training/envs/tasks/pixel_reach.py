"""A reach task from pixels with continuous actions, small enough to learn on a CPU.

It needs no extra, and can be continued exactly from a snapshot (`get_state`, `set_state`).
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.spec import Array
from rl_training.errors import ConfigError

IMAGE_SIZE = 24
SMALLEST = 8
EPISODE = 25
"""Steps of an episode."""
LARGEST_MOVE = 0.2
"""Along each axis; the table is [-1, 1] x [-1, 1]."""
RADIUS = 0.12
"""Of the disc that is drawn."""
BEGIN, END = -1.0, 1.0


class PixelReach(gym.Env[Array, Any]):
    """Move a disc on a table to a goal, seen from above.

    The action is the move, two numbers in [-1, 1] of 0.2 each; the disc stops at the edges of the
    table.  The reward is minus the distance to the goal.  Both places are drawn uniformly, and an
    episode has 25 steps and no other end.  The best return is -2.3 on average, a random
    player's about -26.

    Channels: disc, goal, both drawn as discs with soft edges, so that places between pixels show.
    """

    def __init__(self, image_size: int = IMAGE_SIZE) -> None:
        """Set the task up.

        Args:
            image_size: Height and width of the image in pixels.
        """
        if isinstance(image_size, bool) or not SMALLEST <= image_size <= 512:
            raise ConfigError(
                f"env_kwargs.image_size must be from {SMALLEST} to 512, got {image_size!r}"
            )
        self.observation_space = spaces.Box(0, 255, (2, image_size, image_size), np.uint8)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.centres = (np.arange(image_size) + 0.5) / image_size * (END - BEGIN) + BEGIN
        self.pixel = (END - BEGIN) / image_size
        self.place, self.goal = np.zeros(2), np.zeros(2)

    def _obs(self) -> Array:
        return np.stack([self._drawn(self.place), self._drawn(self.goal)])

    def _drawn(self, place: Array) -> Array:
        """Draw a disc around `place`, a row and a column on the table."""
        rows, columns = (self.centres - coordinate for coordinate in place)
        distance = np.sqrt(rows[:, None] ** 2 + columns**2)
        inside = np.clip((RADIUS - distance) / self.pixel + 0.5, 0.0, 1.0)
        image: Array = np.rint(inside * 255).astype(np.uint8)
        return image

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Draw both places."""
        super().reset(seed=seed, options=options)
        self.place, self.goal = self.np_random.uniform(BEGIN, END, (2, 2))
        return self._obs(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Move the disc."""
        move = np.clip(np.asarray(action, np.float64), -1.0, 1.0) * LARGEST_MOVE
        self.place = np.clip(self.place + move, BEGIN, END)
        return self._obs(), -float(np.linalg.norm(self.place - self.goal)), False, False, {}

    def get_state(self) -> dict[str, Any]:
        """Return both places."""
        return {"place": self.place.copy(), "goal": self.goal.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.place, self.goal = np.array(state["place"]), np.array(state["goal"])

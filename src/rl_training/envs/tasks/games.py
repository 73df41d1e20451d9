"""Small pixel games that need no extra: Catch, the same with a cue, and a Breakout, on 10 x 10.

Observations are uint8 images `[channels, 10, 10]`, one channel per kind of thing, 255 where there
is one; with `image_size` cells are drawn as squares of several pixels.  All can be continued
exactly from a snapshot (`get_state`, `set_state`).
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.spec import Array
from rl_training.errors import ConfigError

SIZE = 10
STAY, LEFT, RIGHT = 0, 1, 2
PADDLE_ROW = SIZE - 1
BRICK_ROWS = slice(1, 4)
ELSEWHERE = {
    "CartPoleSwingUp": ("swing_up", 200),
    "TMaze": ("memory", None),
    "MaskedCartPole": ("memory", 500),
    "MaskedPendulum": ("memory", 200),
    "PixelReach": ("pixel_reach", 25),
}
"""Built-in tasks of other modules, imported when made, and their time limits."""
StepResult = tuple[Array, float, bool, bool, dict[str, Any]]
Parts: TypeAlias = dict[str, Array]
ObsT = TypeVar("ObsT")


class _Game(gym.Env[ObsT, Any]):
    """A paddle on the bottom row, moved by one cell, and a repeated action now and then."""

    channels: ClassVar[int]
    _plain: ClassVar[tuple[str, ...]]
    """Attributes that hold the state of the game."""

    def __init__(
        self, sticky_actions: float = 0.0, image_size: int | None = None, size: int = SIZE
    ) -> None:
        """Set the game up.

        Args:
            sticky_actions: Chance that the last action is repeated.
            image_size: Height and width of the image in pixels; None is one for each cell.
            size: Height and width of the game in cells.
        """
        self.size = size
        image_size = size if image_size is None else image_size
        if image_size < size:
            raise ConfigError(
                f"env_kwargs.image_size must be >= {size}, a pixel for each cell, got {image_size}"
            )
        shape = (self.channels, image_size, image_size)
        self.image_space = spaces.Box(0, 255, shape, np.uint8)
        # Cells that the pixels show.
        cells = [pixel * size // image_size for pixel in range(image_size)]
        self._cells = None if image_size == size else np.ix_(range(self.channels), cells, cells)
        self.action_space = spaces.Discrete(3)
        self.sticky_actions = sticky_actions
        self.paddle = size // 2
        self.last_action = STAY

    def _move_paddle(self, action: int) -> None:
        # The generator is asked only where it matters, so that games without it are as they were.
        if self.sticky_actions > 0 and self.np_random.random() < self.sticky_actions:
            action = self.last_action
        self.last_action = action
        step = {STAY: 0, LEFT: -1, RIGHT: 1}[action]
        self.paddle = min(max(self.paddle + step, 0), self.size - 1)

    def _drawn(self, image: Array) -> Array:
        """The image of cells in its size in pixels."""
        return image if self._cells is None else image[self._cells]

    def get_state(self) -> dict[str, Any]:
        """Return the state of the game."""
        return {name: getattr(self, name) for name in (*self._plain, "paddle", "last_action")}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of a game."""
        for name, value in state.items():
            setattr(self, name, value)


class Catch(_Game[Array]):
    """A ball falls straight down; be under it. Reward 1 for a catch, -1 for a miss, then the end.

    Channels: paddle, ball.  A random player's mean return is about -0.8, and -0.68 with `size` 6.
    """

    channels = 2
    _plain = ("row", "column")

    def __init__(self, image_size: int | None = None, size: int = SIZE) -> None:
        super().__init__(image_size=image_size, size=size)
        self.observation_space = self.image_space
        self.row = self.column = 0

    def _obs(self) -> Array:
        image = np.zeros((self.channels, self.size, self.size), np.uint8)
        image[0, -1, self.paddle] = 255
        image[1, self.row, self.column] = 255
        return self._drawn(image)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin with a ball in a random column of the top row."""
        super().reset(seed=seed, options=options)
        self.paddle, self.last_action = self.size // 2, STAY
        self.row, self.column = 0, int(self.np_random.integers(self.size))
        return self._obs(), {}

    def step(self, action: Any) -> StepResult:
        """Move the paddle, let the ball fall by one row."""
        self._move_paddle(int(action))
        self.row += 1
        landed = self.row == self.size - 1
        caught = self.column == self.paddle
        reward = (1.0 if caught else -1.0) if landed else 0.0
        return self._obs(), reward, landed, False, {}


class CuedCatch(_Game[Parts]):
    """Catch with two balls: the image shows where they fall, a vector tells which of them counts.

    Reward 1 for being under the ball that counts, -1 for not, then the end.  The balls fall in two
    columns and either may count, so who does not see the cue gets 0 on average at best, and who
    does not see the image -0.8 (2 / `size` - 1); who sees both always gets 1.

    Channels of `image`: paddle, first ball, second ball; `cue` is one-hot.
    """

    channels = 3
    _plain = ("row", "columns", "wanted")

    def __init__(self, hidden: str | None = None, size: int = SIZE) -> None:
        """Set the game up.

        Args:
            hidden: The part that is shown as zeros, `image` or `cue`; None shows both.
            size: Height and width of the game in cells.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 2:
            raise ConfigError(
                f"env_kwargs.size must be a whole number >= 2, a column for each ball, got {size!r}"
            )
        super().__init__(size=size)
        if hidden not in (None, "image", "cue"):
            raise ConfigError(f"env_kwargs.hidden must be image, cue or null, got {hidden!r}")
        self.hidden = hidden
        cue = spaces.Box(0.0, 1.0, (2,), np.float32)
        parts: spaces.Space[Any] = spaces.Dict({"image": self.image_space, "cue": cue})
        self.observation_space = parts
        self.row, self.columns, self.wanted = 0, [0, 1], 0

    def _obs(self) -> Parts:
        image = np.zeros((self.channels, self.size, self.size), np.uint8)
        image[0, -1, self.paddle] = 255
        for ball, column in enumerate(self.columns, 1):
            image[ball, self.row, column] = 255
        parts = {"image": image, "cue": np.eye(2, dtype=np.float32)[self.wanted]}
        if self.hidden is not None:
            parts[self.hidden] = np.zeros_like(parts[self.hidden])
        return parts

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Parts, dict[str, Any]]:
        """Begin with two balls in random columns of the top row, either of which may count."""
        super().reset(seed=seed, options=options)
        self.paddle, self.last_action = self.size // 2, STAY
        self.row = 0
        self.columns = [int(column) for column in self.np_random.permutation(self.size)[:2]]
        self.wanted = int(self.np_random.integers(2))
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Parts, float, bool, bool, dict[str, Any]]:
        """Move the paddle, let the balls fall by one row."""
        self._move_paddle(int(action))
        self.row += 1
        if self.row < self.size - 1:
            return self._obs(), 0.0, False, False, {}
        caught = self.columns[self.wanted] == self.paddle
        return self._obs(), 1.0 if caught else -1.0, True, False, {"is_success": caught}


class Breakout(_Game[Array]):
    """MinAtar's Breakout, written after its description (Young & Tian, 2019, arXiv:1903.03176).

    A ball moves along diagonals, one cell per step.  Walls and bricks reflect it; a brick that is
    hit breaks and gives reward 1, and a ball that has just broken one passes over the next.  On the
    bottom row a paddle sends the ball back up: the way it came where the paddle had to move under
    it, else on to the same side.  A ball that is missed ends the game.  Once three rows of bricks
    are cleared, new ones are there when the ball comes down.

    Channels: paddle, ball, trail (where the ball was before), bricks.  With probability
    `sticky_actions` the last action is repeated.  A random player's mean return is about 0.4.
    """

    channels = 4
    _plain = ("ball", "trail", "velocity", "bricks", "just_struck")

    def __init__(self, sticky_actions: float = 0.1, image_size: int | None = None) -> None:
        super().__init__(sticky_actions, image_size)
        self.observation_space = self.image_space
        self.ball: list[int] = [3, 0]  # row, column
        self.trail: list[int] = [3, 0]
        self.velocity: list[int] = [1, 1]
        self.bricks = np.zeros((SIZE, SIZE), np.bool_)
        self.just_struck = False

    def _obs(self) -> Array:
        image = np.zeros((self.channels, SIZE, SIZE), np.uint8)
        image[0, PADDLE_ROW, self.paddle] = 255
        image[1, self.ball[0], self.ball[1]] = 255
        image[2, self.trail[0], self.trail[1]] = 255
        image[3, self.bricks] = 255
        return self._drawn(image)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin with a ball under the bricks at the left or right wall, falling inwards."""
        super().reset(seed=seed, options=options)
        self.paddle, self.last_action, self.just_struck = SIZE // 2 - 1, STAY, False
        at_right = bool(self.np_random.integers(2))
        self.ball = [3, SIZE - 1 if at_right else 0]
        self.trail = list(self.ball)
        self.velocity = [1, -1 if at_right else 1]
        self.bricks = np.zeros((SIZE, SIZE), np.bool_)
        self.bricks[BRICK_ROWS] = True
        return self._obs(), {}

    def step(self, action: Any) -> StepResult:
        """Move the paddle, then the ball."""
        self._move_paddle(int(action))
        self.trail = list(self.ball)
        row, column = self.ball[0] + self.velocity[0], self.ball[1] + self.velocity[1]
        if not 0 <= column < SIZE:
            column = self.ball[1]
            self.velocity[1] *= -1
        reward, lost = 0.0, False
        struck, self.just_struck = self.just_struck, False
        if row < 0:
            row = 0
            self.velocity[0] *= -1
        elif self.bricks[row, column]:
            self.just_struck = True
            if not struck:
                reward = 1.0
                self.bricks[row, column] = False
                row = self.ball[0]
                self.velocity[0] *= -1
        elif row == PADDLE_ROW:
            row, lost = self._at_the_paddle(column)
        self.ball = [row, column]
        return self._obs(), reward, lost, False, {}

    def _at_the_paddle(self, column: int) -> tuple[int, bool]:
        """Return the row of a ball about to reach the bottom, and whether it is lost."""
        if not self.bricks.any():
            self.bricks[BRICK_ROWS] = True
        if self.trail[1] == self.paddle:
            self.velocity[0] *= -1
        elif column == self.paddle:
            self.velocity = [-self.velocity[0], -self.velocity[1]]
        else:
            return PADDLE_ROW, True
        return self.trail[0], False


def register_games() -> None:
    """Let built-in tasks be named as `rl_training/Catch-v0` and so on."""
    own = dict.fromkeys(("Catch", "CuedCatch", "Breakout"), ("games", None))
    for name, (module, limit) in (own | ELSEWHERE).items():
        env_id = f"rl_training/{name}-v0"
        if env_id not in gym.registry:
            where = f"rl_training.envs.tasks.{module}:{name}"
            gym.register(env_id, entry_point=where, max_episode_steps=limit)

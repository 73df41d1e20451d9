"""Atari games as agents see them (Mnih et al., 2015; Machado et al., 2018, arXiv:1709.06009).

`AtariFrames` gives one frame per agent step, grey or in colour: it holds an action for some frames,
takes the larger of the last two screens at each pixel (sprites flicker), shrinks them, and begins a
game with a random number of idle steps.  `AtariLives` is for training only: a lost life ends an
episode and rewards are clipped to their sign.  Both keep their state in plain attributes, so that a
snapshot with the emulator's own state is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pydantic import BaseModel, ConfigDict, Field

from rl_training.envs.spec import AnyEnv, Array
from rl_training.envs.wrappers import area_weights

NOOP, FIRE = 0, 1


class AtariOptions(BaseModel):
    """`env_kwargs.wrappers.atari`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    noop_max: int = Field(default=30, ge=0)
    """Most idle steps at the start of a game; their number is drawn from 0 on."""
    frame_skip: int = Field(default=4, ge=1)
    """Frames for which an action is held; one agent step."""
    screen_size: int = Field(default=84, ge=36)
    """Height and width of the frames in pixels."""
    frame_stack: int = Field(default=4, ge=1)
    """Frames that an observation shows."""
    grayscale: bool = True
    """Grey frames; otherwise red, green and blue."""
    sticky_actions: bool = False
    """Let the emulator repeat the last action with probability 0.25 (Machado et al., 2018)."""
    fire_reset: bool = False
    """Press FIRE at the start of a game, and in the step that loses a life, for games that wait."""
    episodic_life: bool = True
    """End an episode at each lost life; in training only."""
    clip_reward: bool = True
    """Reduce rewards to their sign; in training only."""

    def for_evaluation(self) -> AtariOptions:
        """The same for whole games with their own scores."""
        return self.model_copy(update={"episodic_life": False, "clip_reward": False})


def emulator_kwargs(options: AtariOptions) -> dict[str, Any]:
    """What the emulator's own environment is to be made with: skipping and screens are ours."""
    repeat = 0.25 if options.sticky_actions else 0.0
    return {"frameskip": 1, "repeat_action_probability": repeat, "obs_type": "ram"}


class _Shrink:
    """Resizes screens by area; an object, so that its tables stay out of snapshots.

    A pixel covers few of the screen's, so adding these up takes less time than a matrix product,
    and none of the threads that one may start.
    """

    def __init__(self, height: int, width: int, size: int) -> None:
        self._rows = [(place, share[:, None]) for place, share in _taps(height, size)]
        self._columns = [(place, share[:, None]) for place, share in _taps(width, size)]

    def __call__(self, screen: Array) -> Array:
        """Return the frame `[size, size, C]` of a screen `[H, W]` or, in colour, `[H, W, 3]`."""
        height, width = screen.shape[:2]
        # Colours lie side by side in a row of the screen, so all are added up at once.
        tall = _weighted_sum(screen.reshape(height, -1), self._rows, 0)
        small = _weighted_sum(tall.reshape(len(tall), width, -1), self._columns, 1)
        frame: Array = np.rint(small, out=small).astype(np.uint8)
        return frame


def _weighted_sum(pixels: Array, taps: Sequence[tuple[Array, Array]], axis: int) -> Array:
    """Add up the pixels that each output pixel covers along an axis, each times its share."""
    (place, share), *rest = taps
    total: Array = pixels.take(place, axis) * share
    for place, share in rest:
        total += pixels.take(place, axis) * share
    return total


def _taps(size_in: int, size_out: int) -> list[tuple[Array, Array]]:
    """The k-th pixel that each output pixel covers, and its share, for every k."""
    weights = area_weights(size_in, size_out)
    first = (weights > 0).argmax(1)
    most = int((weights > 0).sum(1).max())
    places = np.minimum(first[:, None] + np.arange(most), size_in - 1)
    shares = np.take_along_axis(weights, places, 1)
    # Places beyond the edge repeat the last pixel, which must not count twice.
    shares[first[:, None] + np.arange(most) > size_in - 1] = 0.0
    return [(places[:, k].copy(), shares[:, k].copy()) for k in range(most)]


class AtariFrames(gym.Wrapper[Array, Any, Any, Any]):
    """One frame `[size, size, C]` per agent step."""

    def __init__(self, env: AnyEnv, options: AtariOptions) -> None:
        super().__init__(env)
        base: Any = env.unwrapped
        self._skip, self._noop_max = options.frame_skip, options.noop_max
        self._fires = options.fire_reset and base.get_action_meanings()[FIRE] == "FIRE"
        height, width = base.ale.getScreenDims()
        self._screen_shape = (height, width) if options.grayscale else (height, width, 3)
        self._shrink = _Shrink(height, width, options.screen_size)
        self._lives = 0
        size = options.screen_size
        channels = 1 if options.grayscale else 3
        self.observation_space = spaces.Box(0, 255, (size, size, channels), np.uint8)

    @property
    def lives(self) -> int:
        """Lives that are left."""
        base: Any = self.env.unwrapped
        return int(base.ale.lives())

    def _screen(self) -> Array:
        base: Any = self.env.unwrapped
        screen = np.empty(self._screen_shape, np.uint8)
        read = base.ale.getScreenRGB if screen.ndim == 3 else base.ale.getScreenGrayscale
        read(screen)
        return screen

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin a game: idle frames, and the button that starts it where one is needed."""
        _, info = self.env.reset(seed=seed, options=options)
        for _ in range(int(self.env.unwrapped.np_random.integers(self._noop_max + 1))):
            if self._ended(self.env.step(NOOP)):
                self.env.reset()
        if self._fires and self._ended(self.env.step(FIRE)):
            self.env.reset()
        self._lives = self.lives
        return self._shrink(self._screen()), info

    @staticmethod
    def _ended(step: tuple[Any, ...]) -> bool:
        return bool(step[2] or step[3])

    def step(self, action: Any) -> tuple[Array, SupportsFloat, bool, bool, dict[str, Any]]:
        """Hold an action for some frames; returns the sum of their rewards.

        Where a life was lost, FIRE is held after it: in a step of its own it would take the place
        of the agent's action, and a replay would hold what was not done.
        """
        frame, total, terminated, truncated, info = self._hold(action)
        lives = self.lives
        if self._fires and lives < self._lives and not (terminated or truncated):
            frame, more, terminated, truncated, info = self._hold(FIRE)
            total, lives = total + more, self.lives
        self._lives = lives
        return frame, total, terminated, truncated, info

    def _hold(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        total, terminated, truncated = 0.0, False, False
        info: dict[str, Any] = {}
        screen, before = None, None
        for frame in range(self._skip):
            _, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if frame >= self._skip - 2 or terminated or truncated:
                before, screen = screen, self._screen()
            if terminated or truncated:
                break
        assert screen is not None
        if before is not None:
            screen = np.maximum(screen, before)
        return self._shrink(screen), total, terminated, truncated, info


class AtariLives(gym.Wrapper[Array, Any, Any, Any]):
    """For training: a lost life ends the episode, and rewards are reduced to their sign."""

    def __init__(self, env: AnyEnv, options: AtariOptions) -> None:
        super().__init__(env)
        self._episodic, self._clip = options.episodic_life, options.clip_reward
        self._lives = 0
        self._game_over = True

    def _left(self) -> int:
        base: Any = self.env.unwrapped
        return int(base.ale.lives())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin a game, or continue with the next life by an idle step."""
        obs: Array | None = None
        info: dict[str, Any] = {}
        over = self._game_over or seed is not None
        if not over:
            obs, _, terminated, truncated, info = self.env.step(NOOP)
            over = terminated or truncated
        if over or obs is None:
            obs, info = self.env.reset(seed=seed, options=options)
        self._game_over = False
        self._lives = self._left()
        return obs, info

    def step(self, action: Any) -> tuple[Array, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step; `terminated` where a life was lost."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._game_over = terminated or truncated
        lives = self._left()
        lost = self._episodic and lives < self._lives
        self._lives = lives
        reward = float(np.sign(float(reward))) if self._clip else reward
        return obs, reward, terminated or lost, truncated, info

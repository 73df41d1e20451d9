"""Wrappers that the factory applies: pixel observations and reward transforms.

Each keeps its state in plain attributes (numbers and arrays), so a snapshot of the chain stays
exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.spec import AnyEnv, Array
from rl_training.errors import EnvError


@dataclass(frozen=True)
class RewardMap:
    """What rewards are turned into, to learn from: their sign, times `scale`, clipped."""

    to_sign: bool = False
    scale: float = 1.0
    low: float = -np.inf
    high: float = np.inf

    def __call__(self, reward: Array) -> Array:
        """Return float32 rewards of the same shape."""
        signed = np.sign(reward) if self.to_sign else np.asarray(reward, np.float64)
        clipped: Array = np.minimum(np.maximum(signed * self.scale, self.low), self.high)
        return clipped.astype(np.float32)


class RewardTransform(gym.Wrapper[Any, Any, Any, Any]):
    """Multiplies the reward by `scale`, then clips it to `[low, high]`."""

    def __init__(self, env: AnyEnv, scale: float, low: float, high: float) -> None:
        super().__init__(env)
        self._scale, self._low, self._high = scale, low, high

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step of the environment with the transformed reward."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        scaled = min(max(float(reward) * self._scale, self._low), self._high)
        return obs, scaled, terminated, truncated, info


def area_weights(size_in: int, size_out: int) -> Array:
    """Row i holds how much of each input pixel falls into output pixel i; rows sum to one."""
    edges = np.linspace(0.0, size_in, size_out + 1)
    pixel = np.arange(size_in)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    overlap = np.clip(overlap, 0.0, None)
    weights: Array = (overlap / overlap.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights  # [size_out, size_in]


class PixelObservation(gym.Wrapper[Array, Any, Any, Any]):
    """Image observations, resized by area averaging and stacked along the channels.

    The newest frame is last; after a reset all frames are the first one. Written here, not taken
    from Gymnasium, because its resize needs OpenCV and its stack adds an axis that convolutions do
    not take.
    """

    def __init__(
        self,
        env: AnyEnv,
        resize_shape: tuple[int, int] | None,
        frame_stack: int,
        channel_first: bool,
    ) -> None:
        super().__init__(env)
        space = env.observation_space
        image = isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8
        if not image:
            raise EnvError(
                "env_kwargs.wrappers.pixels needs uint8 images of shape [height, width, "
                "channels], "
                f"but the observation space is {space}"
            )
        assert space.shape is not None
        height, width, channels = space.shape
        rows, columns = resize_shape or (height, width)
        self._resize = (rows, columns) != (height, width)
        self._row_weights = area_weights(height, rows)
        self._column_weights = area_weights(width, columns)
        self._channels = channels
        self._channel_first = channel_first
        # A replay may put such stacks together itself; those with channels last it may not.
        self.frame_stack = frame_stack if channel_first else 1
        self._frames = np.zeros((rows, columns, channels * frame_stack), dtype=np.uint8)
        shape = self._arranged().shape
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def _frame(self, image: Array) -> Array:
        if not self._resize:
            return image
        # [rows, height] x [height, width * channels], then the same over the width.
        height, width, channels = image.shape
        tall = self._row_weights @ image.reshape(height, -1).astype(np.float32)
        wide = np.einsum("vw,rwc->rvc", self._column_weights, tall.reshape(-1, width, channels))
        frame: Array = np.rint(wide).astype(np.uint8)
        return frame

    def _arranged(self) -> Array:
        """The stack as the learner sees it, in memory of its own."""
        if self._channel_first:
            return self._frames.transpose(2, 0, 1).copy()
        return self._frames.copy()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin an episode; the stack is filled with its first frame."""
        obs, info = self.env.reset(seed=seed, options=options)
        repeats = self._frames.shape[2] // self._channels
        self._frames = np.tile(self._frame(obs), (1, 1, repeats))
        return self._arranged(), info

    def step(self, action: Any) -> tuple[Array, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step; the oldest frame leaves the stack."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        kept = self._frames[:, :, self._channels :]
        self._frames = np.concatenate([kept, self._frame(obs)], axis=2)
        return self._arranged(), reward, terminated, truncated, info

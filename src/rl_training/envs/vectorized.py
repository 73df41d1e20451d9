"""CartPole for many environments at once: Gymnasium's dynamics, masked resets, own generators.

Bit-identical to the same environments run one by one: every environment draws from its own
generator, seeded as in `VectorEnv`, so the mode in which environments run does not change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.spaces import MultiDiscrete

from rl_training.envs.plain import State, decode, encode
from rl_training.envs.spec import Array

CARTPOLE_IDS = ("CartPole-v0", "CartPole-v1")


class _TrustedActions(MultiDiscrete):
    """Actions that are not looked at: the learner's are indices of its own outputs."""

    def contains(self, x: Any) -> bool:  # noqa: ARG002
        """Say yes; Gymnasium's check takes a quarter of the step."""
        return True


class MaskedCartPole(CartPoleVectorEnv):
    """CartPole that never resets by itself; `reset` takes a mask."""

    state: Any  # [4, n] once reset; Gymnasium infers None from its first assignment

    def __init__(self, num_envs: int, max_episode_steps: int) -> None:
        super().__init__(num_envs=num_envs, max_episode_steps=max_episode_steps)
        self.action_space = _TrustedActions([2] * num_envs)
        self._generators: list[np.random.Generator] = []
        self._never = np.zeros(num_envs, dtype=np.bool_)

    def observations(self) -> Array:
        """The current observations, [n, 4]."""
        assert self.state is not None, "reset first"
        return np.ascontiguousarray(self.state.T, dtype=np.float32)

    def step(self, action: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """One step of all environments; ended ones wait for a masked reset."""
        obs, reward, terminated, truncated, info = super().step(action)
        self.prev_done = self._never  # what would make the next step a reset
        return np.ascontiguousarray(obs), reward, terminated, truncated, info

    def reset(
        self,
        *,
        seed: Sequence[int | None] | int | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Array, dict[str, Any]]:
        """Reset the environments of `options["reset_mask"]`, or all."""
        mask = (options or {}).get("reset_mask")
        if isinstance(seed, int):
            seed = [seed + i for i in range(self.num_envs)]
        if seed is not None:
            self._generators = [np.random.default_rng(value) for value in seed]
        if self.state is None or mask is None:
            mask = np.ones(self.num_envs, dtype=np.bool_)
            self.state = np.zeros((4, self.num_envs))
        for i in np.flatnonzero(mask):
            self.state[:, i] = self._generators[i].uniform(self.low, self.high, size=4)
        self.steps[mask] = 0
        self.prev_done = self._never
        return self.observations(), {}

    def snapshot(self) -> State:
        """State, step counters and generators."""
        return {
            "state": encode(self.state),
            "steps": encode(self.steps),
            "generators": encode(self._generators),
        }

    def restore(self, state: State) -> None:
        """Continue from a snapshot."""
        self.state = decode(state["state"])
        self.steps = decode(state["steps"])
        self._generators = decode(state["generators"])
        self.prev_done = self._never

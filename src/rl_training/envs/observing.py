"""Observations of several parts: the wrappers that make rows of them, masks of actions beside them.

The mask of allowed actions, where the task has one, is the last part.  Shapes: W entries of a
row.
"""

from __future__ import annotations

from typing import Any, Literal, SupportsFloat, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.spec import AnyEnv, Array
from rl_training.errors import EnvError, SpecMismatch
from rl_training.observations import ObservationSpec
from rl_training.spaces import MASK, action_sizes, observation_spec, space_text

MaskSource: TypeAlias = Literal["auto", "info", "off"]
METHOD = "action_masks"
"""Method of an environment that returns the mask."""
OBSERVATION = "observation"
"""Key of the task's own observation where the mask is beside it."""


def with_rows(env: AnyEnv, env_id: str, masks: MaskSource = "auto") -> AnyEnv:
    """Wrap an environment whose observations are of several parts, so that it gives rows.

    Args:
        env: The environment.
        env_id: How messages call it.
        masks: Where the mask of allowed actions comes from: `auto` takes the key `action_mask` of
            the observation or the method `action_masks` of the environment, `info` takes
            `info["action_mask"]`, `off` takes none, so that such a key is an ordinary part.

    Raises:
        SpecMismatch: The space, or a part of it, is of a kind that cannot be used.
    """
    sizes = action_sizes(env.action_space)
    beside = masks == "info" or (masks == "auto" and _has_masks(env, env_id))
    if masks == "info" and not sizes:
        raise SpecMismatch(
            f"environment {env_id}: env_kwargs.wrappers.action_mask is info, but its action space "
            f"{space_text(env.action_space)} is not of discrete actions; remove the key"
        )
    if beside:
        env = MaskBeside(env, sizes, by_method=masks == "auto")
    space = env.observation_space
    if isinstance(space, spaces.Box):
        return env
    return Rows(env, observation_spec(space, env_id, () if masks == "off" else sizes))


def _has_masks(env: AnyEnv, env_id: str) -> bool:
    """Whether the environment has the method, and does not show its mask already."""
    if isinstance(env.observation_space, spaces.Dict) and MASK in env.observation_space.spaces:
        return False
    if not env.has_wrapper_attr(METHOD):
        return False
    if not action_sizes(env.action_space):
        raise SpecMismatch(
            f"environment {env_id} has a method {METHOD}, but its action space "
            f"{space_text(env.action_space)} is not of discrete actions; set "
            "env_kwargs.wrappers.action_mask to off"
        )
    return True


class MaskBeside(gym.Wrapper[Any, Any, Any, Any]):
    """Puts the mask of allowed actions beside the observation: a Dict of both."""

    def __init__(self, env: AnyEnv, sizes: tuple[int, ...], *, by_method: bool) -> None:
        """Wrap an environment.

        Args:
            env: The environment.
            sizes: Numbers of values of the parts of its actions.
            by_method: Ask its method for the mask, in place of looking into the info.
        """
        super().__init__(env)
        self._sizes, self._by_method = sizes, by_method
        mask = spaces.MultiBinary(sum(sizes))
        self.observation_space = spaces.Dict({OBSERVATION: env.observation_space, MASK: mask})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(obs, info), info

    def step(self, action: Any) -> tuple[dict[str, Any], SupportsFloat, bool, bool, dict[str, Any]]:
        """One step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(obs, info), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: dict[str, Any]) -> dict[str, Any]:
        if self._by_method:
            where, given = f"its method {METHOD}", self.env.get_wrapper_attr(METHOD)()
        else:
            keys = ", ".join(map(repr, info)) or "nothing"
            where, given = f"an info with {keys}", info.get(MASK)
        if given is None:
            key = "" if self._by_method else f" (the key {MASK!r})"
            raise EnvError(
                f"{where} gives no mask of actions{key}, but every reset and step must give one; "
                "without masks, set env_kwargs.wrappers.action_mask to off"
            )
        return {OBSERVATION: obs, MASK: self._joined(given, where)}

    def _joined(self, given: Any, where: str) -> Array:
        """Return a mask as one array; of an action of several parts it may be one for each."""
        if isinstance(given, tuple | list) and len(given) == len(self._sizes) > 1:
            given = np.concatenate([_as_array(part, where).reshape(-1) for part in given])
        mask = _as_array(given, where).reshape(-1)
        if mask.size != sum(self._sizes):
            raise EnvError(
                f"{where} gives a mask of {mask.size} entries, but its action space "
                f"{space_text(self.env.action_space)} needs {sum(self._sizes)}, one for each value"
            )
        return mask


def _as_array(given: Any, where: str) -> Array:
    """Return the entries of a mask.

    Raises:
        EnvError: They are not numbers.
    """
    try:
        mask = np.asarray(given)
    except ValueError:  # rows of different lengths
        mask = np.empty((), object)
    if mask.dtype.kind not in "biuf":
        raise EnvError(f"the mask of {where} must be zeros and ones, got {str(given)[:80]}")
    return mask


class Rows(gym.Wrapper[Array, Any, Any, Any]):
    """Turns observations of several parts into rows `[W]`."""

    def __init__(self, env: AnyEnv, parts: ObservationSpec) -> None:
        super().__init__(env)
        self.observation_parts = parts
        low, high = (0, 255) if parts.in_bytes else (-np.inf, np.inf)
        dtype: Any = parts.dtype.type
        self.observation_space = spaces.Box(low, high, (parts.width,), dtype)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self.observation_parts.pack(obs), info

    def step(self, action: Any) -> tuple[Array, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step; at the end of an episode no action is left, and the mask is of no account."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        row = self.observation_parts.pack(obs, ended=bool(terminated or truncated))
        return row, reward, terminated, truncated, info

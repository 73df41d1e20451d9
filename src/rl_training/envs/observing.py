"""Observations of several parts: what a space holds, and the wrapper that makes rows of them.

A space that is not a plain Box becomes an `ObservationSpec`: Dict and Tuple, nested at will, of
Box, Discrete, MultiDiscrete and MultiBinary.  The mask of allowed actions, where the task has one,
becomes the last part.  Shapes: W entries of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, SupportsFloat, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.spec import AnyEnv, Array, action_sizes
from rl_training.errors import EnvError, SpecMismatch
from rl_training.observations import MOST_LEAVES, LeafSpec, ObservationSpec

MaskSource: TypeAlias = Literal["auto", "info", "off"]
MASK = "action_mask"
"""Key of the mask in a Dict observation and in infos."""
METHOD = "action_masks"
"""Method of an environment that returns the mask."""
OBSERVATION = "observation"
"""Key of the task's own observation where the mask is beside it."""
MOST_VALUES = 65_536
"""Values of a whole number, beyond which the table of its embedding costs too much."""
MOST_ONE_HOT = 512
"""Values of a discrete part up to which a row holds it one-hot; beyond, networks embed it."""


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
            f"{env.action_space} is not of discrete actions; remove the key"
        )
    if beside:
        env = MaskBeside(env, sizes, env_id)
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
            f"environment {env_id} has a method {METHOD}, but its action space {env.action_space} "
            "is not of discrete actions; set env_kwargs.wrappers.action_mask to off"
        )
    return True


class MaskBeside(gym.Wrapper[Any, Any, Any, Any]):
    """Puts the mask of allowed actions beside the observation: a Dict of both.

    The mask comes from the environment's method where it has one, else from the info.
    """

    def __init__(self, env: AnyEnv, sizes: tuple[int, ...], env_id: str) -> None:
        super().__init__(env)
        self._size, self._label = sum(sizes), env_id
        self._by_method = env.has_wrapper_attr(METHOD)
        mask = spaces.MultiBinary(self._size)
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
        given = self.env.get_wrapper_attr(METHOD)() if self._by_method else info.get(MASK)
        if given is None:
            raise EnvError(
                f"environment {self._label}: env_kwargs.wrappers.action_mask is info, but an info "
                f"has no {MASK!r} (it has {', '.join(map(repr, info)) or 'nothing'}); every reset "
                "and step must give one"
            )
        mask = np.asarray(given).reshape(-1)
        if mask.shape != (self._size,):
            raise EnvError(
                f"environment {self._label}: its action mask has {mask.size} entries, but its "
                f"action space {self.env.action_space} needs {self._size}, one for each value"
            )
        return {OBSERVATION: obs, MASK: mask}


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


def observation_spec(
    space: spaces.Space[Any], env_id: str, mask_sizes: tuple[int, ...] = ()
) -> ObservationSpec:
    """Return the parts of a space.

    Args:
        space: Of observations.
        env_id: How messages call the environment.
        mask_sizes: Numbers of values of the parts of its actions: the key `action_mask` of a Dict
            holds a mask if it has as many entries. Without any, no part is taken for a mask.

    Raises:
        SpecMismatch: Naming the part that cannot be used, and what can.
    """
    leaves = list(_leaves(space, (), env_id))
    if len(leaves) > MOST_LEAVES:
        raise SpecMismatch(
            f"environment {env_id}: its observation has {len(leaves)} parts, more than the "
            f"{MOST_LEAVES} that can be used; join some of them"
        )
    masks = [leaf for leaf in leaves if mask_sizes and _is_mask(leaf, sum(mask_sizes))]
    others = [leaf for leaf in leaves if leaf not in masks]
    marked = [leaf.model_copy(update={"kind": "mask", "sizes": mask_sizes}) for leaf in masks]
    if not others:
        raise SpecMismatch(
            f"environment {env_id}: its observation holds nothing but a mask of actions; a policy "
            "needs something to go by"
        )
    return ObservationSpec(leaves=(*others, *marked))


def _is_mask(leaf: LeafSpec, size: int) -> bool:
    return leaf.path == (MASK,) and math.prod(leaf.shape) == size and not leaf.is_discrete


def _leaves(space: spaces.Space[Any], path: tuple[str, ...], env_id: str) -> Iterator[LeafSpec]:
    """Yield the parts of a space in its order."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaves(part, (*path, str(key)), env_id)
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _leaves(part, (*path, str(index)), env_id)
    else:
        yield _leaf(space, path, env_id)


def _called(path: tuple[str, ...]) -> str:
    return f"part {'/'.join(path)!r} of its observation space" if path else "its observation space"


def _leaf(space: spaces.Space[Any], path: tuple[str, ...], env_id: str) -> LeafSpec:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        sizes = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        if sizes.max() > MOST_VALUES:
            raise SpecMismatch(
                f"environment {env_id}: {_called(path)} is {space}, but of whole numbers at most "
                f"{MOST_VALUES:,} values can be told apart; give them as numbers in a Box"
            )
        return LeafSpec(
            path=path,
            kind="one_hot" if sizes.sum() <= MOST_ONE_HOT else "index",
            shape=sizes.shape,
            dtype=str(space.dtype),
            sizes=tuple(sizes.ravel().tolist()),
            starts=tuple(np.asarray(space.start).ravel().tolist()),
        )
    if isinstance(space, spaces.MultiBinary):
        return LeafSpec(path=path, kind="flags", shape=space.shape, dtype=str(space.dtype))
    numbers = isinstance(space, spaces.Box) and np.dtype(space.dtype).kind in "fiub"
    if not numbers or 0 in (space.shape or ()):
        raise SpecMismatch(
            f"environment {env_id}: {_called(path)} is {space}, which cannot be used; allowed are "
            "Box of numbers, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these; "
            "leave the part out with a wrapper (env_kwargs.wrappers), or turn it into one of them"
        )
    shape = space.shape or ()
    image = len(shape) == 3
    return LeafSpec(
        path=path,
        kind="image" if image else "numbers",
        shape=shape,
        dtype=str(space.dtype),
        channels_last=image and shape[2] < shape[0] and shape[2] <= 16,
    )

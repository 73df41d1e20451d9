"""What a Gymnasium space holds: the parts of observations, and how many values actions have.

A space of observations that is not a plain Box becomes an `ObservationSpec`: Dict and Tuple, nested
at will, of Box, Discrete, MultiDiscrete and MultiBinary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_training.errors import SpecMismatch
from rl_training.observations import MOST_LEAVES, LeafSpec, ObservationSpec

MASK = "action_mask"
"""Key of the mask in a Dict observation and in infos."""
MOST_VALUES = 65_536
"""Values of a whole number, beyond which the table of its embedding costs too much."""
MOST_ONE_HOT = 512
"""Values of a discrete part up to which a row holds it one-hot; beyond, networks embed it."""
LONGEST_TEXT = 200
"""Characters of a space in a message."""


def observation_spec(
    space: spaces.Space[Any], env_id: str, mask_sizes: tuple[int, ...] = ()
) -> ObservationSpec:
    """Return the parts of a space.

    Args:
        space: Of observations.
        env_id: How messages call the environment.
        mask_sizes: Numbers of values of the parts of its actions: the key `action_mask` of a Dict
            holds a mask of them. Without any, no part is taken for a mask.

    Raises:
        SpecMismatch: Naming the part that cannot be used, and what can.
    """
    leaves = list(_leaves(space, (), env_id))
    names = [leaf.name for leaf in leaves]
    if not leaves:
        raise SpecMismatch(
            f"environment {env_id}: its observation space {space_text(space)} has no part; a "
            "policy needs something to go by"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SpecMismatch(
            f"environment {env_id}: two parts of its observation space are called {twice!r}; leave "
            "the slash out of the keys of its Dict spaces"
        )
    if len(leaves) > MOST_LEAVES:
        raise SpecMismatch(
            f"environment {env_id}: its observation has {len(leaves)} parts, more than the "
            f"{MOST_LEAVES} that can be used; join some of them"
        )
    masks = [leaf for leaf in leaves if mask_sizes and leaf.path == (MASK,)]
    for leaf in masks:
        _require_mask(leaf, sum(mask_sizes), env_id)
    others = [leaf for leaf in leaves if leaf not in masks]
    marked = [leaf.model_copy(update={"kind": "mask", "sizes": mask_sizes}) for leaf in masks]
    if not others:
        raise SpecMismatch(
            f"environment {env_id}: its observation holds nothing but a mask of actions; a policy "
            "needs something to go by"
        )
    return ObservationSpec(leaves=(*others, *marked))


def _require_mask(leaf: LeafSpec, size: int, env_id: str) -> None:
    """Refuse a part that has the name of the mask and cannot be one.

    Raises:
        SpecMismatch: Saying what it is, and what it must be.
    """
    entries = math.prod(leaf.shape)
    if entries != size or leaf.is_discrete:
        kind = "whole numbers" if leaf.is_discrete else "entries"
        raise SpecMismatch(
            f"environment {env_id}: {_called(leaf.path)} has {entries} {kind}, but a mask of its "
            f"actions needs {size} zeros and ones, one for each value (MultiBinary({size})); if it "
            "is not a mask, set env_kwargs.wrappers.action_mask to off"
        )


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
                f"environment {env_id}: {_called(path)} is {space_text(space)}, but of whole "
                f"numbers at most {MOST_VALUES:,} values can be told apart; give them as "
                "numbers in a Box"
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
            f"environment {env_id}: {_called(path)} is {space_text(space)}, which cannot be used; "
            "allowed are Box of numbers, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple "
            "of these; leave the part out with a wrapper (env_kwargs.wrappers), or turn it into "
            "one of them"
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


def action_sizes(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the numbers of values of the parts of counted actions; empty for all others."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(np.ravel(space.nvec).tolist())
    return (2,) * math.prod(space.shape) if isinstance(space, spaces.MultiBinary) else ()


def space_text(space: spaces.Space[Any]) -> str:
    """Write a space into a sentence: on one line, and not at any length."""
    text = " ".join(str(space).split())
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."

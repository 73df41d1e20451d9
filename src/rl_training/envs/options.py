"""`env_kwargs.wrappers`: what it may hold, and what of it is for learning alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_training.envs.atari import AtariOptions
from rl_training.envs.wrappers import RewardMap
from rl_training.errors import ConfigError
from rl_training.validation import Number

_WRAPPER_KEYS = (
    "chain (a list of wrappers), pixels (resize_shape, frame_stack, channel_first), atari, "
    "reward_scale and clip_reward"
)


Side = Annotated[int, Field(ge=1, le=4096)]
"""Pixels; beyond this, one picture would fill the memory."""


class PixelOptions(BaseModel):
    """`env_kwargs.wrappers.pixels`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resize_shape: tuple[Side, Side] | None = None
    """Height and width in pixels; None keeps the size."""
    frame_stack: int = Field(default=1, ge=1, le=1_000)
    """Frames stacked along the channels; 1 is no stacking."""
    channel_first: bool = True
    """Channels before height and width, as PyTorch convolutions want them."""


class WrapperOptions(BaseModel):
    """`env_kwargs.wrappers`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chain: tuple[Any, ...] = ()
    """Wrappers around the environment itself, the first one innermost; see `chain.wrapped_by`."""
    pixels: PixelOptions | None = None
    reward_scale: Number = 1.0
    clip_reward: bool | tuple[float, float] = False
    atari: AtariOptions | None = None

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """What rewards are clipped to; infinite without clipping."""
        if isinstance(self.clip_reward, tuple):
            return self.clip_reward
        return (-1.0, 1.0) if self.clip_reward else (-np.inf, np.inf)


def as_mapping(raw: object) -> object:
    """Return `env_kwargs.wrappers` as a mapping, which a list is short for: its key `chain`."""
    if raw is None:
        return {}
    return {"chain": list(raw)} if isinstance(raw, list | tuple) else raw


def wrapper_options(env_id: str, raw: object) -> WrapperOptions:
    """Check `env_kwargs.wrappers`.

    Raises:
        ConfigError: It holds something that there is not, or that does not go together.
    """
    given = as_mapping(raw)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"env_kwargs.wrappers of {env_id} must be a list of wrappers or a mapping, got "
            f"{raw!r}; allowed keys are {_WRAPPER_KEYS}"
        )
    try:
        options = WrapperOptions.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"env_kwargs.wrappers.{where} of {env_id}: {first['msg']} (value {first['input']!r}); "
            f"allowed keys are {_WRAPPER_KEYS}"
        ) from None
    if options.atari is not None and (options.pixels is not None or not is_atari(env_id)):
        raise ConfigError(
            f"env_kwargs.wrappers.atari of {env_id} is for games named ALE/..., and not beside "
            "wrappers.pixels; remove one of the keys"
        )
    return options


def is_atari(env_id: str) -> bool:
    """Whether the id is that of an Atari game."""
    return env_id.startswith("ALE/")


def evaluation_kwargs(env_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same environment without what is for training only: its own reward, whole Atari games."""
    return _with_atari(with_task_reward(env_kwargs), episodic_life=False)


def with_task_reward(env_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same environment paying its own reward: without those wrappers that change it."""
    kwargs = _with_atari(env_kwargs, clip_reward=False)
    wrappers = as_mapping(kwargs.get("wrappers"))
    if wrappers and isinstance(wrappers, Mapping):
        changes = ("reward_scale", "clip_reward")
        kwargs["wrappers"] = {key: value for key, value in wrappers.items() if key not in changes}
    return kwargs


def learning_reward(env_id: str, env_kwargs: Mapping[str, Any]) -> RewardMap | None:
    """What the wrappers make of the task's own reward; None where they leave it as it is.

    Raises:
        ConfigError: `wrappers` holds something that there is not.
    """
    options = wrapper_options(env_id, env_kwargs.get("wrappers"))
    to_sign = options.atari is not None and options.atari.clip_reward
    low, high = options.reward_bounds
    transform = RewardMap(to_sign, options.reward_scale, low, high)
    return None if transform == RewardMap() else transform


def _with_atari(env_kwargs: Mapping[str, Any], **options: bool) -> dict[str, Any]:
    """Change options of `wrappers.atari`, where there are any."""
    kwargs = dict(env_kwargs)
    wrappers = kwargs.get("wrappers")
    if isinstance(wrappers, Mapping) and isinstance(wrappers.get("atari"), Mapping):
        kwargs["wrappers"] = dict(wrappers) | {"atari": dict(wrappers["atari"]) | options}
    return kwargs

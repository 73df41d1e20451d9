"""`env_kwargs.wrappers`: what it may hold, what of it is for learning alone, and its list `chain`.

The wrappers of `chain` are Gymnasium's by name, or the user's as `module:Class`.  They are part of
the task, as its id is, and are treated like it: whoever runs the task imports the module that a
name leads to, and only subclasses of `gymnasium.Wrapper` are called.  What is handed over in
Python, a class or a function of an environment, is remembered in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import gymnasium as gym
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_training.envs.atari import AtariOptions
from rl_training.envs.given import PREFIX
from rl_training.envs.named_modules import import_named
from rl_training.envs.observing import MaskSource
from rl_training.envs.spec import AnyEnv
from rl_training.envs.wrappers import RewardMap
from rl_training.errors import ConfigError, EnvError, RLTrainingError, described
from rl_training.validation import Number, suggest

_WRAPPER_KEYS = (
    "chain (a list of wrappers), pixels (resize_shape, frame_stack, channel_first), atari, "
    "action_mask, reward_scale and clip_reward"
)
Wrap: TypeAlias = Callable[..., AnyEnv]
"""A class of wrappers, or a function that wraps an environment."""
WrapperLike: TypeAlias = str | Wrap | Mapping[str, Any]
"""A name, a class, a function, or a mapping of a `name` and arguments."""
_OWN = "gymnasium.wrappers"
_NOT_HERE = {
    "Autoreset": "episodes begin again by themselves here",
    "HumanRendering": "`rl-training watch` shows a policy",
    "NormalizeObservation": "its statistics would be in no checkpoint; the setting "
    "normalize_observations keeps them with the policy",
    "NormalizeReward": "its statistics would be in no checkpoint; the setting normalize_rewards "
    "keeps them with the learner",
    "RecordVideo": "`rl-training record` makes videos",
    "vector": "single environments are wrapped, whatever runs them",
}
"""Names in Gymnasium's module that are refused, and why."""
_given: dict[str, Wrap] = {}


Side = Annotated[int, Field(ge=1, le=4096)]
"""Pixels; beyond this, one picture would fill the memory."""


class PixelOptions(BaseModel):
    """`env_kwargs.wrappers.pixels`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resize_shape: tuple[Side, Side] | None = None
    """Height and width in pixels; None keeps the size."""
    frame_stack: int = Field(default=1, ge=1, le=1_000)
    """Frames stacked along the channels; 1 does not stack."""
    channel_first: bool = True
    """Channels before height and width, as PyTorch convolutions want them."""


class WrapperOptions(BaseModel):
    """`env_kwargs.wrappers`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chain: tuple[Any, ...] = ()
    """Wrappers around the environment itself, the first one innermost; see `wrapped_by`."""
    pixels: PixelOptions | None = None
    reward_scale: Number = 1.0
    clip_reward: bool | tuple[float, float] = False
    atari: AtariOptions | None = None
    action_mask: MaskSource = "auto"
    """Where the mask of allowed actions comes from, see `with_rows`."""

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
        raise ConfigError(_mistake(env_id, error)) from None
    if options.atari is not None and (options.pixels is not None or not is_atari(env_id)):
        raise ConfigError(
            f"env_kwargs.wrappers.atari of {env_id} is for games named ALE/..., and not beside "
            "wrappers.pixels; remove one of the keys"
        )
    return options


def _mistake(env_id: str, error: ValidationError) -> str:
    """Say what is wrong with the first key that is, and which are allowed where it is."""
    first = error.errors()[0]
    where, last = ".".join(map(str, first["loc"])), str(first["loc"][-1])
    sections: dict[str, type[BaseModel]] = {"atari": AtariOptions, "pixels": PixelOptions}
    section = sections.get(str(first["loc"][0]), WrapperOptions)
    section = section if len(first["loc"]) > 1 else WrapperOptions
    keys = _WRAPPER_KEYS if section is WrapperOptions else ", ".join(section.model_fields)
    what = f": {first['msg']} (value {first['input']!r})"
    if first["type"] == "extra_forbidden":
        what = f" is not a key{suggest(last, section.model_fields)}"
    return f"env_kwargs.wrappers.{where} of {env_id}{what}; allowed keys are {keys}"


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


def named_chain(chain: object) -> object:
    """Return wrappers as a run remembers them: what is handed over in Python by its name.

    Anything else stays as it is; `wrapped_by` says what is wrong with it.
    """
    if not isinstance(chain, Sequence) or isinstance(chain, str):
        return chain
    return [_named(entry) for entry in chain]


def _named(entry: object) -> object:
    if isinstance(entry, Mapping) and callable(entry.get("name")):
        return dict(entry) | {"name": _name_of(entry["name"])}
    return _name_of(entry) if callable(entry) else entry


def _name_of(wrap: Wrap) -> str:
    module = getattr(wrap, "__module__", "__main__")
    own = getattr(wrap, "__qualname__", type(wrap).__name__)
    found = getattr(sys.modules.get(_OWN), own, None)
    if found is wrap:
        return own
    if module != "__main__" and getattr(sys.modules.get(module), own, None) is wrap:
        name = f"{module}:{own}"
    else:
        plain = PREFIX + own.rpartition(".")[2].strip("<>")
        name, number = plain, 1
        while _given.get(name, wrap) is not wrap:
            number += 1
            name = f"{plain}-{number}"
    _given[name] = wrap
    return name


def wrapped_by(env: AnyEnv, chain: Sequence[object], env_id: str) -> AnyEnv:
    """Put wrappers around an environment, the first one innermost.

    Raises:
        ConfigError: For a wrapper that there is not, or arguments that it does not take.
        EnvError: When one fails, or is none.
    """
    for index, entry in enumerate(chain):
        where = f"env_kwargs.wrappers[{index}] of {env_id}"
        name, arguments = _parts(entry, where)
        wrap = _find(name, where)
        try:
            outer: object = wrap(env, **arguments)
        except RLTrainingError:
            raise
        except TypeError as error:
            raise ConfigError(f"{where}: {name} does not take {arguments}: {error}") from error
        except (Exception, SystemExit) as error:
            raise EnvError(
                f"{where}: {name} could not wrap it with {arguments}: {described(error)}"
            ) from error
        if not isinstance(outer, gym.Env):
            raise EnvError(f"{where}: {name} gave {type(outer).__name__}, not a gymnasium.Env")
        env = outer
    return env


def _parts(entry: object, where: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a wrapper and its arguments."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
        return entry["name"], {key: value for key, value in entry.items() if key != "name"}
    raise ConfigError(
        f"{where} must be a name, such as FlattenObservation, or a mapping of a name and "
        f"arguments, such as {{name: TimeAwareObservation, flatten: true}}, got {entry!r}"
    )


def _find(name: str, where: str) -> Wrap:
    if name in _given:
        return _given[name]
    if name.startswith(PREFIX):
        raise EnvError(
            f"{where}: {name} was handed over in Python, and this process does not have it; load "
            "the agent in Python with wrappers=[...], or name a class as module:Class"
        )
    if ":" in name:
        return _own_class(name, where)
    if name in _NOT_HERE:
        raise ConfigError(f"{where}: {name} cannot be used: {_NOT_HERE[name]}; leave it out")
    known = [word for word in gym.wrappers.__all__ if word not in _NOT_HERE]
    if name not in known:
        raise ConfigError(
            f"{where}: {name!r} is not a wrapper of Gymnasium{suggest(name, known)}; one of your "
            "own is named as module:Class"
        )
    found: Wrap = getattr(gym.wrappers, name)
    return found


def _own_class(name: str, where: str) -> Wrap:
    """Return the class that `module:Class` names; nothing else is ever called."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"{where}: {name!r} is not of the form module:Class")
    found = vars(import_named(module_name, f"{where} {name}")).get(attribute)
    if not (isinstance(found, type) and issubclass(found, gym.Wrapper)):
        what = "missing" if found is None else "not a subclass of gymnasium.Wrapper"
        raise EnvError(
            f"{where}: {name} is {what} and was not called; write a class derived from "
            "gymnasium.Wrapper, or hand a function over in Python"
        )
    return found

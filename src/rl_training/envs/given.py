"""Environments that were handed over in Python, as an object, a class or a function.

A run names its environment by a text. One that has no name of its own gets `python:Name`, which
means something in this process alone: nothing is imported or run for it, and another process must
be given the environment again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym

from rl_training.envs.several_agents import refuse_several_agents
from rl_training.envs.spec import AnyEnv
from rl_training.errors import ConfigError, EnvError

PREFIX = "python:"
EnvLike: TypeAlias = str | AnyEnv | type[AnyEnv] | Callable[..., AnyEnv]
"""An id, an environment, a class of environments, or a function that makes one."""


@dataclass(frozen=True)
class Given:
    """What was handed over: one environment, or how to make any number."""

    make: Callable[..., AnyEnv] | None = None
    env: AnyEnv | None = None


_known: dict[str, Given] = {}
_itself = [False]
"""Whether the object itself is asked for, and not a copy of it."""


class Borrowed(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that belongs to somebody else, who closes it."""

    def close(self) -> None:
        """Leave it open."""


def is_given(env_id: str) -> bool:
    """Whether an id is that of an environment handed over in Python."""
    return env_id.startswith(PREFIX)


def is_object(env_id: str) -> bool:
    """Whether it was handed over as an object, so that there is one of it."""
    return env_id in _known and _known[env_id].env is not None


def name_of(env: EnvLike, env_id: str | None = None) -> str:
    """Return the id by which a run names an environment.

    Args:
        env: The environment in any form.
        env_id: The id to use, where a run has named it already.

    Raises:
        ConfigError: When it is none of these forms.
        EnvError: When it is a task of several agents.
    """
    if isinstance(env, str):
        return env
    if isinstance(env, type) and issubclass(env, gym.Env):
        importable = f"{env.__module__}:{env.__qualname__}"
        if env_id in (None, importable) and _is_importable(env):
            return importable
        given, name = Given(make=env), env.__name__
    elif isinstance(env, gym.Env):
        given, name = Given(env=env), type(env.unwrapped).__name__
    elif callable(env) and not isinstance(env, type):
        given, name = Given(make=env), getattr(env, "__name__", type(env).__name__)
    else:
        refuse_several_agents(env, getattr(env, "__name__", type(env).__name__))
        raise ConfigError(
            "env must be an id such as 'CartPole-v1', a gymnasium.Env, a class of them, or a "
            f"function that makes one, got {env!r}"
        )
    if env_id is None:
        env_id = _free_name(PREFIX + name.strip("<>"), given)
    _known[env_id] = given
    return env_id


def _is_importable(env: type[AnyEnv]) -> bool:
    """Whether another process finds the class by its name, unlike one of a notebook or script."""
    module = sys.modules.get(env.__module__)
    return env.__module__ != "__main__" and getattr(module, env.__qualname__, None) is env


def _free_name(name: str, given: Given) -> str:
    found, number = name, 1
    while found in _known and _known[found] != given:
        number += 1
        found = f"{name}-{number}"
    return found


@contextmanager
def stepped_itself() -> Iterator[None]:
    """Ask for the object itself within: training steps it as it is, all others step copies."""
    _itself[0] = True
    try:
        yield
    finally:
        _itself[0] = False


def make_given(env_id: str, kwargs: dict[str, Any]) -> AnyEnv:
    """Return the environment of an id `python:Name`.

    Raises:
        EnvError: When this process was not given it, or it cannot be copied.
        ConfigError: When an object is given keywords, which it cannot take any more.
    """
    given = _known.get(env_id)
    if given is None:
        raise EnvError(
            f"environment {env_id} was handed over in Python, and this process does not have it; "
            "load the agent in Python with env=..., or name the environment as module:Class"
        )
    if given.env is None:
        assert given.make is not None
        env: object = given.make(**kwargs)
        if not isinstance(env, gym.Env):
            refuse_several_agents(env, env_id)
            raise EnvError(
                f"environment {env_id}: the function gave {type(env).__name__}, not a gymnasium.Env"
            )
        return env
    if kwargs:
        raise ConfigError(
            f"env_kwargs {sorted(kwargs)} cannot be given to {env_id}, which is made already; give "
            "a function that makes it"
        )
    return Borrowed(given.env if _itself[0] else _copy_of(env_id, given.env))


def _copy_of(env_id: str, env: AnyEnv) -> AnyEnv:
    """Return a copy to try, evaluate or record: the object itself belongs to training."""
    try:
        return copy.deepcopy(env)
    except Exception as error:
        if env.spec is not None:
            return gym.make(env.spec)
        raise EnvError(
            f"environment {env_id} cannot be copied ({type(error).__name__}: {error}), and the "
            "task is tried and evaluated on copies; give a function that makes it"
        ) from error

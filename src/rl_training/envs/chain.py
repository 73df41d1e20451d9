"""Wrappers around a task that a run asks for: Gymnasium's by name, the user's as `module:Class`.

They are part of the task, as its id is, and are treated like it: whoever runs the task imports the
module that a name leads to, and only subclasses of `gymnasium.Wrapper` are called.  What is handed
over in Python, a class or a function of an environment, is remembered in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym

from rl_training.envs.given import PREFIX
from rl_training.envs.named_modules import import_named
from rl_training.envs.spec import AnyEnv
from rl_training.errors import ConfigError, EnvError, RLTrainingError, described
from rl_training.validation import suggest

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

"""Encoders of the user's own, `module:function`: whose name is followed, and how one is built.

Calling a function that a file names makes the file a program.  So a function is called only when
the user has handed it over in Python, or has named it: in a configuration, or with `--plugin`.  A
name that a checkpoint brings along finds it among those; nothing is imported for it.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rl_training.envs.named_modules import import_named
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError, RLTrainingError
from rl_training.models.own_encoder import EncoderFunction, StackedEncoder
from rl_training.rng import Rng
from rl_training.validation import Settings

IN_PYTHON = "python:"
"""Before the name of a function that another process cannot import."""
_known: dict[str, EncoderFunction] = {}


class EncoderNotGivenError(RLTrainingError, LookupError):
    """An encoder that a file names, and that the user has not."""


def name_encoder(function: EncoderFunction) -> str:
    """Return the name of a function handed over in Python, and remember what it stands for."""
    module = getattr(function, "__module__", "__main__")
    own = getattr(function, "__qualname__", type(function).__name__)
    importable = getattr(sys.modules.get(module), own, None) is function and module != "__main__"
    name = f"{module}:{own}" if importable else _free_name(_plain_name(own), function)
    _known[name] = function
    return name


def give_encoder(function: EncoderFunction) -> None:
    """Remember a function under every name that a run of it may have, for a run to be loaded.

    Raises:
        ConfigError: When it cannot be called.
    """
    if not callable(function):
        raise ConfigError(
            f"encoder must be the function that makes a torch.nn.Module, got {function!r}"
        )
    name_encoder(function)
    own = getattr(function, "__qualname__", type(function).__name__)
    _known[_plain_name(own)] = function


def _plain_name(own: str) -> str:
    return IN_PYTHON + own.rpartition(".")[2].strip("<>")


def _free_name(plain: str, function: EncoderFunction) -> str:
    name, number = plain, 1
    while _known.get(name, function) is not function:
        number += 1
        name = f"{plain}-{number}"
    return name


def import_encoder(name: str) -> None:
    """Import the function that the user names as `module:function`, and remember it.

    Raises:
        ConfigError: When the module does not exist, or has no such function.
    """
    if name in _known or name.startswith(IN_PYTHON):
        return
    module_name, _, attribute = name.partition(":")
    module = import_named(module_name, f"encoder {name}", ConfigError)
    function = vars(module).get(attribute)
    if not callable(function):
        what = "is missing" if function is None else f"is a {type(function).__name__}"
        raise ConfigError(
            f"encoder {name} {what}; name a function that takes the shape of an observation and "
            "returns a torch.nn.Module"
        )
    _known[name] = function


def encoder_of(config: Settings) -> str | None:
    """Return the name of the user's encoder; None where the settings ask for none."""
    name: str | None = getattr(config, "encoder", None)
    return name if name is not None and ":" in name else None


def import_encoder_of(config: Settings) -> None:
    """Import the encoder that the user's own settings name, where they do."""
    name = encoder_of(config)
    if name is not None:
        import_encoder(name)


def own_encoder(env: EnvSpec, name: str, rng: Rng) -> StackedEncoder:
    """Build the user's encoder for a task.

    Raises:
        EncoderNotGivenError: When the user has neither named nor given it.
        SpecMismatch: When it is none that can be trained here.
    """
    if name not in _known:
        advice = (
            "give it again in Python: load(path, encoder=...)"
            if name.startswith(IN_PYTHON)
            else f"if you trust it, run `rl-training --plugin {name} ...`, or give the function in "
            "Python: load(path, encoder=...)"
        )
        raise EncoderNotGivenError(
            f"encoder {name!r} is a function that is not loaded, and a file may not load one; "
            f"{advice}"
        )
    return StackedEncoder(_known[name], env.obs_shape, env.obs_dtype, rng, name, env.observation)


_NAME = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_-]*$"


def _checked(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise PydanticCustomError("own_encoder", "Input should be module:function")
    return name


OwnEncoder = Annotated[
    str,
    Field(json_schema_extra={"pattern": _NAME}),
    BeforeValidator(lambda value: name_encoder(value) if callable(value) else value),
    AfterValidator(_checked),
]
"""`module:function`, or the function itself in Python."""

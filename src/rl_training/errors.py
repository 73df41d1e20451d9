"""The errors a user can cause.

Every message answers, in one sentence: what is wrong, where, which value, what is allowed, what to
do next. The command line prints such an error without a traceback and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RLTrainingError(Exception):
    """Base of every error that is the user's to mend."""


class ConfigError(RLTrainingError, ValueError):
    """A configuration key, type or value that cannot be used."""


class EnvError(RLTrainingError, ValueError):
    """An environment that cannot be made, or breaks Gymnasium's contract."""


class DataError(RLTrainingError, ValueError):
    """A dataset or batch that cannot be used."""


class SpecMismatch(RLTrainingError, ValueError):
    """An algorithm and a task (or a checkpoint and a task) that do not fit together."""


class CheckpointError(RLTrainingError, RuntimeError):
    """A checkpoint that is missing, damaged, or of another kind than expected."""


class MissingExtraError(RLTrainingError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""


class NonFiniteError(RLTrainingError, ArithmeticError):
    """NaN or infinity where training must not go on."""


def described(error: BaseException) -> str:
    """Return type and text of an error that user code raised; making its text may fail as well."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be shown"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def exit_is_error(what: str) -> Iterator[None]:
    """Make an error of an exit that the user's own code asks for; also a decorator.

    Obeyed, `sys.exit(0)` in an environment would look like success with half the work done.

    Args:
        what: What the code was called for, such as `training`.

    Raises:
        RLTrainingError: In place of `SystemExit`.
    """
    try:
        yield
    except SystemExit as leaving:
        raise RLTrainingError(
            f"{what} was ended by sys.exit({leaving.code!r}) in an environment, a callback or a "
            "module they use; raise an exception there, or end the episode"
        ) from leaving

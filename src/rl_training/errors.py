"""The errors a user can cause.

Every message answers, in one sentence: what is wrong, where, which value, what is allowed, what to
do next. The command line prints such an error without a traceback and exits with code 2.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


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


def last_own_frame(error: BaseException) -> str | None:
    """Return the innermost line of the user's own code that an error went through, if any.

    An environment, a callback or a plug-in may be the user's; this package, installed packages and
    Python's own modules are not.  Causes are searched first, since our errors wrap theirs.
    """
    for one in _causes_first(error):
        for frame in reversed(traceback.extract_tb(one.__traceback__)):
            if _is_own(frame.filename):
                return f"{_near(frame.filename)}:{frame.lineno}, in {frame.name}"
    return None


def full_traceback(error: BaseException) -> str:
    """Return the tracebacks of an error and of all that led to it, the first cause first."""
    parts = ("".join(traceback.format_exception(e, chain=False)) for e in _causes_first(error))
    return "\nwhich led to:\n\n".join(parts)


def _causes_first(error: BaseException) -> list[BaseException]:
    """Return an error after its causes, those among them that `raise e from e` has covered up."""
    chain: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one not in chain:
            chain.append(one)
            waiting += [one.__context__, one.__cause__]
    return chain[::-1]


@cache
def _is_own(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(folder in path.parents for folder in _foreign_folders())


@cache
def _foreign_folders() -> tuple[Path, ...]:
    """Return the folders of this package and of Python's own modules."""
    standard = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")]
    return (Path(__file__).resolve().parent, *(Path(folder).resolve() for folder in standard))


def _near(filename: str) -> str:
    """Return the shorter of a path and the way to it from the working folder."""
    try:
        return min(os.path.relpath(filename), filename, key=len)
    except (OSError, ValueError):  # the working folder is gone, or on another drive
        return filename

"""The errors a user can cause.

Every message answers, in one sentence: what is wrong, where, which value, what is allowed, what to
do next. The command line prints such an error without a traceback and exits with code 2.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_FRAME = re.compile(r'^ *File "(.+?)", line (\d+), in (.+?)\r?$', re.MULTILINE)
_BETWEEN_ERRORS = re.compile(
    r"^(?:During handling of the above|The above exception was the direct cause)", re.MULTILINE
)
"""What Python writes between the tracebacks of an error and of its cause, which comes first."""


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


class UnsavedStateError(RLTrainingError, TypeError):
    """A learner that keeps tensors where no checkpoint would find them."""


class MissingExtraError(RLTrainingError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""


class NonFiniteError(RLTrainingError, ArithmeticError):
    """NaN or infinity where training must not continue."""


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


class RemoteTraceback(Exception):
    """The traceback of another process, as text: the cause of an error that came from there."""


def last_own_frame(error: BaseException) -> str | None:
    """Return the innermost line of the user's own code that an error went through, if any.

    An environment, a callback or a plug-in may be the user's; this package, installed packages and
    Python's own modules are not.  Causes are searched first, since our errors wrap theirs.
    """
    for one in _causes_first(error):
        for frames in _frames_of(one):
            for filename, line, name in reversed(frames):
                if _is_own(filename):
                    return f"{_near(filename)}:{line}, in {name}"
    return None


def _frames_of(error: BaseException) -> list[list[tuple[str, str, str]]]:
    """Return file, line and function of each frame; another process may report several errors."""
    if isinstance(error, RemoteTraceback):
        errors = _BETWEEN_ERRORS.split(str(error))
        return [_FRAME.findall(text) for text in errors]
    frames = traceback.extract_tb(error.__traceback__)
    return [[(frame.filename, str(frame.lineno), frame.name) for frame in frames]]


def full_traceback(error: BaseException) -> str:
    """Return the tracebacks of an error and of all that led to it, the first cause first."""
    parts = (
        f"in another process:\n{str(e).strip()}\n"
        if isinstance(e, RemoteTraceback)
        else "".join(traceback.format_exception(e, chain=False))
        for e in _causes_first(error)
    )
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

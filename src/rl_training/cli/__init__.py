"""The command `rl-training`; torch and the algorithms are imported inside the commands.

Whatever a command does beyond reading options and printing belongs to a lower room.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Iterator

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 75
"""`EX_TEMPFAIL`: the run is saved and wants to be started again."""
MOST_SAID = 4_000
"""Characters of an error that are shown."""
_ADVICE = {
    errno.ENOSPC: "free space on that disk, or choose another output folder",
    errno.EDQUOT: "free space within your quota, or choose another output folder",
    errno.EFBIG: "the disk or a limit (ulimit -f) allows no larger file",
    errno.EROFS: "choose an output folder that can be written to",
    errno.EIO: "check the disk or network share, then try again",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use fewer environments",
    errno.ENFILE: "this machine has too many open files; end other programs",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "mend the link, or choose another name",
    errno.ENOMEM: "use fewer environments, a smaller replay or smaller networks",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), or use fewer environments",
}
"""What to do about errors of the machine, which may come from anywhere."""


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    from rl_training.errors import RLTrainingError

    threading.excepthook = _thread_failed
    try:
        # Here, because importing takes long enough to be interrupted.
        from rl_training.cli.commands import app

        with _cancelling_is_error():
            app()
    except RLTrainingError as error:
        code = (
            EXIT_INTERRUPTED if type(error).__name__ == "TrainingInterrupted" else EXIT_USER_ERROR
        )
        _report(
            str(error), "[yellow]interrupted:[/]" if code == EXIT_INTERRUPTED else "[red]error:[/]"
        )
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; that is no error of anybody.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno not in _ADVICE:
            raise
        what = f"{str(error.filename)[:200]}: " if error.filename else ""
        _report(f"{what}{error.strerror}; {_ADVICE[error.errno]}")
        sys.exit(EXIT_USER_ERROR)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else "no reason given"
        _report(
            f"there is not enough memory ({reason}); use fewer environments, a smaller replay, "
            "smaller networks or smaller data"
        )
        sys.exit(EXIT_USER_ERROR)


@contextlib.contextmanager
def _cancelling_is_error() -> Iterator[None]:
    """Make an error of what is raised past `except Exception`, such as asyncio's CancelledError.

    Nothing of this package raises such a thing, so user code did.
    """
    from rl_training.errors import RLTrainingError, described

    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RLTrainingError(
            f"an environment, or a module that it uses, raised {described(error)}"
        ) from error


def _report(text: str, label: str = "[red]error:[/]") -> None:
    if sys.stderr is None:  # the caller has closed it
        return
    text = _one_line(text)
    try:
        from rich.console import Console

        console = Console(stderr=True)
        console.print(label, end=" ")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    except OSError:  # without a free file nothing more can be imported
        with contextlib.suppress(OSError):  # or the disk that errors go to is full
            print(f"error: {text}", file=sys.stderr)


def _one_line(text: str) -> str:
    """Return a message on one line; what user code raises may have any length."""
    text = " ".join(line.strip() for line in text.splitlines() if line.strip())
    half = MOST_SAID // 2
    return text if len(text) <= MOST_SAID else f"{text[:half]} ... {text[-half:]}"


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Leave errors of the disk to the main thread, which the writers of logs report them to."""
    error = failure.exc_value
    if not (isinstance(error, OSError) and error.errno in _ADVICE):
        threading.__excepthook__(failure)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory; PyTorch has no type of its own for that on a CPU."""
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text

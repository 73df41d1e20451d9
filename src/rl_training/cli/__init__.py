"""The command `rl-training`; torch and the algorithms are imported inside the commands.

Whatever a command does beyond reading options and printing belongs to a lower room.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rl_training.cli.styles import ERROR, NOTE
from rl_training.errors import RLTrainingError, full_traceback, last_own_frame

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 75
"""`EX_TEMPFAIL`: the run is saved and wants to be started again."""
DEBUG = "--debug"
"""Taken anywhere on the line, since a person adds it to a command that failed."""
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
    threading.excepthook = _thread_failed
    words = [word for word in sys.argv[1:] if word != DEBUG]
    debug = len(words) < len(sys.argv) - 1
    try:
        # Here, because importing takes long enough to be interrupted.
        from rl_training.cli.commands import root_command

        with _cancelling_is_error():
            code = root_command()(args=words, prog_name="rl-training", standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone, which is not an error.
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        code = _failed(error, debug=debug)
    if code:
        sys.exit(code)


def _failed(error: Exception, *, debug: bool) -> int:
    """Say in one sentence what is wrong and return the exit code; what is our fault is raised."""
    if hasattr(error, "format_message"):  # a wrong option or command; typer may bring its own click
        return _misused(error)
    if type(error).__name__ == "TrainingInterrupted":
        _report(str(error), "interrupted:", NOTE)
        return EXIT_INTERRUPTED
    if debug:
        print(full_traceback(error), file=sys.stderr)
    text, frame = _machine_fault(error), last_own_frame(error)
    if text is None:
        if not isinstance(error, RLTrainingError) and frame is None:
            raise error
        text = str(error) if isinstance(error, RLTrainingError) else _foreign_text(error)
        if frame is not None:
            advice = "" if debug else f"; {DEBUG} shows the traceback"
            text = f"{text} (in your code: {frame}{advice})"
    _report(text)
    return EXIT_USER_ERROR


def _foreign_text(error: Exception) -> str:
    """Say what the user's own code raised, with the notes that came along."""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"


def _misused(error: Any) -> int:
    """Report an option or a command that there is not, or a value that it cannot have."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return EXIT_USER_ERROR
    context = getattr(error, "ctx", None)
    command = "rl-training" if context is None else context.command_path
    text = error.format_message().rstrip(".")
    joint = " " if text.endswith("?") else "; "
    _report(f"{text}{joint}`{command} --help` shows what there is")
    return EXIT_USER_ERROR


def _machine_fault(error: Exception) -> str | None:
    """Say what to do about a fault of the machine: its disk, its limits, its memory."""
    if isinstance(error, RLTrainingError):  # some are of the kinds below as well
        return None
    if isinstance(error, OSError) and error.errno in _ADVICE:
        what = f"{str(error.filename)[:200]}: " if error.filename else ""
        return f"{what}{error.strerror}; {_ADVICE[error.errno]}"
    if isinstance(error, (MemoryError, RuntimeError)) and _is_out_of_memory(error):
        reason = str(error).splitlines()[0][:200] if str(error) else "no reason given"
        return (
            f"there is not enough memory ({reason}); use fewer environments, a smaller replay, "
            "smaller networks or smaller data"
        )
    return None


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


def _report(text: str, label: str = "error:", style: str = ERROR) -> None:
    if sys.stderr is None:  # the caller has closed it
        return
    text = _one_line(text)
    try:
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True)
        sentence = Text(label, style).append(f" {text}", "default not bold")
        # A terminal breaks lines between words, a file keeps the sentence in one.
        console.print(sentence, soft_wrap=not console.is_terminal)
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

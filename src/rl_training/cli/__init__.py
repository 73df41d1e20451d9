"""The command `rl-training`.

Importing this module must stay cheap: torch and the algorithms are imported inside the commands.
"""

from __future__ import annotations

import sys

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 75
"""`EX_TEMPFAIL`: the run is saved and wants to be started again."""


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    from rl_training.cli.commands import app
    from rl_training.errors import RLTrainingError

    try:
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
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else "no reason given"
        _report(
            f"there is not enough memory ({reason}); use fewer environments, a smaller replay, "
            "smaller networks or smaller data"
        )
        sys.exit(EXIT_USER_ERROR)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; that is no error of anybody.
        sys.stderr.close()
        sys.exit(0)


def _report(text: str, label: str = "[red]error:[/]") -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print(label, end=" ")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory; PyTorch has no type of its own for that on a CPU."""
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text

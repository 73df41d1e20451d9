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
    from rich.console import Console

    from rl_training.cli.commands import app
    from rl_training.errors import RLTrainingError

    try:
        app()
    except RLTrainingError as error:
        code = (
            EXIT_INTERRUPTED if type(error).__name__ == "TrainingInterrupted" else EXIT_USER_ERROR
        )
        label = "[yellow]interrupted:[/]" if code == EXIT_INTERRUPTED else "[red]error:[/]"
        console = Console(stderr=True)
        console.print(label, end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; that is no error of anybody.
        sys.stderr.close()
        sys.exit(0)

"""Options that several commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

START = "Start here"
RUNS = "Use a trained agent"
COMPARE = "Compare and search"
DATA = "Recorded data"
LOOK_UP = "Look up and check"
"""Groups of commands in the help, in this order."""


def whole(minimum: int | None = None) -> Callable[[Any], int]:
    """Return a reader of whole numbers that also takes `1e5` and `100_000`.

    Args:
        minimum: Least number allowed; None leaves the check to the configuration.
    """

    def read(value: Any) -> int:
        try:
            number = int(value)
        except ValueError:
            number = _from_float(str(value))
        if minimum is not None and number < minimum:
            raise typer.BadParameter(f"must be at least {minimum}, got {value}")
        return number

    return read


def _from_float(text: str) -> int:
    from rl_training.validation import whole_number

    try:
        number = whole_number(float(text))
    except ValueError:
        number = None
    if not isinstance(number, int):
        raise typer.BadParameter(f"must be a whole number such as 100000 or 1e5, got {text!r}")
    return number


def whole_option(
    *names: str, help: str, min: int | None = None, show_default: bool | str = True
) -> Any:
    """Return an option that takes a whole number."""
    return typer.Option(
        *names, help=help, parser=whole(min), metavar="NUMBER", show_default=show_default
    )


RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="Run folder, checkpoint folder, file made by save(), or hf://user/name.",
        show_default=False,
    ),
]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="The same as RUN, by name.")
]
ResumeArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="Run folder, or one of its checkpoint folders.", show_default=False
    ),
]


def chosen_run(command: str, run: Path | None, checkpoint: Path | None) -> Path:
    """Return the run that a command was given, as its argument or by `--checkpoint`.

    Raises:
        ConfigError: When it was given twice or not at all.
    """
    given = [path for path in (run, checkpoint) if path is not None]
    return only_way(command, given, [] if run is None else [run])[0]


def only_way(command: str, given: Sequence[Path], positional: Sequence[Path]) -> Sequence[Path]:
    """Check that runs are given either as arguments or by `--checkpoint`.

    Raises:
        ConfigError: When they are given in both ways or in none.
    """
    from rl_training.errors import ConfigError

    if not given:
        raise ConfigError(
            f"{command} needs a run: rl-training {command} RUN, where RUN is a run folder such as "
            "runs/my_run or one of its checkpoints"
        )
    if positional and len(given) > len(positional):
        raise ConfigError(
            f"{command} is given {positional[0]} and --checkpoint {given[len(positional)]}; give "
            "the run once"
        )
    return given

"""`rl-training ope`: what policies are worth, from recorded data alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_training.cli.data import err, out
from rl_training.cli.options import only_way, whole_option
from rl_training.cli.styles import NOTE

if TYPE_CHECKING:
    from rl_training.ope.value import OfflineValue

HELP = (
    "Estimate what policies are worth from recorded data alone.\n\n"
    "Fitted Q evaluation with a bootstrap over episodes. Estimated is the discounted value at the "
    "starts of the data's episodes, in units of the data's rewards; time limits do not end it. "
    "Several checkpoints are ranked on the same resamples.\n\n"
    "One:      rl-training ope runs/my_run --dataset pendulum.npz\n\n"
    "Several:  rl-training ope runs/a runs/b --dataset pendulum.npz"
)


def ope(
    dataset: Annotated[
        str, typer.Option(help="File (.npz, .hdf5), folder of .npy files, or local Minari id.")
    ],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Run folders, checkpoint folders, or files made by save().",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", help="The same as RUN, by name. Repeatable."),
    ] = None,
    gamma: Annotated[
        float | None, typer.Option(help="Discount, below 1; the checkpoint's own by default.")
    ] = None,
    updates: Annotated[
        int | None, whole_option(help="Gradient steps.", show_default="10000 to 30000")
    ] = None,
    members: Annotated[
        int | None, whole_option(help="Resamples of the episodes.", show_default="20")
    ] = None,
    batch_size: Annotated[
        int | None, whole_option(help="Transitions per step and member.", show_default="256")
    ] = None,
    hidden_sizes: Annotated[
        str | None, typer.Option(help="Widths of the Q networks.", show_default="64,64")
    ] = None,
    seed: Annotated[
        int | None, whole_option(help="Seed of everything random.", show_default="0")
    ] = None,
    stochastic: Annotated[
        bool,
        typer.Option("--stochastic", help="Evaluate the sampling policy, not its best action."),
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Each run's best checkpoint, not its newest.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<n>.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate what policies are worth from recorded data."""
    given = {
        "gamma": gamma,
        "updates": updates,
        "members": members,
        "batch_size": batch_size,
        "hidden_sizes": None if hidden_sizes is None else parse_sizes(hidden_sizes),
        "seed": seed,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    paths = only_way("ope", [*(runs or ()), *(checkpoint or ())], runs or ())
    found = _ranked(
        list(paths), dataset, settings, stochastic=stochastic, best=best, device=device or "auto"
    )
    if as_json:
        out.print_json(json.dumps({"results": [value.as_record() for value in found]}))
    else:
        print_values(out, found)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read `64,64`."""
    from rl_training.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--hidden-sizes must look like 64,64, got {text!r}") from None


def _ranked(
    checkpoints: list[Path],
    dataset: str,
    settings: Mapping[str, object],
    *,
    stochastic: bool,
    best: bool,
    device: str,
) -> tuple[OfflineValue, ...]:
    from rich.progress import Progress

    from rl_training.ope.estimate import rank_offline

    shown = Progress(console=err, transient=True) if err.is_terminal else nullcontext()
    with shown as progress:
        task = None if progress is None else progress.add_task("fitting Q", total=None)

        def report(done: int, total: int) -> None:
            if progress is not None and task is not None:
                progress.update(task, completed=done, total=total)

        return rank_offline(
            checkpoints,
            dataset,
            stochastic=stochastic,
            best=best,
            device=device,
            on_progress=report,
            warn=_warn,
            **settings,
        )


def _warn(text: str) -> None:
    err.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


def print_values(console: Console, found: tuple[OfflineValue, ...]) -> None:
    """Print a ranked table, what its figures mean, and every warning."""
    first = found[0]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("checkpoint", overflow="fold")
    for column in ("step", "value", "95% interval", "soft score", "P(best)"):
        if column != "P(best)" or len(found) > 1:
            table.add_column(column, justify="right", no_wrap=True)
    for value in found:
        table.add_row(*_cells(value, len(found) > 1))
    low, high = _number(first.behaviour_low), _number(first.behaviour_high)
    table.add_row(
        f"data ({first.episodes:,} episodes)",
        "",
        _number(first.behaviour_value),
        f"{low} .. {high}",
    )
    console.print(table, highlight=False, soft_wrap=False)
    policy = "sampled actions" if first.stochastic else "deterministic actions"
    console.print(
        f"value: discounted by gamma {first.gamma:g} from the starts of episodes, {policy}; time "
        f"limits do not end it. data: recorded returns, cut where episodes end, which leaves out "
        f"{first.weight_beyond:.0%} of the discount's weight.",
        highlight=False,
        soft_wrap=False,
    )
    for value in found:
        if value.warning is not None:
            text = f" {value.checkpoint}: {value.warning}"
            console.print(Text.assemble(("warning:", NOTE), text), soft_wrap=True)


def _cells(value: OfflineValue, several: bool) -> list[str]:
    cells = [value.checkpoint, f"{value.step:,}"]
    if value.value is None:
        cells += ["diverged", "-", "-"]
    else:
        interval = f"{_number(value.value_low)} .. {_number(value.value_high)}"
        cells += [_number(value.value), interval, _number(value.soft_score)]
    if several:
        best = value.probability_best
        cells.append("-" if best is None else f"{best:.0%}")
    return cells


def _number(value: float | None) -> str:
    from rl_training.cli.data_views import number

    return "-" if value is None else number(value)

"""`rl-training gail-control`: one run with real experts, two with experts that show nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rl_training.tools.gail_control import ControlReport

out = Console(soft_wrap=True, emoji=False)
err = Console(stderr=True, emoji=False)


def gail_control(
    config: Annotated[
        str, typer.Option("--config", "-c", help="YAML file or preset, such as gail/cartpole.")
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Override a key. Repeatable.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Several seeds: 1,2,3 or 0..7.")] = None,
    least_gap: Annotated[
        float,
        typer.Option(
            help="Share of the way from a random policy to the expert by which both controls must "
            "fall behind; below it the exit code is 1."
        ),
    ] = 0.2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No live progress.")] = False,
) -> None:
    """Show whether GAIL imitates: real, shuffled and random experts."""
    from rl_training.cli.commands import parse_seeds
    from rl_training.cli.display import display_for
    from rl_training.experiment.config import load_config
    from rl_training.tools.gail_control import run_controls

    changes = {} if seeds is None else {"seeds": parse_seeds(seeds)}
    resolved = load_config(config, set_ or (), changes, may_import=True)
    report = run_controls(resolved, callbacks=lambda _: [display_for(err, quiet=quiet)])
    imitates = report.imitates(least_gap)
    if as_json:
        out.print_json(json.dumps(_facts(report) | {"imitates": imitates}))
    else:
        _print_report(report)
    if not imitates:
        err.print(
            f"a control comes within {least_gap:g} of the way from random to expert: what was "
            "learned is not only imitation (see survival bias in docs/algorithms/gail.md)",
            markup=False,
            highlight=False,
        )
        raise typer.Exit(1)


def _facts(report: ControlReport) -> dict[str, Any]:
    rows = [
        {
            "experts": row.experts,
            "return_mean": row.mean,
            "returns": row.returns,
            "gap": report.gap(row),
            "gap_share": report.share(row),
            "run_dir": str(row.run_dir),
        }
        for row in report.rows
    ]
    return {
        "expert_return": report.expert_return,
        "random_return": report.random_return,
        "runs": rows,
    }


def _print_report(report: ControlReport) -> None:
    from rl_training.cli.tables import print_rows

    rows = [
        (
            row.experts,
            f"{row.mean:.1f}",
            ", ".join(f"{value:.1f}" for value in row.returns),
            "" if row is report.rows[0] else f"{report.gap(row):.1f}",
            "" if row is report.rows[0] else f"{report.share(row):.2f}",
            str(row.run_dir),
        )
        for row in report.rows
    ]
    print_rows(out, ("experts", "return", "per seed", "gap", "share", "run"), rows)
    out.print(
        f"demonstrated episodes return {report.expert_return:.1f}, a random policy "
        f"{report.random_return:.1f}",
        highlight=False,
    )

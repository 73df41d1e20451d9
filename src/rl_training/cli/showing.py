"""`report`, `leaderboard`, `record` and `watch`: what people do with runs they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rl_training.cli.options import CheckpointOption, RunArgument, chosen_run, whole_option

if TYPE_CHECKING:
    from rl_training.reporting.figures import Figure, Row
    from rl_training.reporting.gather import Task
    from rl_training.runtime.workflows import LoadedAgent
    from rl_training.tools.video import Shown

out = Console(soft_wrap=True, emoji=False)
err = Console(stderr=True, emoji=False)

RunsArgument = Annotated[
    list[Path], typer.Argument(help="Run folders, folders of groups, or folders that hold such.")
]
BestOption = Annotated[
    bool, typer.Option("--best", help="The run's best checkpoint, not its newest.")
]
EpisodesOption = Annotated[int, whole_option(help="How many episodes.")]
SeedOption = Annotated[int | None, whole_option(help="Seed of the episodes.", min=0)]
MaxStepsOption = Annotated[int | None, whole_option(help="Cut each episode after so many steps.")]
StochasticOption = Annotated[
    bool | None,
    typer.Option(
        "--stochastic/--deterministic",
        help="Sample actions, or take the best; as the run evaluates if not given.",
        show_default=False,
    ),
]


def report(
    runs: RunsArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Comparison of runs",
) -> None:
    """Compare runs on one HTML page, with curves, tables and videos."""
    from rl_training.reporting.gather import gather
    from rl_training.reporting.page import write_report

    path = write_report(gather(runs), output, title)
    out.print(f"report={path}", markup=False, highlight=False)


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders, folders of groups, or folders that hold such.", show_default=False
        ),
    ] = None,
    with_: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="FILE",
            help="CSV with the columns method, task, seed, step, metric, value. Repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="svg or html (a whole report).")
    ] = Path("compare.svg"),
    metric: Annotated[
        str | None,
        typer.Option(help="Metric of the files; eval_return_mean, or the only one, if not given."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="What the files call the task of the runs.")
    ] = None,
) -> None:
    """Draw runs beside the curves of others, with intervals."""
    from rl_training.errors import ConfigError
    from rl_training.reporting.beside import beside, read_curves, write_drawings
    from rl_training.reporting.figures import ranked
    from rl_training.reporting.gather import gather
    from rl_training.reporting.page import write_report

    if output.suffix not in (".svg", ".html"):
        raise ConfigError(f"--output {output}: compare writes .svg or .html")
    if not runs and not with_:
        raise ConfigError("compare needs runs, a file of curves, or both: compare RUN --with FILE")
    files = {path: read_curves(path, metric) for path in with_ or ()}
    tasks = beside(gather(runs) if runs else [], files, task)
    for each in tasks:
        _print_board(each, ranked(each), "final")
    if output.suffix == ".html":
        drawn = [write_report(tasks, output, "Comparison of runs")]
    else:
        drawn = write_drawings(tasks, output)
    for path in drawn:
        out.print(f"drawing={path}", markup=False, highlight=False)


def leaderboard(
    runs: RunsArgument,
    by: Annotated[str, typer.Option(help="Figure to rank by: final, last or best.")] = "final",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank methods by the interquartile mean over their seeds."""
    from rl_training.reporting.figures import ranked
    from rl_training.reporting.gather import gather

    boards = [(task, ranked(task, by)) for task in gather(runs)]
    if as_json:
        facts = [{"task": t.name, "methods": [_row_facts(r) for r in rows]} for t, rows in boards]
        out.print_json(json.dumps(facts))
        return
    for task, rows in boards:
        _print_board(task, rows, by)


def record(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="mp4, webm or gif; the run's own folder videos/ if not given."
        ),
    ] = None,
    episodes: EpisodesOption = 1,
    seed: SeedOption = None,
    best: BestOption = False,
    fps: Annotated[int | None, whole_option(help="Frames per second.")] = None,
    max_steps: MaxStepsOption = None,
    stochastic: StochasticOption = None,
) -> None:
    """Make a video of a trained policy."""
    from rl_training.tools.video import record_agent

    path = chosen_run("record", run, checkpoint)
    agent = _agent(path, best)
    target = output or _video_path(path, agent.step)
    shown = record_agent(
        agent,
        target,
        episodes=episodes,
        seed=seed,
        fps=fps,
        max_steps=max_steps,
        deterministic=deterministic(stochastic),
    )
    _print_shown(shown)
    out.print(f"video={shown.path}", markup=False, highlight=False)


def watch(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    episodes: EpisodesOption = 1,
    seed: SeedOption = None,
    best: BestOption = False,
    max_steps: MaxStepsOption = None,
    stochastic: StochasticOption = None,
) -> None:
    """Show a trained policy in a window."""
    from rl_training.tools.video import watch_agent

    shown = watch_agent(
        _agent(chosen_run("watch", run, checkpoint), best),
        episodes=episodes,
        seed=seed,
        max_steps=max_steps,
        deterministic=deterministic(stochastic),
    )
    _print_shown(shown)


def deterministic(stochastic: bool | None) -> bool | None:
    """Return what an option `--stochastic` asks of the policy; None leaves it to the run."""
    return None if stochastic is None else not stochastic


def _agent(checkpoint: Path, best: bool) -> LoadedAgent:
    from rl_training.runtime.workflows import load_agent

    return load_agent(checkpoint, best=best, warn=warn)


def warn(text: str) -> None:
    """Tell a person something that is not an error."""
    err.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


def _video_path(checkpoint: Path, step: int) -> Path:
    """Return where `report` finds the video, beside the run's logs; that of a copy is put here."""
    from rl_training.errors import DataError
    from rl_training.experiment.hub import hub_name
    from rl_training.experiment.runs import is_hub_name
    from rl_training.runtime.checkpoints.resume import home_of

    if is_hub_name(checkpoint):
        return Path(f"{hub_name(checkpoint).repo.partition('/')[2]}.mp4")
    if checkpoint.is_file():
        return checkpoint.with_suffix(".mp4")
    target = (home_of(checkpoint) or Path()) / "videos" / f"step_{step}.mp4"
    if target.is_symlink() or target.parent.is_symlink():
        raise DataError(f"{target} is a link out of the run; name a file with --output")
    return target


def _print_shown(shown: Shown) -> None:
    for index, value in enumerate(shown.returns):
        out.print(f"episode={index} return={value:.2f}", highlight=False)
    out.print(f"steps={shown.steps}", highlight=False)


def _row_facts(row: Row) -> dict[str, Any]:
    def facts(figure: Figure | None) -> dict[str, Any] | None:
        if figure is None:
            return None
        return {
            "iqm": figure.iqm,
            "low": figure.low,
            "high": figure.high,
            "values": list(figure.values),
        }

    return {
        "method": row.method.label,
        "seeds": [run.seed for run in row.method.runs],
        "steps": row.steps,
        "final": facts(row.final),
        "last": facts(row.last),
        "best": facts(row.best),
        "score": facts(row.score),
        "success": facts(row.success),
        "runs": [str(run.folder) for run in row.method.runs],
    }


def _print_board(task: Task, rows: list[Row], by: str) -> None:
    from rich.markup import escape

    from rl_training.cli.tables import print_rows
    from rl_training.reporting.figures import KINDS, improvements

    out.print(f"\n[bold]{escape(task.name)}[/], by {by} return", highlight=False)
    beats = improvements(rows, by)
    others = [kind for kind in KINDS if kind != by]
    some = [name for name in ("score", "success") if any(getattr(row, name) for row in rows)]
    cells = []
    for place, row in enumerate(rows):
        below = beats[place][place + 1] if place + 1 < len(rows) else None
        cells.append(
            (
                f"{place + 1}. {escape(row.method.label)}",
                _cell(row.figure(by), with_interval=True),
                *(_cell(row.figure(kind)) for kind in others),
                *(_cell(getattr(row, name)) for name in some),
                str(len(row.method.runs)),
                f"{row.steps:,}",
                "" if below is None else f"{below.probability:.2f}",
            )
        )
    columns = ("method", f"{by} IQM", *others, *some, "seeds", "steps", "beats next")
    print_rows(out, columns, cells)


def _cell(figure: Figure | None, *, with_interval: bool = False) -> str:
    if figure is None:
        return "-"
    digits = 1 if max(abs(figure.low), abs(figure.high)) >= 10 else 3
    interval = f" \\[{figure.low:.{digits}f}, {figure.high:.{digits}f}]" if with_interval else ""
    return f"{figure.iqm:.{digits}f}{interval}"

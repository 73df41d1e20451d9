"""The verbs of the command line; each is a thin layer over the Python API."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rl_training._version import __version__
from rl_training.cli.data import app as data_app
from rl_training.cli.deploying import export, predict
from rl_training.cli.gail_control import gail_control
from rl_training.cli.ope import HELP, ope
from rl_training.cli.showing import (
    StochasticOption,
    deterministic,
    leaderboard,
    record,
    report,
    watch,
)
from rl_training.cli.sweeping import sweep, tune

if TYPE_CHECKING:
    from rl_training.runtime.results import TrainResult

app = typer.Typer(
    name="rl-training",
    help="Train reinforcement-learning agents, evaluate them, resume runs to the bit, predict.\n\n"
    "Start with:  rl-training train --config sac/pendulum",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app)
app.command("ope", help=HELP)(ope)
app.command("gail-control")(gail_control)
for _command_function in (predict, export, report, leaderboard, record, watch, sweep, tune):
    app.command()(_command_function)
out = Console(soft_wrap=True, emoji=False)
err = Console(stderr=True, emoji=False)

ConfigOption = Annotated[
    str, typer.Option("--config", "-c", help="YAML file or preset, such as sac/pendulum.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", help="Override a key, such as algo_kwargs.batch_size=512. Repeatable."
    ),
]
CheckpointOption = Annotated[
    Path,
    typer.Option("--checkpoint", help="Checkpoint folder, run folder, or file made by save()."),
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<n>.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No live progress display.")]


@app.callback(invoke_without_command=True)
def version_callback(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="Import a method of your own, module:SPEC, that a checkpoint needs. Repeatable.",
            envvar="RL_TRAINING_PLUGINS",
        ),
    ] = None,
) -> None:
    """Show the version when asked to; import the plug-ins that the user trusts."""
    if version:
        out.print(__version__)
        raise typer.Exit
    if plugin:
        from rl_training.errors import ConfigError
        from rl_training.experiment.registry import import_plugin

        for name in plugin:
            if ":" not in name:
                raise ConfigError(f"--plugin {name} is not of the form module:SPEC")
            import_plugin(name)


@app.command()
def train(
    config: ConfigOption,
    output_dir: Annotated[Path | None, typer.Option(help="Folder for the run's folder.")] = None,
    total_timesteps: Annotated[int | None, typer.Option(help="Steps per seed.")] = None,
    num_envs: Annotated[int | None, typer.Option(help="Environments side by side.")] = None,
    eval_episodes: Annotated[int | None, typer.Option(help="Episodes per evaluation.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Several seeds in one process: 1,2,3 or 0..7."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of a setting to try side by side: learning_rate=1e-4,3e-4. Repeatable; "
            "every combination is trained with every seed."
        ),
    ] = None,
    from_checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Run or checkpoint whose networks to begin with; an offline method goes online."
        ),
    ] = None,
    collect: Annotated[
        str | None,
        typer.Option(help="Where environments run: auto, native, sync, async, or ray (a cluster)."),
    ] = None,
    device: DeviceOption = None,
    set_: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved configuration and stop.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Train an agent from a preset or a YAML file."""
    from rl_training.cli.display import display_for
    from rl_training.experiment.config import load_config
    from rl_training.runtime.train import train as run_training

    options = {
        "output_dir": None if output_dir is None else str(output_dir),
        "total_timesteps": total_timesteps,
        "num_envs": num_envs,
        "eval_episodes": eval_episodes,
        "seed": seed,
        "seeds": None if seeds is None else parse_seeds(seeds),
        "grid": parse_grid(grid) if grid else None,
        "vector_mode": collect,
        "device": device,
        "from_checkpoint": None if from_checkpoint is None else str(from_checkpoint),
    }
    changes = {name: value for name, value in options.items() if value is not None}
    if seed is not None:
        _one_seed_only(changes)
    resolved = load_config(config, set_ or (), changes, may_import=True)
    if dry_run:
        out.print(resolved.to_yaml(), markup=False, highlight=False)
        return
    start = Path.cwd()
    _print_outcome(run_training(resolved, callbacks=[display_for(err, quiet=quiet)]), start)


@app.command()
def resume(
    checkpoint: Annotated[
        Path, typer.Option("--checkpoint", help="Run folder, or one of its checkpoint folders.")
    ],
    total_timesteps: Annotated[
        int | None, typer.Option(help="New end of the run; schedules keep their plan.")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="Go on in a new run, in this folder; a checkpoint outside its run does so in runs."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="New number of CPU threads; another one changes the last bits.", min=1),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Take a run up again where it stopped, to the bit."""
    from rl_training.cli.display import display_for
    from rl_training.runtime.workflows import resume_training

    start = Path.cwd()
    result = resume_training(
        checkpoint,
        total_timesteps=total_timesteps,
        output_dir=output_dir,
        threads=threads,
        callbacks=[display_for(err, quiet=quiet)],
        warn=_warn,
    )
    _print_outcome(result, start)


@app.command("eval")
def evaluate(
    checkpoint: CheckpointOption,
    episodes: Annotated[
        int | None, typer.Option("--episodes", "--num-episodes", help="How many episodes.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the episodes.", min=0)] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The run's best checkpoint, not its newest.")
    ] = False,
    stochastic: StochasticOption = None,
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run whole episodes with a checkpoint's policy."""
    from rl_training.cli.display import print_metrics
    from rl_training.runtime.workflows import evaluate_checkpoint

    result = evaluate_checkpoint(
        checkpoint,
        episodes,
        seed=seed,
        best=best,
        deterministic=deterministic(stochastic),
        device=device or "auto",
        warn=_warn,
    )
    if as_json:
        out.print_json(
            json.dumps({"step": result.step, "returns": result.returns, **result.metrics})
        )
        return
    print_metrics(out, {"global_step": result.step, **result.metrics})


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help="algos, presets or envs.")] = "algos",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List algorithms, presets or environments."""
    from rl_training.cli.tables import list_rows, print_rows
    from rl_training.errors import ConfigError

    if what not in ("algos", "presets", "envs"):
        raise ConfigError(f"list {what}: allowed are algos, presets and envs")
    columns, rows = list_rows(what)
    if as_json:
        out.print_json(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
    else:
        print_rows(out, columns, rows)


@app.command()
def describe(
    algo: Annotated[str, typer.Argument(help="Name of an algorithm.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show an algorithm's paper, settings, metrics and presets."""
    from rl_training.cli.tables import algorithm_facts, print_facts
    from rl_training.experiment.registry import import_plugin

    import_plugin(algo)
    facts = algorithm_facts(algo)
    if as_json:
        out.print_json(json.dumps(facts))
    else:
        print_facts(out, facts)


@app.command("config")
def config_command(
    action: Annotated[str, typer.Argument(help="show (resolved YAML) or schema (JSON schema).")],
    name: Annotated[
        str, typer.Argument(help="Preset or YAML file for show, algorithm for schema.")
    ],
    set_: SetOption = None,
) -> None:
    """Show a configuration with all defaults, or the JSON schema for editors."""
    from rl_training.errors import ConfigError
    from rl_training.experiment.config import config_schema, load_config
    from rl_training.experiment.registry import import_plugin

    if action == "show":
        out.print(
            load_config(name, set_ or (), may_import=True).to_yaml(), markup=False, highlight=False
        )
    elif action == "schema":
        import_plugin(name)
        out.print_json(json.dumps(config_schema(name)))
    else:
        raise ConfigError(f"config {action}: allowed are show and schema")


@app.command("verify-resume")
def verify_resume_command(
    config: ConfigOption,
    at: Annotated[int, typer.Option(help="Step at which the second run is cut and resumed.")],
    total_timesteps: Annotated[int | None, typer.Option(help="Length of both runs.")] = None,
    set_: SetOption = None,
) -> None:
    """Prove that a resumed run equals an uninterrupted one, or show what differs first."""
    from rl_training.experiment.config import load_config
    from rl_training.runtime.verify import verify_resume

    changes = {} if total_timesteps is None else {"total_timesteps": total_timesteps}
    report = verify_resume(load_config(config, set_ or (), changes, may_import=True), at)
    for line in report.lines():
        out.print(line, markup=False, highlight=False)
    if not report.identical:
        raise typer.Exit(1)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, devices, extras and disk, and run a five-second self-test."""
    from rl_training.cli.doctor import print_report, run_checks

    report = run_checks()
    if as_json:
        out.print_json(json.dumps(report))
    else:
        print_report(out, report)
    if not report["ok"]:
        raise typer.Exit(1)


def parse_seeds(text: str) -> list[int]:
    """Read `1,2,3` or `0..7` (both ends included)."""
    from rl_training.errors import ConfigError

    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            seeds = list(range(first, last + 1))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds:
        raise ConfigError(f"--seeds must look like 1,2,3 or 0..7 (rising), got {text!r}")
    return seeds


def parse_grid(texts: list[str]) -> dict[str, list[float]]:
    """Read `learning_rate=1e-4,3e-4`, one text per setting."""
    from rl_training.errors import ConfigError

    grid: dict[str, list[float]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        try:
            numbers = [float(part) for part in values.split(",")]
        except ValueError:
            numbers = []
        if not numbers or not name:
            raise ConfigError(f"--grid must look like learning_rate=1e-4,3e-4, got {text!r}")
        if name in grid:
            raise ConfigError(f"--grid {name} is given twice; put all its values into one")
        grid[name] = numbers
    return grid


def _one_seed_only(changes: dict[str, Any]) -> None:
    """Let `--seed` win over the `seeds` of a file, and refuse it beside `--seeds`."""
    from rl_training.errors import ConfigError

    if "seeds" in changes:
        raise ConfigError("give either --seed or --seeds, not both")
    changes["seeds"] = None


def _warn(text: str) -> None:
    err.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


def _command() -> str:
    """Return what to type for this program here: its name, or its path when not on the PATH."""
    called = Path(sys.argv[0])
    if shutil.which("rl-training") or called.name != "rl-training":
        return "rl-training"
    return os.path.relpath(called)


def _print_outcome(result: TrainResult, start: Path) -> None:
    """Print where everything is, seen from `start`; `name=value` lines first, for scripts."""
    from rl_training.cli.display import print_group, print_result
    from rl_training.cli.plots import draw_plots
    from rl_training.runtime.summary import SUMMARY_FILE, read_summary

    def near(path: Path) -> Path:
        return path.relative_to(start) if path.is_relative_to(start) else path

    print_result(out, near(result.run_dir), near(result.checkpoint_path), result.metrics)
    if result.stop_reason is not None:
        out.print(f"stop_reason={result.stop_reason}", markup=False, highlight=False)
    for member in result.per_seed:
        mean: Any = member.metrics.get("eval_return_mean")
        line = f"seed_run={near(member.run_dir)} eval_return_mean={mean}"
        out.print(line, markup=False, highlight=False)
    summary = read_summary(result.run_dir) if result.per_seed else None
    if summary is not None:
        path = near(result.run_dir / SUMMARY_FILE)
        out.print(f"summary={path}", markup=False, highlight=False)
    curves = {} if summary is None else summary.curves()
    members = [member.run_dir for member in result.per_seed]
    drawn = draw_plots(result.run_dir, members, curves)
    shown = near(drawn) if isinstance(drawn, Path) else f"none ({drawn})"
    out.print(f"plots={shown}", markup=False, highlight=False)
    if summary is not None:
        print_group(out, summary)
    if out.is_terminal:
        checkpoint, run_dir = near((result.per_seed or (result,))[0].run_dir), near(result.run_dir)
        err.print("\nWhat next:", style="bold")
        command = _command()
        board = command.replace("rl-training", "tensorboard")
        for line in (
            f"{command} eval --checkpoint {checkpoint} --episodes 20",
            f"{command} resume --checkpoint {run_dir} --total-timesteps <more>",
            f"{board} --logdir {run_dir}",
        ):
            err.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

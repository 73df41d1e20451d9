"""The verbs of the command line; each is a thin layer over the Python API."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rl_training._version import __version__
from rl_training.cli.data import app as data_app
from rl_training.cli.deploying import export, predict, push
from rl_training.cli.gail_control import gail_control
from rl_training.cli.ope import HELP, ope
from rl_training.cli.options import (
    COMPARE,
    DATA,
    LOOK_UP,
    RUNS,
    START,
    CheckpointOption,
    ResumeArgument,
    RunArgument,
    chosen_run,
    whole_option,
)
from rl_training.cli.showing import (
    StochasticOption,
    compare,
    deterministic,
    leaderboard,
    record,
    report,
    watch,
)
from rl_training.cli.styles import style_help
from rl_training.cli.sweeping import sweep, tune
from rl_training.cli.zoo import app as zoo_app

if TYPE_CHECKING:
    from rl_training.runtime.results import EvalResult

MOST_SEEDS = 10_000
"""Seeds that `--seeds` may name."""

app = typer.Typer(
    name="rl-training",
    help="Train reinforcement-learning agents, evaluate them, resume runs bit-exact, predict.\n\n"
    "Start with:  rl-training train --config sac/pendulum\n\n"
    "or:          rl-training train --algo ppo --env CartPole-v1",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(soft_wrap=True, emoji=False)
err = Console(stderr=True, emoji=False)

ConfigOption = Annotated[
    str, typer.Option("--config", "-c", help="YAML file or preset, such as sac/pendulum.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Override a key of the run (num_envs=8) or a setting of the method "
        "(learning_rate=1e-3, short for algo_kwargs.learning_rate); a name that both have is the "
        "run's. Repeatable.",
    ),
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<n>.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No live progress display.")]


@app.callback(invoke_without_command=True)
def version_callback(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="Import a method or an encoder of your own that a checkpoint needs. Repeatable.",
            metavar="MODULE:NAME",
            envvar="RL_TRAINING_PLUGINS",
        ),
    ] = None,
    debug: Annotated[  # noqa: ARG001 `main` takes it, wherever it is on the line
        bool,
        typer.Option("--debug", help="Show the traceback of an error in your own code."),
    ] = False,
) -> None:
    """Show the version when asked to; import the plug-ins that the user trusts."""
    if version:
        out.print(__version__)
        raise typer.Exit
    if plugin:
        from rl_training.errors import ConfigError
        from rl_training.experiment.registry import import_trusted

        for name in plugin:
            if ":" not in name:
                raise ConfigError(f"--plugin {name} is not of the form module:SPEC")
            import_trusted(name)


def train(
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="YAML file or preset, such as sac/pendulum."),
    ] = None,
    algo: Annotated[
        str | None,
        typer.Option(
            help="Method, with its default settings if there is no --config.", metavar="NAME"
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            help="Task: a Gymnasium id or module:Class, in place of the preset's.",
            metavar="ID",
        ),
    ] = None,
    total_timesteps: Annotated[
        int | None, whole_option(help="Steps per seed; 1e5 works too.")
    ] = None,
    set_: SetOption = None,
    seed: Annotated[int | None, whole_option(help="Seed of everything random.")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Several seeds in one process: 1,2,3 or 0..7."),
    ] = None,
    num_envs: Annotated[int | None, whole_option(help="Environments side by side.")] = None,
    eval_episodes: Annotated[int | None, whole_option(help="Episodes per evaluation.")] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder in which to create the run's folder.")
    ] = None,
    device: DeviceOption = None,
    collect: Annotated[
        str | None,
        typer.Option(help="Where environments run: auto, native, sync, async, or ray (a cluster)."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="Values of a setting to try side by side: learning_rate=1e-4,3e-4. Repeatable; "
            "every combination is trained with every seed.",
        ),
    ] = None,
    from_checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Run or checkpoint whose networks to start from; an offline method goes online."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved configuration and stop.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Train an agent: a preset, a YAML file, or any method on any task."""
    options = {
        "algo": algo,
        "env_id": env,
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
    _names_a_run(config, algo, env)
    if seed is not None:
        _one_seed_only(changes)
    from rl_training.experiment.config import load_config

    resolved = load_config(config, set_ or (), changes, may_import=True)
    if dry_run:
        out.print(resolved.to_yaml(), markup=False, highlight=False)
        return
    from rl_training.cli.display import display_for
    from rl_training.cli.outcome import MadeUpWarning, print_outcome
    from rl_training.runtime.train import train as run_training

    start = Path.cwd()
    callbacks = [MadeUpWarning(), display_for(err, quiet=quiet)]
    print_outcome(run_training(resolved, callbacks=callbacks), start)


def resume(
    run: ResumeArgument = None,
    checkpoint: CheckpointOption = None,
    total_timesteps: Annotated[
        int | None, whole_option(help="New end of the run; schedules keep their plan.")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="Continue in a new run in this folder; a checkpoint outside its run uses runs."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        whole_option(help="New number of CPU threads; the run is then not bit-exact.", min=1),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Resume a run where it stopped, bit-exact."""
    path = chosen_run("resume", run, checkpoint)
    from rl_training.cli.display import display_for
    from rl_training.cli.outcome import MadeUpWarning, print_outcome
    from rl_training.runtime.workflows import resume_training

    start = Path.cwd()
    result = resume_training(
        path,
        total_timesteps=total_timesteps,
        output_dir=output_dir,
        threads=threads,
        callbacks=[MadeUpWarning(), display_for(err, quiet=quiet)],
        warn=_warn,
    )
    print_outcome(result, start)


def evaluate(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    episodes: Annotated[
        int | None, whole_option("--episodes", "--num-episodes", help="Number of episodes.")
    ] = None,
    seed: Annotated[int | None, whole_option(help="Seed of the episodes.", min=0)] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The run's best checkpoint, not its newest.")
    ] = False,
    stochastic: StochasticOption = None,
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run whole episodes with a trained policy, or the same ones with every seed of a group."""
    path = chosen_run("eval", run, checkpoint)
    from rl_training.cli.display import print_metrics
    from rl_training.runtime.checkpoints.resume import group_folders
    from rl_training.runtime.workflows import evaluate_checkpoint, evaluate_group

    if not best and group_folders(Path(path)):
        results = evaluate_group(
            path,
            episodes,
            seed=seed,
            deterministic=deterministic(stochastic),
            device=device or "auto",
            warn=_warn,
        )
        _print_evaluated_group(results, as_json=as_json)
        return
    result = evaluate_checkpoint(
        path,
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


def _print_evaluated_group(results: Mapping[str, EvalResult], *, as_json: bool) -> None:
    """Print what each member got and the figures over members."""
    from rl_training.cli.display import print_metrics
    from rl_training.experiment.summary import SUCCESS
    from rl_training.runtime.results import summarize_members

    step = next(iter(results.values())).step
    figures = summarize_members(list(results.values()))
    if as_json:
        members = {name: {"returns": r.returns, **r.metrics} for name, r in results.items()}
        out.print_json(json.dumps({"step": step, "members": members, **figures}))
        return
    for name, result in results.items():
        shown = [key for key in ("eval_return_mean", SUCCESS) if key in result.metrics]
        figures_of_one = " ".join(f"{key}={result.metrics[key]:.4f}" for key in shown)
        out.print(f"{name} {figures_of_one}", markup=False, highlight=False)
    print_metrics(out, {"global_step": step, **figures})


def list_command(
    what: Annotated[str, typer.Argument(help="algos, presets or envs.")] = "algos",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List methods, presets (with what they reach) or environments."""
    from rl_training.cli.tables import list_rows, print_list
    from rl_training.errors import ConfigError

    if what not in ("algos", "presets", "envs"):
        raise ConfigError(f"list {what}: allowed are algos, presets and envs")
    if as_json:
        out.print_json(json.dumps(list_rows(what)))
    else:
        print_list(out, what)


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


def config_command(
    action: Annotated[str, typer.Argument(help="show (resolved YAML) or schema (JSON schema).")],
    name: Annotated[
        str, typer.Argument(help="Preset or YAML file for show, algorithm for schema.")
    ],
    set_: SetOption = None,
) -> None:
    """Show a configuration with all defaults, or its JSON schema."""
    if action == "show":
        out.print(_resolved_text(name, set_ or ()), markup=False, highlight=False)
        return
    from rl_training.errors import ConfigError
    from rl_training.experiment.config import config_schema
    from rl_training.experiment.registry import import_plugin

    if action != "schema":
        raise ConfigError(f"config {action}: allowed are show and schema")
    import_plugin(name)
    out.print_json(json.dumps(config_schema(name)))


def _resolved_text(name: str, overrides: Sequence[str]) -> str:
    """Return a configuration as YAML; a preset as it is needs no method, and so no PyTorch."""
    from rl_training.resources import preset_names

    if not overrides and name in preset_names() and not Path(name).is_file():
        import yaml

        from rl_training.experiment.presets import resolved_preset

        return yaml.safe_dump(resolved_preset(name), sort_keys=False)
    from rl_training.experiment.config import load_config

    return load_config(name, overrides, may_import=True).to_yaml()


def verify_resume_command(
    config: ConfigOption,
    at: Annotated[
        int, whole_option(help="Step at which the second run is interrupted and resumed.")
    ],
    total_timesteps: Annotated[int | None, whole_option(help="Length of both runs.")] = None,
    set_: SetOption = None,
) -> None:
    """Prove that a resumed run equals an uninterrupted one."""
    from rl_training.experiment.config import load_config
    from rl_training.runtime.checkpoints.verify import verify_resume

    changes = {} if total_timesteps is None else {"total_timesteps": total_timesteps}
    report = verify_resume(load_config(config, set_ or (), changes, may_import=True), at)
    for line in report.lines():
        out.print(line, markup=False, highlight=False)
    if not report.identical:
        raise typer.Exit(1)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the installation, with a self-test of five seconds."""
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
            seeds = list(range(first, min(last, first + MOST_SEEDS) + 1))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds:
        raise ConfigError(f"--seeds must look like 1,2,3 or 0..7 (rising), got {text!r}")
    if len(seeds) > MOST_SEEDS:
        raise ConfigError(f"--seeds {text[:100]}: at most {MOST_SEEDS} seeds can be given")
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


def _names_a_run(config: str | None, algo: str | None, env: str | None) -> None:
    """Check that a preset, or a method and a task, say what to train."""
    from rl_training.errors import ConfigError
    from rl_training.experiment.yaml_loader import load_yaml
    from rl_training.resources import preset_path

    if config is not None:
        own = load_yaml(preset_path(config)).data.get("algo")
        if algo not in (None, own):
            raise ConfigError(
                f"--algo {algo} does not go with --config {config}, which is for {own}; leave out "
                f"one of the two (without --config, --algo {algo} needs --env)"
            )
    elif algo is None or env is None:
        given = f"--algo {algo}" if algo is not None else f"--env {env}"
        lacks = "--env, the task" if env is None else "--algo, the method"
        raise ConfigError(
            "train needs --config with a preset or a YAML file, or --algo and --env: such as "
            "rl-training train --config sac/pendulum, or rl-training train --algo ppo --env "
            "CartPole-v1"
            if algo is env
            else f"train {given} lacks {lacks}; `rl-training list` shows methods, `rl-training "
            "list envs` tasks"
        )


def _warn(text: str) -> None:
    err.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


COMMANDS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    (START, (("train", train), ("resume", resume), ("eval", evaluate))),
    (
        RUNS,
        (
            ("predict", predict),
            ("record", record),
            ("watch", watch),
            ("export", export),
            ("push", push),
        ),
    ),
    (
        COMPARE,
        (
            ("leaderboard", leaderboard),
            ("report", report),
            ("compare", compare),
            ("sweep", sweep),
            ("tune", tune),
        ),
    ),
    (DATA, (("ope", ope), ("gail-control", gail_control))),
    (
        LOOK_UP,
        (
            ("list", list_command),
            ("describe", describe),
            ("config", config_command),
            ("verify-resume", verify_resume_command),
            ("doctor", doctor),
        ),
    ),
)
"""The commands by the groups of the help, in the order in which a newcomer needs them."""
for _group, _commands in COMMANDS:
    for _name, _function in _commands:
        _help = HELP if _name == "ope" else None
        app.command(_name, help=_help, rich_help_panel=_group)(_function)
app.add_typer(data_app, rich_help_panel=DATA)
app.add_typer(zoo_app, rich_help_panel=RUNS)


def root_command() -> Any:
    """Return the command that the words of a user are given to, with help for people."""
    if {"-h", "--help"} & set(sys.argv) or len(sys.argv) < 2:
        style_help()
    root = typer.main.get_command(app)
    _name_values(root)
    return root


def _name_values(command: Any) -> None:
    """Let the help say what an option takes, which for a flag is nothing."""
    context = command.context_class(command, help_option_names=["-h", "--help"])
    for option in [*command.params, command.get_help_option(context)]:
        if option.param_type_name == "option" and option.metavar is None:
            option.metavar = "" if option.is_flag else _value_name(option, context)
    for inner in getattr(command, "commands", {}).values():
        _name_values(inner)


def _value_name(option: Any, context: Any) -> str:
    """Return what the help calls the value of an option, by the type that typer knows."""
    # Until 0.25 or so typer's options were click's, with a type of their own.
    is_typers = hasattr(option, "display_type")
    kind = str(option.display_type(context)) if is_typers else str(option.type.name)
    return next((name for word, name in VALUE_NAMES.items() if word in kind), "TEXT")


VALUE_NAMES = {"path": "PATH", "file": "PATH", "directory": "PATH", "float": "NUMBER"}

"""`sweep` and `tune`: many runs, here or on a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rl_training.cli.showing import leaderboard

if TYPE_CHECKING:
    from rl_training.sweeps.jobs import Job, Outcome
    from rl_training.sweeps.runners import Runner
    from rl_training.sweeps.tuning import TuneResult

out = Console(soft_wrap=True, emoji=False)
err = Console(stderr=True, emoji=False)

SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override a key of every run. Repeatable.")
]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", help="Processes side by side.")]
RetriesOption = Annotated[int, typer.Option(help="Times that a run that died is resumed.")]
RunnerOption = Annotated[str, typer.Option(help="local (processes here) or ray (a cluster).")]
AddressOption = Annotated[
    str | None,
    typer.Option(help="Address of a running Ray cluster, or auto; starts one here by default."),
]
CpusOption = Annotated[float, typer.Option(help="CPUs of a run on Ray.")]
GpusOption = Annotated[float, typer.Option(help="GPUs of a run on Ray.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def sweep(
    config: Annotated[
        list[str], typer.Option("--config", "-c", help="Preset or YAML file. Repeatable.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder; the same folder again continues there.")
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Values of a setting: learning_rate=1e-4,3e-4. Repeatable."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="1,2,3 or 0..7.")] = "0",
    set_: SetOption = None,
    jobs: JobsOption = 1,
    retries: RetriesOption = 2,
    runner: RunnerOption = "local",
    ray_address: AddressOption = None,
    cpus: CpusOption = 1.0,
    gpus: GpusOption = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and stop.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train every combination of presets, values and seeds."""
    from rl_training.cli.commands import parse_seeds
    from rl_training.errors import RLTrainingError
    from rl_training.sweeps.jobs import write_jobs
    from rl_training.sweeps.plan import SweepPlan
    from rl_training.sweeps.runners import closing, do_all, failures

    plan = SweepPlan(
        configs=tuple(config),
        grid=tuple(grid or ()),
        seeds=tuple(parse_seeds(seeds)),
        overrides=tuple(set_ or ()),
    )
    planned = plan.jobs(output)
    if dry_run:
        for job in planned:
            out.print(job.name, markup=False, highlight=False)
        return
    chosen = _runner(runner, jobs, retries, ray_address, cpus, gpus)
    write_jobs(planned)
    with closing(chosen):
        outcomes = do_all(planned, chosen, _say_start, _say_end)
    if as_json:
        facts = {name: outcome.model_dump(mode="json") for name, outcome in outcomes.items()}
        out.print_json(json.dumps(facts))
    elif any(outcome.is_final for outcome in outcomes.values()):
        leaderboard([output])
    failed = failures(outcomes)
    if failed:
        name, outcome = failed[0]
        raise RLTrainingError(
            f"{len(failed)} of {len(planned)} runs are not done; the first is {name}: "
            f"{outcome.message}; the same command continues with them"
        )


def tune(
    config: Annotated[str, typer.Option("--config", "-c", help="Preset or YAML file.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder; the same folder again continues there.")
    ],
    search: Annotated[
        list[str],
        typer.Option(
            help="What to search: learning_rate=1e-4..1e-2:log, batch_size=64,128. Repeatable."
        ),
    ],
    trials: Annotated[int, typer.Option(help="Number of trials, earlier ones included.")] = 20,
    seeds: Annotated[str, typer.Option(help="Seeds of every trial.")] = "0",
    held_out: Annotated[str, typer.Option(help="Seeds of the final figure.")] = "1000..1002",
    sampler: Annotated[str, typer.Option(help="tpe or random.")] = "tpe",
    pruner: Annotated[str, typer.Option(help="median, halving or none.")] = "median",
    sampler_seed: Annotated[int, typer.Option(help="Seed of the search.", min=0)] = 0,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Train the original settings as well at the end.")
    ] = False,
    set_: SetOption = None,
    jobs: JobsOption = 1,
    retries: RetriesOption = 2,
    runner: RunnerOption = "local",
    ray_address: AddressOption = None,
    cpus: CpusOption = 1.0,
    gpus: GpusOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Search for settings with Optuna; measure them on new seeds."""
    from rl_training.cli.commands import parse_seeds
    from rl_training.sweeps.runners import closing
    from rl_training.sweeps.tuning import TunePlan, Tuner

    plan = TunePlan(
        config=config,
        search=tuple(search),
        trials=trials,
        seeds=tuple(parse_seeds(seeds)),
        held_out=tuple(parse_seeds(held_out)),
        overrides=tuple(set_ or ()),
        sampler=sampler,
        pruner=pruner,
        sampler_seed=sampler_seed,
        baseline=baseline,
    )
    tuner = Tuner(plan, output, _say)
    chosen = _runner(runner, jobs, retries, ray_address, cpus, gpus)
    with closing(chosen):
        result = tuner.run(chosen)
    _print_tuned(result, as_json=as_json)


def _runner(
    name: str, jobs: int, retries: int, address: str | None, cpus: float, gpus: float
) -> Runner:
    from rl_training.sweeps.runners import RayOptions, make_runner

    return make_runner(name, jobs, retries, RayOptions(address=address, cpus=cpus, gpus=gpus))


def _say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _say_start(job: Job) -> None:
    _say(f"started {job.name}")


def _say_end(job: Job, outcome: Outcome) -> None:
    value = outcome.metrics.get("eval_return_mean")
    figure = "" if value is None else f" eval_return_mean={value:.2f}"
    _say(f"{outcome.state} {job.name}{figure}{': ' if outcome.message else ''}{outcome.message}")


def _print_tuned(result: TuneResult, *, as_json: bool) -> None:
    from rl_training.sweeps.tuning import iqm_with_interval

    facts: dict[str, object] = {
        "best_trial": result.best_trial,
        "best_value": result.best_value,
        "finished": result.finished,
        "pruned": result.pruned,
        "failed": result.failed,
        "best_config": str(result.config_file),
    }
    named = {"held_out": result.held_out} | (
        {"baseline": result.baseline} if result.baseline else {}
    )
    for name, returns in named.items():
        iqm, low, high = iqm_with_interval(returns)
        facts |= {f"{name}_iqm": iqm, f"{name}_low": low, f"{name}_high": high}
    if as_json:
        out.print_json(json.dumps(facts | {"best_settings": result.best_settings}))
        return
    for key, value in result.best_settings.items():
        out.print(f"{key}={value}", markup=False, highlight=False)
    for name, fact in facts.items():
        shown = f"{fact:.4f}" if isinstance(fact, float) else fact
        out.print(f"{name}={shown}", markup=False, highlight=False)

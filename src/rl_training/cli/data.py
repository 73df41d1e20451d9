"""`rl-training data`: look at datasets, check them, gather and convert them."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rl_training.cli.options import whole_option

if TYPE_CHECKING:
    from rl_training.data.datasets.dataset import OfflineDataset
    from rl_training.envs.spec import EnvSpec
    from rl_training.runtime.workflows import LoadedAgent
    from rl_training.tools.collect import CollectPlan

app = typer.Typer(
    name="data",
    help="Inspect, check, collect, make and convert offline datasets.",
    no_args_is_help=True,
)
out = Console(soft_wrap=True, emoji=False)
err = Console(stderr=True, emoji=False)

SourceArgument = Annotated[
    str | None,
    typer.Argument(help="File (.npz, .hdf5), folder of .npy files, or Minari id."),
]
KindOption = Annotated[
    str | None,
    typer.Option(
        help="npz, npy, hdf5, minari (downloads if needed) or random; inferred from the name by "
        "default."
    ),
]
EnvOption = Annotated[
    str | None,
    typer.Option("--env", help="The task: its shapes, action box and time limit are checked too."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SizeOption = Annotated[int, whole_option(help="Transitions of kind random.", min=1)]
SeedOption = Annotated[int, whole_option(help="Seed of everything random.", min=0)]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing target.")]


@app.command()
def inspect(
    source: SourceArgument = None,
    kind: KindOption = None,
    env: EnvOption = None,
    size: SizeOption = 10_000,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show statistics, returns per episode as a histogram, and what was assumed."""
    from rl_training.cli.data_views import print_summary
    from rl_training.data.datasets.summary import summarize

    dataset = _load(source, kind, _spec(env), size=size, seed=seed)
    summary = summarize(dataset)
    if as_json:
        record = summary.as_record() | {"episode_returns": dataset.episode_returns().tolist()}
        out.print_json(json.dumps(_plain(record)))
        return
    print_summary(out, summary, dataset.episode_returns())


@app.command()
def check(
    source: SourceArgument = None,
    kind: KindOption = None,
    env: EnvOption = None,
    size: SizeOption = 10_000,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Check for problems and say what to do; exit code 1 if there are any."""
    from rl_training.cli.data_views import print_findings
    from rl_training.data.datasets.check import as_record, check_dataset

    spec = _spec(env)
    dataset = _load(source, kind, spec, size=size, seed=seed, mark_ends=False)
    findings = check_dataset(dataset, spec)
    faults = [finding for finding in findings if finding.level != "note"]
    if as_json:
        record = {
            "name": dataset.name,
            "rows": len(dataset),
            "episodes": dataset.num_episodes,
            "clean": not faults,
            "findings": [as_record(finding) for finding in findings],
            "notes": dataset.notes,
        }
        out.print_json(json.dumps(record))
    else:
        _print_notes(dataset)
        print_findings(out, findings)
        verdict = f"{len(faults)} faults" if len(faults) != 1 else "1 fault"
        verdict = verdict if faults else "no faults"
        size_text = f"{len(dataset):,} transitions in {dataset.num_episodes:,} episodes"
        out.print(f"{verdict} in {size_text}", style="bold", highlight=False)
        if spec is None:
            hint = dataset.env_id or "ID"
            err.print(f"note: --env {hint} checks the action box and the time limit too")
    if faults:
        raise typer.Exit(1)


@app.command()
def collect(
    target: Annotated[
        str, typer.Argument(help="File (.npz, .hdf5), folder with --to npy, or a new Minari id.")
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Run whose policy acts; random actions by default.")
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", help="The task; a checkpoint has its own.")
    ] = None,
    steps: Annotated[int | None, whole_option(help="Transitions to collect.")] = None,
    episodes: Annotated[int | None, whole_option(help="Whole episodes to collect.")] = None,
    seed: SeedOption = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The policy's best action, without sampling.")
    ] = False,
    epsilon: Annotated[float, typer.Option(help="Share of actions that are random.")] = 0.0,
    max_episode_steps: Annotated[
        int | None, whole_option(help="Truncate episodes after this many steps.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="npz, npy, hdf5 or minari.")] = None,
    force: ForceOption = False,
) -> None:
    """Collect a dataset with a checkpoint's policy or a random one."""
    from rl_training.errors import DataError
    from rl_training.tools.collect import CollectPlan

    format_ = _target_kind(target, to, force)
    if format_ != "minari":  # absolute: the task may change the working directory
        target = str(Path(target).absolute())
    agent = _agent(checkpoint)
    if agent is None and env is None:
        raise DataError("collect needs --checkpoint, or --env for a random policy")
    kwargs: dict[str, Any] = {}
    if agent is not None and env in (None, agent.config.env_id):
        kwargs = dict(agent.config.env_kwargs)
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    plan = CollectPlan(
        env_id=env or (agent.config.env_id if agent else ""),
        env_kwargs=kwargs,
        steps=steps,
        episodes=episodes,
        seed=seed,
        deterministic=deterministic,
        epsilon=epsilon,
    )
    dataset = _collected(plan, agent)
    _write(dataset, target, format_, force, plan, None if agent is None else agent.config.algo)


@app.command()
def make(
    name: Annotated[
        str | None,
        typer.Argument(help="What to make, such as ogbench/cube-single-play-singletask."),
    ] = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for it; datasets/NAME by default."),
    ] = None,
    rows: Annotated[
        int | None,
        whole_option(help="Training rows, in whole episodes; the published number by default."),
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(help="Share of the published episodes, such as 0.1.")
    ] = None,
    seed: Annotated[
        int | None, whole_option(help="Seed of the episodes; 0 by default.", min=0)
    ] = None,
    jobs: Annotated[
        int | None, whole_option(help="Processes; one per core by default.", min=1)
    ] = None,
    validation: Annotated[
        bool, typer.Option(help="Make the validation split, a tenth, as well.")
    ] = True,
    run: Annotated[
        Path | None,
        typer.Option(help="locomotion: a finished run of SAC; one is trained by default."),
    ] = None,
    train_steps: Annotated[
        int | None, whole_option(help="locomotion: steps of a run that is trained.", min=1)
    ] = None,
    force: ForceOption = False,
    listed: Annotated[bool, typer.Option("--list", help="List what can be made.")] = False,
) -> None:
    """Make a benchmark's dataset by its authors' recipe; run again to continue."""
    from rl_training.cli.making import Wanted, make_dataset, print_recipes
    from rl_training.errors import DataError

    if listed:
        print_recipes(out)
        return
    if name is None:
        raise DataError("say what to make; `rl-training data make --list` shows what there is")
    wanted = Wanted(
        name=name,
        out=out_folder,
        rows=rows,
        fraction=fraction,
        seed=seed,
        jobs=jobs,
        validation=validation,
        run=run,
        train_steps=train_steps,
        force=force,
    )
    made = make_dataset(err, wanted)
    for one in made:
        for key, value in one.items():
            out.print(f"{key}={value}", markup=False, highlight=False)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="File, folder of .npy files, or Minari id.")],
    target: Annotated[
        str, typer.Argument(help="File (.npz, .hdf5), folder with --to npy, or a new Minari id.")
    ],
    kind: KindOption = None,
    to: Annotated[str | None, typer.Option(help="npz, npy, hdf5 or minari.")] = None,
    force: ForceOption = False,
) -> None:
    """Write a dataset in another format; a folder of .npy files can be memory-mapped."""
    import tempfile

    format_ = _target_kind(target, to, force)
    if format_ != "npy":
        _converted(source, kind, target, format_, force, None)
        return
    # Beside the target, so that a file larger than memory is unpacked to where there is room.
    place = Path(target).absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".convert.", dir=place) as folder:
        _converted(source, kind, target, format_, force, Path(folder))


def _converted(
    source: str, kind: str | None, target: str, to: str, force: bool, folder: Path | None
) -> None:
    dataset = _load(source, kind, None, allow_nan=False, unpack_into=folder)
    _print_notes(dataset)
    _write(dataset, target, to, force)


def _load(
    source: str | None,
    kind: str | None,
    env_spec: EnvSpec | None,
    *,
    size: int = 10_000,
    seed: int = 0,
    allow_nan: bool = True,
    mark_ends: bool = True,
    unpack_into: Path | None = None,
) -> OfflineDataset:
    from rl_training.data.datasets.sources import kind_of_source, load_transition_dataset
    from rl_training.errors import DataError

    if source is None and kind != "random":
        raise DataError("name a file, a folder or a Minari id (or --kind random with --env)")
    chosen = kind or kind_of_source(source or "")
    return load_transition_dataset(
        chosen,
        path=source if chosen != "minari" else None,
        dataset_id=source if chosen == "minari" else None,
        size=size,
        seed=seed,
        env_spec=env_spec,
        allow_nan=allow_nan,
        mark_ends=mark_ends,
        # An id that was only guessed to be one is not asked for on the network.
        download=kind is not None,
        unpack_into=unpack_into,
    )


def _target_kind(target: str, to: str | None, force: bool) -> str:
    """Return the format to write, before any work is done."""
    from rl_training.data.datasets.minari import ID_FORM
    from rl_training.data.datasets.sources import KINDS, SUFFIXES
    from rl_training.errors import DataError
    from rl_training.validation import suggest

    allowed = [kind for kind in KINDS if kind != "random"]
    if to is not None and to not in allowed:
        raise DataError(f"--to {to} is not a format{suggest(to, allowed)}")
    path = Path(target)
    found = to or SUFFIXES.get(path.suffix.lower())
    if found is None:
        found = "minari" if ID_FORM.fullmatch(target) else None
    if found is None:
        raise DataError(
            f"the format of {target} cannot be inferred from its name (.npz, .hdf5 or an id such "
            "as pendulum/medium-v0); say it with --to"
        )
    if found != "minari" and path.exists() and not force:
        raise DataError(f"{target} exists already; choose another name, or replace it with --force")
    return found


def _write(
    dataset: OfflineDataset,
    target: str,
    kind: str,
    force: bool,
    plan: CollectPlan | None = None,
    algorithm: str | None = None,
) -> None:
    """Write a dataset and print `name=value` lines about it."""
    from rl_training.data.datasets.minari import write_minari
    from rl_training.data.datasets.writers import save_dataset

    if kind == "minari":
        env = None
        if plan is not None:
            from rl_training.envs.factory import make_env

            env = make_env(plan.env_id, plan.env_kwargs)
        write_minari(dataset, target, env=env, algorithm=algorithm)
        if env is not None:
            env.close()
    else:
        save_dataset(dataset, Path(target), kind, force=force)
    returns = dataset.episode_returns()
    lines = {
        "dataset_kind": kind,
        "dataset_id" if kind == "minari" else "dataset_path": target,
        "transitions": len(dataset),
        "episodes": dataset.num_episodes,
        "return_mean": f"{returns.mean():.4f}",
        "digest": dataset.digest(),
    }
    for name, value in lines.items():
        out.print(f"{name}={value}", markup=False, highlight=False)


def _collected(plan: CollectPlan, agent: LoadedAgent | None) -> OfflineDataset:
    from rich.progress import Progress

    from rl_training.tools.collect import collect_dataset

    shown = Progress(console=err, transient=True) if err.is_terminal else nullcontext()
    with shown as progress:
        if progress is None:
            return collect_dataset(plan, agent)
        unit = "steps" if plan.episodes is None else "episodes"
        task = progress.add_task(f"collecting {unit}", total=plan.steps or plan.episodes)
        return collect_dataset(plan, agent, lambda done: progress.update(task, completed=done))


def _agent(checkpoint: Path | None) -> LoadedAgent | None:
    if checkpoint is None:
        return None
    from rl_training.runtime.workflows import load_agent

    return load_agent(checkpoint, device="cpu")


def _spec(env: str | None) -> EnvSpec | None:
    if env is None:
        return None
    from rl_training.envs.factory import probe_env

    return probe_env(env)


def _print_notes(dataset: OfflineDataset) -> None:
    for note in dataset.notes:
        err.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _plain(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(float, lambda number: number if math.isfinite(number) else None, value)

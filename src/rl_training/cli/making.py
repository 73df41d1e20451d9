"""What `data make` shows: what there is, how far the work is, what to do with the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rl_training.tools.recipes.ogbench_sets import MadeSet
    from rl_training.tools.recipes.shards import Progress

PLAIN_SECONDS = 30.0
"""Time between two lines where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of `data make`."""

    name: str
    out: Path | None = None
    rows: int | None = None
    fraction: float | None = None
    seed: int | None = None
    jobs: int | None = None
    validation: bool = True
    run: Path | None = None
    train_steps: int | None = None
    force: bool = False


def make_dataset(console: Console, wanted: Wanted) -> list[dict[str, Any]]:
    """Make a dataset by its name; returns `name=value` facts about each split.

    Raises:
        DataError: When there is nothing of that name, or it cannot be made.
    """
    from rl_training.errors import DataError

    family, _, own = wanted.name.partition("/")
    if family not in _MAKERS or not own:
        raise DataError(
            f"{wanted.name!r} cannot be made; what can be is named ogbench/TASK or locomotion/TASK,"
            " for instance ogbench/cube-single-play-singletask or locomotion/hopper-medium "
            "(`rl-training data make --list` shows all)"
        )
    try:
        return _MAKERS[family](console, own, wanted)
    except KeyboardInterrupt:
        raise DataError(
            f"{wanted.name}: interrupted; finished parts are kept, and the same command continues "
            "from there"
        ) from None


def _make_ogbench(console: Console, own: str, wanted: Wanted) -> list[dict[str, Any]]:
    from rl_training.envs.backends.mujoco_batch import usable_cores
    from rl_training.errors import DataError
    from rl_training.tools.recipes.ogbench_sets import NO_REWARDS, Request, make_ogbench

    if wanted.run is not None or wanted.train_steps is not None:
        raise DataError("--run and --train-steps are for locomotion/TASK alone")
    request = Request(
        name=own,
        out=wanted.out,
        rows=wanted.rows,
        fraction=wanted.fraction,
        seed=wanted.seed,
        jobs=usable_cores() if wanted.jobs is None else wanted.jobs,
        validation=wanted.validation,
        force=wanted.force,
    )
    with shown_progress(console, wanted.name) as on_progress:
        made = make_ogbench(request, on_progress)
    if "task" not in made[0].dataset.provenance:
        console.print(f"note: {NO_REWARDS}", markup=False, highlight=False, soft_wrap=True)
    return [_facts(one) for one in made]


def _make_locomotion(console: Console, own: str, wanted: Wanted) -> list[dict[str, Any]]:
    from rl_training.cli.display import display_for
    from rl_training.tools.recipes.locomotion import Request, make_locomotion

    request = Request(
        name=own,
        run=wanted.run,
        out=wanted.out,
        rows=wanted.rows,
        fraction=wanted.fraction,
        seed=wanted.seed or 0,
        train_steps=wanted.train_steps,
        force=wanted.force,
    )
    display = display_for(console, quiet=False)
    with shown_progress(console, wanted.name, bar=False) as on_progress:
        path, dataset = make_locomotion(request, on_progress, (display,))
    provenance = dataset.provenance
    return [
        {
            "dataset_path": _near(path),
            "env": dataset.env_id,
            "transitions": len(dataset),
            "episodes": dataset.num_episodes,
            "digest": dataset.digest(),
            **{k: f"{v:.2f}" for k, v in provenance["scores"].items()},
            "behaviour_return": f"{provenance['behaviour_return']:.2f}",
            "behaviour_score": f"{provenance['behaviour_score']:.2f}",
        }
    ]


_MAKERS: dict[str, Callable[[Console, str, Wanted], list[dict[str, Any]]]] = {
    "ogbench": _make_ogbench,
    "locomotion": _make_locomotion,
}


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _facts(made: MadeSet) -> dict[str, Any]:
    prefix = "" if made.split == "train" else f"{made.split}_"
    provenance = made.dataset.provenance
    facts = {
        "dataset_path": _near(made.path),
        "env": made.dataset.env_id,
        "transitions": len(made.dataset),
        "trajectories": provenance.get("episodes"),
        "digest": made.dataset.digest(),
        "made": "before" if made.reused else "now",
    }
    if "rows_at_goal" in provenance:
        facts["rows_at_goal"] = provenance["rows_at_goal"]
    return {f"{prefix}{key}": value for key, value in facts.items()}


@contextmanager
def shown_progress(
    console: Console, name: str, *, bar: bool = True
) -> Iterator[Callable[[Progress], None]]:
    """Show how far the work is: a bar with rate and time left, or a line now and then.

    Without `bar` there are lines everywhere: something else draws on the terminal.
    """
    if not console.is_terminal or not bar:
        yield _lines(console, name)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import (
        Progress as Bar,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task(name, total=None, rate="")

        def update(progress: Progress) -> None:
            drawn.update(task, total=progress.total, completed=progress.rows, rate=_rate(progress))

        yield update


def _lines(console: Console, name: str) -> Callable[[Progress], None]:
    last = -PLAIN_SECONDS

    def update(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_SECONDS and progress.rows < progress.total:
            return
        last = now
        text = f"{name}: {progress.rows:,} of {progress.total:,} rows {_rate(progress)}"
        console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)

    return update


def _rate(progress: Progress) -> str:
    if progress.rate is None or progress.seconds_left is None:
        return ""
    left = timedelta(seconds=round(progress.seconds_left))
    return f"{progress.rate:,.0f} rows/s, {left} left"


def print_recipes(console: Console) -> None:
    """List what can be made, with the published sizes."""
    from rl_training.cli.tables import print_rows
    from rl_training.tools.recipes.ogbench import NUM_TASKS, RECIPES
    from rl_training.tools.recipes.ogbench_sets import FAMILY

    cells = [
        (f"{FAMILY}/{name}", f"{recipe.rows:,}", f"{recipe.episodes:,}", recipe.env_id())
        for name, recipe in RECIPES.items()
    ]
    print_rows(console, ("name", "rows", "episodes", "environment"), cells)
    from rl_training.tools.recipes.locomotion import LEVELS, ROWS, TASKS

    console.print(
        "Each has single tasks with rewards: NAME-singletask (the default task), "
        f"NAME-singletask-task1 to -task{NUM_TASKS}.",
        highlight=False,
    )
    levels = [
        (f"locomotion/{task}-{level}", "" if "replay" in level else f"{rows:,}", "", env_id)
        for task, env_id in TASKS.items()
        for level in LEVELS
        for rows in (2 * ROWS if level == "medium-expert" else ROWS,)
    ]
    console.print()
    print_rows(console, ("name", "rows", "", "environment"), levels)
    console.print("Made from a run of SAC: --run RUN, or one is trained first.", highlight=False)

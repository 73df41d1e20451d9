"""What `data make` shows: what there is, how far the work is, what to do with the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rl_training.tools.recipes.ogbench_sets import MadeSet
    from rl_training.tools.recipes.shards import Progress

PLAIN_SECONDS = 30.0
"""Time between two lines where there is no terminal."""


def make_dataset(
    console: Console,
    name: str,
    *,
    out: Path | None,
    rows: int | None,
    fraction: float | None,
    seed: int | None,
    jobs: int | None,
    validation: bool,
    force: bool,
) -> list[dict[str, Any]]:
    """Make a dataset by its name; returns `name=value` facts about each split.

    Raises:
        DataError: When there is nothing of that name, or it cannot be made.
    """
    from rl_training.envs.backends.mujoco_batch import usable_cores
    from rl_training.errors import DataError
    from rl_training.tools.recipes.ogbench_sets import FAMILY, NO_REWARDS, Request, make_ogbench

    family, _, own = name.partition("/")
    if family != FAMILY or not own:
        raise DataError(
            f"{name!r} cannot be made; what can be is named {FAMILY}/TASK, for instance "
            f"{FAMILY}/cube-single-play-singletask (`rl-training data make --list` shows all)"
        )
    request = Request(
        name=own,
        out=out,
        rows=rows,
        fraction=fraction,
        seed=seed,
        jobs=usable_cores() if jobs is None else jobs,
        validation=validation,
        force=force,
    )
    try:
        with shown_progress(console, name) as on_progress:
            made = make_ogbench(request, on_progress)
    except KeyboardInterrupt:
        raise DataError(
            f"{name}: interrupted; finished parts are kept, and the same command goes on from there"
        ) from None
    if "task" not in made[0].dataset.provenance:
        console.print(f"note: {NO_REWARDS}", markup=False, highlight=False, soft_wrap=True)
    return [_facts(one) for one in made]


def _facts(made: MadeSet) -> dict[str, Any]:
    prefix = "" if made.split == "train" else f"{made.split}_"
    provenance = made.dataset.provenance
    path = Path(made.path)
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    facts = {
        "dataset_path": near,
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
def shown_progress(console: Console, name: str) -> Iterator[Callable[[Progress], None]]:
    """Show how far the work is: a bar with rate and time left, or a line now and then."""
    if not console.is_terminal:
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
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None, rate="")

        def update(progress: Progress) -> None:
            bar.update(task, total=progress.total, completed=progress.rows, rate=_rate(progress))

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
    console.print(
        "Each has single tasks with rewards: NAME-singletask (the default task), "
        f"NAME-singletask-task1 to -task{NUM_TASKS}.",
        highlight=False,
    )

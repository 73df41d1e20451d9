"""OGBench's datasets as folders of columns: made in shards, or relabelled for a single task.

`cube-single-play` has no rewards, as published: 0 in every row.  Its single tasks have the same
rows with rewards and terminations by the task, which OGBench's own `relabel_dataset` computes.
There, a row in the goal state has mask 0: it is not bootstrapped.  Here it is a termination, which
means the same to every learner; the recording continues after it, and trajectories end truncated.

Shapes: N rows.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from rl_training._version import __version__
from rl_training.data.datasets.blocks import blocks
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.sources import META_FILE, load_transition_dataset
from rl_training.data.datasets.writers import foreign_files
from rl_training.envs.factory import close_env, make_env
from rl_training.envs.ogbench import register_ogbench
from rl_training.errors import DataError
from rl_training.tools.recipes.ogbench import EpisodeMaker, Recipe, find_recipe
from rl_training.tools.recipes.shards import Progress, Work, make_shards

Array = NDArray[Any]
FOLDER = Path("datasets")
FAMILY = "ogbench"
SUFFIXES = {"train": "", "validation": "-val"}
"""Of the folders of the splits, as OGBench names its files."""
NO_REWARDS = "it has no rewards, as published: make NAME-singletask of it to learn from rewards"
_SAME_ROWS = ("observations", "actions", "next_observations", "truncations")
"""Columns that a relabelled set shares with the one it was made of."""
_IDENTITY = ("recipe", "split", "seed", "episodes")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for."""

    name: str
    """`cube-single-play`, or a single task of it."""
    out: Path | None = None
    """Folder of the training split; None takes `datasets/ogbench/NAME`."""
    rows: int | None = None
    """Training rows, rounded up to whole episodes; None goes by `fraction`."""
    fraction: float | None = None
    """Share of the published episodes; None takes all, or what is there already."""
    seed: int | None = None
    """Seed of the episodes; None takes 0, or the seed of what is there already."""
    jobs: int = 1
    """Processes."""
    validation: bool = True
    """Whether to make the validation split as well."""
    force: bool = False
    """Replace what is there."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.fraction is not None:
            raise DataError("give either --rows or --fraction, not both")
        if self.rows is not None and self.rows < 1:
            raise DataError(f"--rows must be >= 1, got {self.rows}")
        if self.fraction is not None and not 0.0 < self.fraction <= 1.0:
            raise DataError(f"--fraction must be above 0 and at most 1, got {self.fraction:g}")
        if self.jobs < 1:
            raise DataError(f"--jobs must be >= 1, got {self.jobs}")

    def episodes(self, recipe: Recipe) -> int | None:
        """Return the number of training episodes asked for; None where nothing is."""
        if self.rows is not None:
            return -(-self.rows // recipe.episode_steps)
        if self.fraction is not None:
            return max(1, round(self.fraction * recipe.episodes))
        return None


@dataclass(frozen=True, kw_only=True)
class MadeSet:
    """A dataset that is there now."""

    path: Path
    split: str
    reused: bool
    """Whether it was there before."""
    dataset: OfflineDataset


def make_ogbench(
    request: Request, on_progress: Callable[[Progress], None] | None = None
) -> list[MadeSet]:
    """Make a dataset of OGBench, or take what is there, and return its splits.

    Raises:
        DataError: When there is no such recipe, something else is in the way, or the disk is full.
        MissingExtraError: OGBench is not installed.
    """
    recipe, task = find_recipe(request.name)
    register_ogbench(f"ogbench/{request.name}")
    label = (
        recipe.name if task is None else f"{recipe.name}{recipe.env_id(task)[len(recipe.env) : -3]}"
    )
    out = (request.out or FOLDER / FAMILY / label).absolute()
    if task is None:
        return _make(recipe, out, request, on_progress)
    base = out.with_name(recipe.name)
    if base == out:
        raise DataError(
            f"{out} is where the rows without rewards belong; choose another --out for "
            f"ogbench/{request.name}"
        )
    made = _make(recipe, base, request, on_progress, as_it_is=True)
    return [_relabelled(recipe, task, one, out, force=request.force) for one in made]


# Making


def _make(
    recipe: Recipe,
    out: Path,
    request: Request,
    on_progress: Callable[[Progress], None] | None,
    *,
    as_it_is: bool = False,
) -> list[MadeSet]:
    """Make both splits; `as_it_is` takes what is there where the request names no size or seed."""
    there = _provenance(out) if as_it_is else {}
    found = {key: value for key, value in there.items() if isinstance(value, int)}
    asked = request.episodes(recipe)
    count = found.get("episodes", recipe.episodes) if asked is None else asked
    seed = found.get("seed", 0) if request.seed is None else request.seed
    episodes = {"train": count}
    if request.validation:
        episodes["validation"] = max(1, count // 10)
    records = {split: _record(recipe, split, number, seed) for split, number in episodes.items()}
    paths = {split: out.with_name(out.name + SUFFIXES[split]) for split in episodes}
    # Rows without rewards are replaced when they are asked for themselves, not on the way.
    force = request.force and not as_it_is
    wanted = [s for s in episodes if force or not _is_there(paths[s], records[s])]
    if wanted:
        work = Work(
            name=f"{FAMILY}/{recipe.name}",
            folder=out.with_name(f".{out.name}.parts"),
            identity={"recipe": f"{FAMILY}/{recipe.name}", "seed": seed, **_versions()},
            episodes={split: episodes[split] for split in wanted},
            episode_steps=recipe.episode_steps,
        )
        with _alone(work.folder):
            maker = EpisodeMaker(recipe, seed)
            make_shards(work, maker, jobs=request.jobs, on_progress=on_progress)
            for split in wanted:
                _assemble(recipe, work, split, records[split], paths[split])
            shutil.rmtree(work.folder)
    return [
        MadeSet(path=paths[s], split=s, reused=s not in wanted, dataset=_loaded(paths[s]))
        for s in episodes
    ]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse to work where another command does."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise DataError(f"another command is at work in {folder}; wait for it") from None
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror or error})") from None
    try:
        yield
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _versions() -> dict[str, str]:
    names = ("ogbench", "mujoco", "dm_control", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def _record(recipe: Recipe, split: str, episodes: int, seed: int) -> dict[str, Any]:
    """Return how a split is made, as its description says it."""
    published = recipe.episodes if split == "train" else recipe.episodes // 10
    return {
        "recipe": f"{FAMILY}/{recipe.name}",
        "split": split,
        "seed": seed,
        "episodes": episodes,
        "episode_steps": recipe.episode_steps,
        "published_episodes": published,
        "noise": recipe.noise,
        "p_random_action": recipe.p_random_action,
        "versions": {**_versions(), "rl_training": __version__},
    }


def _provenance(folder: Path) -> dict[str, Any]:
    """Return how a folder says it was made; nothing where there is none or it does not say."""
    try:
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found = meta.get("provenance") if isinstance(meta, dict) else None
    return found if isinstance(found, dict) else {}


def _is_there(path: Path, wanted: Mapping[str, Any], *extra: str) -> bool:
    """Tell whether the same set has been made already.

    Raises:
        DataError: When something else is there.
    """
    if not path.exists():
        return False
    found = _provenance(path)
    different = [key for key in (*_IDENTITY, *extra) if found.get(key) != wanted.get(key)]
    if not different:
        return True
    what = ", ".join(f"{key} {found.get(key)} instead of {wanted[key]}" for key in different)
    raise DataError(
        f"{path} exists already and is something else ({what}); choose another --out, or replace "
        "it with --force"
    )


def _assemble(
    recipe: Recipe, work: Work, split: str, record: Mapping[str, Any], path: Path
) -> None:
    """Put shards together: a folder of columns that appears when it is complete."""
    part = work.folder / f"assembled-{split}"
    steps, rows = recipe.episode_steps, work.episodes[split] * recipe.episode_steps
    with _folder_at(path, part):
        columns: dict[str, Array] = {}
        done = 0
        for made in work.shards(split):
            shard = made.read()
            observations = shard.pop("observations")
            observations = observations.reshape(-1, steps + 1, *observations.shape[1:])
            flat = (-1, *observations.shape[2:])
            shard["observations"] = observations[:, :-1].reshape(flat)
            shard["next_observations"] = observations[:, 1:].reshape(flat)
            count = len(shard["observations"])
            for name, values in shard.items():
                if name not in columns:
                    columns[name] = _column(part, name, (rows, *values.shape[1:]), values.dtype)
                columns[name][done : done + count] = values
            done += count
        for name, dtype in (("rewards", np.float32), ("terminations", np.bool_)):
            columns[name] = _column(part, name, (rows,), dtype)
        columns["truncations"] = _column(part, "truncations", (rows,), np.bool_)
        columns["truncations"][steps - 1 :: steps] = True
        for column in columns.values():
            column.flush()  # type: ignore[attr-defined]  # they are mapped
        _describe(part, recipe.env_id(), record, (NO_REWARDS,))


def _column(folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a new mapped column; it holds zeros."""
    return np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)


@contextmanager
def _folder_at(path: Path, part: Path) -> Iterator[None]:
    """Have `part` filled, and put it where `path` is to be."""
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield
        if path.is_dir() and not foreign_files(path):
            shutil.rmtree(path)
        elif path.exists():
            raise DataError(f"{path} has other things in it; choose another --out")
        part.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}); run the same command again "
            "when that is fixed, it continues where it was"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _describe(
    folder: Path, env_id: str, record: Mapping[str, Any], notes: tuple[str, ...] = ()
) -> None:
    """Write the description of a folder of columns, with the digest of its rows."""
    source = f"{record['recipe']}, {record['split']}, seed {record['seed']}"
    meta: dict[str, Any] = {"env": env_id, "source": source, "notes": list(notes)}
    (folder / META_FILE).write_text("{}\n", encoding="utf-8")
    meta["provenance"] = dict(record) | {"digest": _loaded(folder).digest()}
    (folder / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _loaded(folder: Path) -> OfflineDataset:
    return load_transition_dataset("npy", path=folder)


# Single tasks


def _relabelled(recipe: Recipe, task: int, base: MadeSet, out: Path, *, force: bool) -> MadeSet:
    """Write the rows of a set once more, with rewards and terminations of a single task."""
    path = out.with_name(out.name + SUFFIXES[base.split])
    there = _provenance(base.path)
    with_task = {**there, "recipe": f"{FAMILY}/{recipe.name}", "of": there.get("digest")}
    env_id = recipe.env_id(task)
    env = make_env(env_id)
    try:
        base_env: Any = env.unwrapped
        record = with_task | {"task": int(base_env._reward_task_id)}
        if not force and _is_there(path, record, "task", "of"):
            return MadeSet(path=path, split=base.split, reused=True, dataset=_loaded(path))
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        with _folder_at(path, part):
            for name in _SAME_ROWS:
                _link(base.path / f"{name}.npy", part / f"{name}.npy")
            goals = _write_rewards(env_id, env, base, part)
            record["rows_at_goal"] = goals
            _describe(part, env_id, record)
    finally:
        close_env(env, env_id)
    return MadeSet(path=path, split=base.split, reused=False, dataset=_loaded(path))


def _write_rewards(env_id: str, env: Any, base: MadeSet, folder: Path) -> int:
    """Write rewards and terminations of a task; returns the rows in its goal."""
    from ogbench.relabel_utils import relabel_dataset

    states: dict[str, Array] = {
        name: np.load(base.path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("qpos", "button_states")
        if (base.path / f"{name}.npy").exists()
    }
    if "qpos" not in states:
        raise DataError(
            f"{base.path}: qpos.npy is missing, by which rewards are computed; make it again with "
            "--force"
        )
    rows = len(base.dataset)
    rewards = _column(folder, "rewards", (rows,), np.float32)
    terminations = _column(folder, "terminations", (rows,), np.bool_)
    for block in blocks(rows, states["qpos"].itemsize * states["qpos"].shape[1]):
        piece = {name: np.asarray(column[block]) for name, column in states.items()}
        relabel_dataset(env_id, env, piece)
        rewards[block] = piece["rewards"]
        terminations[block] = piece["masks"] == 0.0
    return int(terminations.sum())


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the disk knows no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

"""The folder of a group: which runs belong to it, and the newest step that all of them have."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.checkpointing import (
    LoadedCheckpoint,
    list_checkpoints,
    open_checkpoint,
    passed_over,
)
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.runs import member_folders
from rl_training.runtime.checkpoints.header import checked
from rl_training.validation import parse

Warn = Callable[[str], None]
Accept = Callable[[Path, LoadedCheckpoint], None]
_MEMBER = re.compile(r"seed_(\d+)(-.+)?")


def group_folders(path: Path) -> list[Path]:
    """Return the members' folders in the folder of a group, by seed; none in any other folder."""
    if (path / "checkpoints").is_dir() or not path.is_dir():
        return []
    found = [p for p in path.glob("seed_*") if p.is_dir() and _MEMBER.fullmatch(p.name)]
    return sorted(found, key=lambda p: (int(p.name.split("-")[0].removeprefix("seed_")), p.name))


def load_group(
    path: Path,
    folders: Sequence[Path],
    warn: Warn | None,
    components: Collection[str] | None = None,
    accept: Accept | None = None,
) -> tuple[TrainConfig, list[LoadedCheckpoint]]:
    """Load the newest step that every member has whole, or `components` of it.

    `accept` may raise a `CheckpointError` for a member's folder and a checkpoint in it.

    Returns:
        The configuration of the group, and the checkpoints in the order of its members.

    Raises:
        CheckpointError: When a member is missing, or no step is common to all.
    """
    group = _of_those_there(_described(path) or _remembered(path, folders), path)
    loaded = _common_step(member_folders(path, group), warn, components, accept)
    # All but the members is taken from the checkpoints: a run that was extended has another end.
    config = parse(TrainConfig, loaded[0].header["config"])
    return config.replace(seeds=group.seeds, grid=group.grid), loaded


def _described(path: Path) -> TrainConfig | None:
    """Return the configuration in the group's folder, if it can be read."""
    try:
        config = load_config(path / "config.yaml")
    except ConfigError:
        return None
    return config if any((path / member.folder).is_dir() for member in config.members) else None


def _remembered(path: Path, folders: Sequence[Path]) -> TrainConfig:
    """Return the group's configuration as the newest checkpoint of a member knows it."""
    header = checked(open_checkpoint(folders[0], components={"clock"})).header
    group = header.get("group") or {"seeds": header["group_seeds"], "grid": {}}
    seeds, grid = tuple(group["seeds"]), group["grid"]
    config = parse(TrainConfig, header["config"]).replace(seeds=seeds, grid=grid)
    strange = {folder.name for folder in folders} - {member.folder for member in config.members}
    if strange:
        raise CheckpointError(
            f"{path} has no readable config.yaml, and its checkpoints do not know "
            f"{', '.join(sorted(strange))}: put the file back, or resume the members one by one"
        )
    return config


def _of_those_there(config: TrainConfig, path: Path) -> TrainConfig:
    """Leave out seeds whose folders were taken away; a point without all its seeds is an error."""
    there = {member.seed for member in config.members if (path / member.folder).is_dir()}
    seeds = tuple(seed for seed in dict.fromkeys(config.all_seeds) if seed in there)
    kept = config.replace(seeds=seeds)
    missing = [member.folder for member in kept.members if not (path / member.folder).is_dir()]
    if missing:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}: put it back, take the other points of that seed "
            "away too, or resume the members one by one"
        )
    return kept


def _common_step(
    folders: Sequence[Path],
    warn: Warn | None,
    components: Collection[str] | None,
    accept: Accept | None,
) -> list[LoadedCheckpoint]:
    steps = [{entry.step for entry in list_checkpoints(folder)} for folder in folders]
    problems: list[CheckpointError] = []
    for step in sorted(set.intersection(*steps), reverse=True):
        try:
            loaded = [
                checked(
                    open_checkpoint(
                        folder,
                        step=step,
                        components=components,
                        accept=None if accept is None else partial(accept, folder),
                    )
                )
                for folder in folders
            ]
        except CheckpointError as error:
            problems.append(error)
            continue
        for problem in problems if warn else ():
            warn(passed_over(problem))  # type: ignore[misc]
        return loaded
    tried = f" ({'; '.join(map(str, problems))})" if problems else ""
    raise CheckpointError(f"{folders[0].parent} has no step that every seed has whole{tried}")

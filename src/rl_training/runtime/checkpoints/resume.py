"""Which run a path belongs to, and which checkpoints in it to continue from.

A checkpoint is continued in place only inside `<run>/checkpoints/` of the run that wrote it; a copy
anywhere else, be it in the folder of another run, continues in a new folder.  The folder of a group
holds a run for each member, and continues from the newest step that all of them have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.checkpointing import (
    ForeignCheckpoint,
    LoadedCheckpoint,
    checkpoints_dir,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    open_checkpoint,
    passed_over,
)
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.runs import SAVED_FILE, member_folders, read_description, run_id
from rl_training.experiment.yaml_loader import load_yaml
from rl_training.runtime.checkpoints.saver import BEST_FILE, checked
from rl_training.validation import parse

Warn = Callable[[str], None]
Accept = Callable[[Path, LoadedCheckpoint], None]
Start = tuple[TrainConfig, Sequence[LoadedCheckpoint]]
"""A run's configuration, and a checkpoint per member; none begins it."""
_MEMBER = re.compile(r"seed_(\d+)(-.+)?")


def home_of(path: Path) -> Path | None:
    """Return the folder of the run that a path belongs to; None for a copy, which has no run.

    Only what never changes is read, so the folder need not be held yet: descriptions of runs, and
    of a checkpoint that is asked for by its own path.

    Raises:
        CheckpointError: When a checkpoint asked for by its own path is damaged.
    """
    if is_checkpoint(path):
        run = _run_around(_spelled_out(path).parent)
        if run is None or not _belongs(checked(load_checkpoint(path, ())), run):
            return None
        return run
    return path if _is_run(path) else _run_around(_spelled_out(path))


def _spelled_out(path: Path) -> Path:
    """Return a path whose parents are what its words say: not of `.`, nor through `..`."""
    if path.name == "..":
        return path.resolve()
    if ".." in path.parts:
        return path.parent.resolve() / path.name
    return path if len(path.parts) > 2 else path.absolute()


def _run_around(folder: Path) -> Path | None:
    """Return the run whose `checkpoints` a folder is."""
    run = folder.parent
    return run if folder == checkpoints_dir(run) and _is_run(run) else None


def _is_run(folder: Path) -> bool:
    described = run_id(folder) is not None or _described(folder) is not None
    return described or any(_is_run(member) for member in group_folders(folder))


def _described(folder: Path) -> TrainConfig | None:
    """Return the configuration in a folder, if it is one of a run."""
    try:
        return parse(TrainConfig, load_yaml(folder / "config.yaml").data)
    except ConfigError:
        return None


def _belongs(checkpoint: LoadedCheckpoint, run: Path) -> bool:
    """Tell whether a run wrote a checkpoint; without identities their configurations must agree."""
    ours, theirs = run_id(run), checkpoint.header.get("run_id")
    if ours is not None or theirs is not None:
        return ours == theirs
    described = _described(run)
    return described is not None and _plan(described) == _plan(_config_of(checkpoint))


def _plan(config: TrainConfig) -> Mapping[str, Any]:
    """Return what stays the same when a run is made longer."""
    return {k: value for k, value in config.resolved().items() if k != "total_timesteps"}


def _config_of(checkpoint: LoadedCheckpoint) -> TrainConfig:
    return parse(TrainConfig, checkpoint.header["config"])


def _require_own(run: Path, checkpoint: LoadedCheckpoint) -> None:
    if not _belongs(checked(checkpoint), run):
        raise ForeignCheckpoint(
            f"{checkpoint.path} is a checkpoint of another run than that of {run}; give its own "
            "path to continue from it in a new run"
        )


def find_start(path: Path, home: Path | None, warn: Warn | None) -> Start:
    """Return what a run continues from; `home` must be held, or be None.

    Raises:
        CheckpointError: When there is nothing to continue from.
    """
    group = group_folders(path)
    never_saved = None if home is None else _without_checkpoint(path, group)
    if never_saved is not None:
        if warn is not None:
            warn(f"{path} was stopped before its first checkpoint: it starts from its beginning")
        return never_saved, ()
    if group:
        return load_group(path, group, warn, accept=None if home is None else _require_own)
    accept = None if home is None else partial(_require_own, home)
    loaded = checked(open_checkpoint(path, warn=warn, accept=accept))
    return _config_of(loaded), [loaded]


def _without_checkpoint(path: Path, group: Sequence[Path]) -> TrainConfig | None:
    """Return the configuration of a run that was stopped before its first checkpoint, or None."""
    steps = [{entry.step for entry in list_checkpoints(folder)} for folder in group or (path,)]
    # A group killed in its first save has that one step, but not of every member.
    begun = len(set().union(*steps)) > 1 or bool(set.intersection(*steps))
    if begun or not (path / "config.yaml").is_file():
        return None
    continues = read_description(path).get("continues")
    if continues is not None:
        raise CheckpointError(
            f"{path} was stopped before its first checkpoint; resume {continues} again, from which "
            "it was to continue"
        )
    config = load_config(path / "config.yaml")
    for folder in group or (path,):
        if _has_been_saved(folder, config):
            raise CheckpointError(
                f"{folder} has had checkpoints, but {checkpoints_dir(folder)} holds none that can "
                "be continued from; put them back, or train again from the beginning into another "
                f"folder with `rl-training train --config {path / 'config.yaml'}`"
            )
    return config


def _has_been_saved(folder: Path, config: TrainConfig) -> bool:
    """Tell whether a run has had a checkpoint; older versions left no mark, but other traces."""
    traces = (SAVED_FILE, BEST_FILE)
    if any((folder / name).exists() for name in traces) or any(folder.glob("superseded-*")):
        return True
    # The line of the step at which one is due is written first; a later one proves that it was.
    steps = {row["step"] for row in read_metrics(folder)}
    return len([step for step in steps if step >= config.checkpoint_interval > 0]) > 1


# -- groups ---------------------------------------------------------------------------------------


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
    group = _of_those_there(_described_group(path) or _remembered(path, folders), path)
    loaded = _common_step(member_folders(path, group), warn, components, accept)
    # All but the members is taken from the checkpoints: a run that was extended has another end.
    config = parse(TrainConfig, loaded[0].header["config"])
    return config.replace(seeds=group.seeds, grid=group.grid), loaded


def _described_group(path: Path) -> TrainConfig | None:
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

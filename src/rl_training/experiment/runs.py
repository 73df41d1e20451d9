"""The folder of a run: its name, what it says about itself, its identity and its lock.

A run has a random id, in the `run.json` of its folder and in each of its checkpoints, by which a
checkpoint is known for the run's own; members of a group have one each.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rl_training._version import __version__
from rl_training.errors import ConfigError, RLTrainingError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.git_state import git_state
from rl_training.experiment.registry import get_algorithm_spec

RUN_FILE = "run.json"
SAVED_FILE = ".saved"
"""Says that a run has had a checkpoint, wherever that may be now."""
REPORTED_PACKAGES = ("torch", "numpy", "gymnasium", "safetensors", "pydantic", "mujoco", "ale-py")


def create_run_folder(
    config: TrainConfig,
    run_suffix: str | None = None,
    *,
    continues: Path | None = None,
    parent: Path | None = None,
) -> Path:
    """Make the folder of a new run, with its configuration and circumstances in it.

    The folder appears whole, in one step: a process that dies here leaves either nothing under that
    name or a run that `resume` can begin.

    Args:
        config: The run.
        run_suffix: Appended to the name of the folder.
        continues: Checkpoint that the run continues from; a `run_name` that is taken gets a number
            then.
        parent: Where to make it; None takes the configuration's `output_dir`.

    Raises:
        ConfigError: When `run_name` is taken, or the folder cannot be made.
    """
    name = config.run_name or _automatic_name(config)
    if run_suffix:
        name = f"{name}_{run_suffix}"
    parent = Path(config.output_dir) if parent is None else parent
    staged = parent / f".new-{name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        files.make_parents(parent)
        files.make_dir(staged)
        try:
            _describe_run(staged, config, continues)
            unique = config.run_name is None or continues is not None
            return _publish(staged, parent, name, unique=unique)
        except BaseException:
            files.remove_tree(staged)
            raise
    except OSError as error:
        raise ConfigError(
            f"output_dir {str(parent)!r}: no folder can be made there ({error.strerror})"
        ) from None


def new_run(
    config: TrainConfig, run_suffix: str | None = None, *, continues: Path | None = None
) -> AbstractContextManager[Path]:
    """Make the folder of a new run when entered, and hold it.

    The arguments are those of `create_run_folder`. Where it will be is settled by this call: the
    user's code may change the working directory before the folder is made.
    """
    return _held_new_run(config, run_suffix, continues, Path(config.output_dir).absolute())


@contextmanager
def _held_new_run(
    config: TrainConfig, run_suffix: str | None, continues: Path | None, parent: Path
) -> Iterator[Path]:
    path = create_run_folder(config, run_suffix, continues=continues, parent=parent)
    with run_lock(path):
        yield path


def _describe_run(path: Path, config: TrainConfig, continues: Path | None) -> None:
    from rl_training.transfer import device_name  # torch, which finding runs does without

    system = describe_system() | {"device": device_name(config.device)}
    if continues is not None:
        system |= {"continues": str(continues.resolve())}
    for member, folder in zip(config.members, member_folders(path, config), strict=True):
        if folder != path:
            files.make_dir(folder)
            _write_description(folder, system)
        _write_text(folder / "config.yaml", config.for_member(member).to_yaml())
        files.fsync_dir(folder)
    if config.is_group:
        _write_text(path / "config.yaml", config.to_yaml())
    _write_description(path, system)
    files.fsync_dir(path)


def _write_description(folder: Path, system: Mapping[str, Any]) -> None:
    described = {"id": secrets.token_hex(16), **system}
    _write_text(folder / RUN_FILE, json.dumps(described, indent=2))


def read_description(folder: Path) -> dict[str, Any]:
    """Return what `run.json` says; nothing where there is none that can be read."""
    path = folder / RUN_FILE
    if not files.is_plain(path):
        return {}
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return described if isinstance(described, dict) else {}


def run_id(folder: Path) -> str | None:
    """Return the identity of the run in a folder; runs of older versions have none."""
    known = read_description(folder).get("id")
    return known if isinstance(known, str) and known else None


def mark_saved(folder: Path) -> None:
    """Note in a run's folder that it has a checkpoint; from then on it never starts over."""
    mark = folder / SAVED_FILE
    if not mark.exists():
        with files.advise(f"writing {mark}"):
            files.write_file(
                mark, [b"This run has had a checkpoint: resume never starts it over.\n"]
            )
            files.fsync_dir(folder)


def _write_text(path: Path, text: str) -> None:
    files.write_file(path, [text.encode("utf-8")])


def member_folders(path: Path, config: TrainConfig) -> list[Path]:
    """Return the folder of each member: the run's own, or one below it per member of a group."""
    if not config.is_group:
        return [path]
    return [path / member.folder for member in config.members]


def _automatic_name(config: TrainConfig) -> str:
    algo, env = (
        re.sub(r"[^A-Za-z0-9._-]+", "_", name)
        for name in (get_algorithm_spec(config.algo).name, config.env_id)
    )
    different = list(dict.fromkeys(config.all_seeds))
    seeds = "-".join(str(seed) for seed in different[:4])
    more = f"-and-{len(different) - 4}-more" if len(different) > 4 else ""
    grid = "".join(f"_{name}" for name in ("grid", *config.grid)) if config.grid else ""
    time = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{algo}_{env}_seed{seeds}{more}{grid}_{time}"


def _publish(staged: Path, parent: Path, name: str, *, unique: bool) -> Path:
    """Give a finished folder its name, or one like it that is free."""
    for attempt in range(1000):
        path = parent / (name if attempt == 0 else f"{name}_{attempt}")
        if _renamed(staged, path):
            files.fsync_dir(parent)
            return path
        if not unique:
            raise ConfigError(
                f"run_name {name!r} is taken: {path} exists; choose another, or continue it "
                f"with `rl-training resume --checkpoint {path}`"
            )
    raise ConfigError(f"output_dir {str(parent)!r} already holds 1000 runs named {name}")


def _renamed(staged: Path, path: Path) -> bool:
    if path.exists():
        return False
    try:
        files.rename(staged, path)
    except OSError as error:
        # Another process was faster, and its folder is not empty.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def describe_system() -> dict[str, Any]:
    """Return what the run ran on: versions, machine, command and state of the git repository."""
    versions = {package: _version(package) for package in REPORTED_PACKAGES}
    return {
        "rl_training": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": versions,
        "command": sys.argv,
        "git": git_state(Path.cwd()),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Hold the run's folder, so that two processes never train in it at once.

    A group holds its members too, while members may be resumed beside each other.

    Raises:
        RLTrainingError: When another process holds it.
    """
    members = [folder for folder in sorted(path.glob("seed_*")) if folder.is_dir()]
    with ExitStack() as stack:
        for folder in (path, *members):
            stack.enter_context(_held(folder))
        yield


@contextmanager
def _held(path: Path) -> Iterator[None]:
    lock = FileLock(path / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RLTrainingError(
            f"{path} is in use by another process; wait for it to end, or train into another folder"
        ) from None
    except OSError as error:
        raise RLTrainingError(f"{path} cannot be written to ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


def is_hub_name(path: str | Path) -> bool:
    """Whether a text is meant to name an agent on the hub."""
    return str(path).startswith("hf:")

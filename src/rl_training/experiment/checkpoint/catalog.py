"""The checkpoints of a run: listing them, choosing the newest good one, deleting old ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.files import CheckpointEntry
from rl_training.experiment.checkpoint.load import (
    ATTEMPTS,
    LoadedCheckpoint,
    load_checkpoint,
    verify_checkpoint,
)
from rl_training.experiment.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify_sizes

Warn = Callable[[str], None]
Accept = Callable[[LoadedCheckpoint], None]
_T = TypeVar("_T")


class ForeignCheckpoint(CheckpointError):
    """A checkpoint of another run than the one whose folder it is in."""


def list_checkpoints(run_dir: Path | str) -> list[CheckpointEntry]:
    """Return (step, path) of every checkpoint folder of a run, oldest step first, unverified."""
    return files.step_entries(files.checkpoints_dir(run_dir))


def resolve_checkpoint(
    path: Path | str,
    *,
    step: int | None = None,
    components: Collection[str] | None = None,
    warn: Warn | None = None,
) -> Path:
    """Return the checkpoint folder meant by a checkpoint, a `checkpoints` or a run folder.

    Of the latter two it is the newest that verifies, or exactly `step` if given; a checkpoint
    folder is returned as it is, since loading verifies it.

    Args:
        path: A checkpoint folder, a `checkpoints` folder or a run folder.
        step: The one step to take; there is no fallback then.
        components: What to verify (None: everything).
        warn: Told of each damaged checkpoint that was passed over; a log message by default.

    Raises:
        CheckpointError: None is good; the message lists what was tried.
    """
    path = Path(path)

    def check(found: Path) -> Path:
        verify_checkpoint(found, components)
        return found

    if is_checkpoint(path):
        return _only_step(path, step)
    return _first_good(path, step, check, warn)


def open_checkpoint(
    path: Path | str,
    *,
    step: int | None = None,
    components: Collection[str] | None = None,
    warn: Warn | None = None,
    accept: Accept | None = None,
) -> LoadedCheckpoint:
    """Resolve and load in one go: safe while a trainer saves and prunes, and hashed only once.

    Arguments and errors are those of `resolve_checkpoint` and `load_checkpoint`; `accept` may raise
    a `CheckpointError` for one that must not be used, which is then passed over too.
    """
    path = Path(path)

    def load(found: Path) -> LoadedCheckpoint:
        loaded = load_checkpoint(found, components)
        if accept is not None:
            accept(loaded)
        return loaded

    if is_checkpoint(path):
        return load(_only_step(path, step))
    return _first_good(path, step, load, warn)


def is_checkpoint(path: Path) -> bool:
    """Tell whether a path is that of one checkpoint, not of a folder that holds some."""
    return files.step_of(path) is not None or (path / MANIFEST_NAME).exists()


def _only_step(path: Path, step: int | None) -> Path:
    if step is not None and read_manifest(path).step != step:
        raise CheckpointError(
            f"{path} is not the checkpoint of step {step}; give the run folder to choose a step."
        )
    return path


def _entries(path: Path, step: int | None) -> list[CheckpointEntry]:
    """Return the candidates under a run or `checkpoints` folder, newest first."""
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder {path}; give a run folder or one of its checkpoints."
        )
    inner = files.checkpoints_dir(path)
    entries = files.step_entries(inner if os.path.lexists(inner) else path)[::-1]
    chosen = [entry for entry in entries if step is None or entry.step == step]
    if not chosen:
        known = ", ".join(str(entry.step) for entry in entries[::-1]) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{path} holds no checkpoint{wanted}; its steps are: {known}.")
    return chosen


def _first_good(path: Path, step: int | None, use: Callable[[Path], _T], warn: Warn | None) -> _T:
    """Return `use` of the newest candidate for which it does not raise."""
    tell = warn or logging.getLogger(__name__).warning
    for _ in range(ATTEMPTS):
        entries = _entries(path, step)
        failures: list[CheckpointError] = []
        for entry in entries:
            found = _attempt(use, entry.path)
            if not isinstance(found, CheckpointError):
                for failure in failures:
                    tell(passed_over(failure))
                return found
            failures.append(found)
            if not os.path.lexists(entry.path):
                break  # not damaged but pruned or replaced while we read: look again
        # All failed: if the trainer has pruned or replaced them meanwhile, there are new ones.
        if _entries(path, step) == entries:
            break
    kind = CheckpointError
    if all(isinstance(failure, ForeignCheckpoint) for failure in failures):
        kind = ForeignCheckpoint
    reasons = " | ".join(map(str, failures))
    raise kind(f"{path} has no good checkpoint; tried {len(failures)}: {reasons}")


def passed_over(failure: CheckpointError) -> str:
    """Say which checkpoint was not used, and why."""
    foreign = isinstance(failure, ForeignCheckpoint)
    kind = "checkpoint of another run" if foreign else "damaged checkpoint"
    return f"{kind} passed over: {failure}"


def _attempt(use: Callable[[Path], _T], path: Path) -> _T | CheckpointError:
    try:
        return use(path)
    except CheckpointError as error:
        return error


def prune_checkpoints(
    run_dir: Path | str, keep_last: int, protect: Collection[int] = ()
) -> list[int]:
    """Delete all but the newest `keep_last` good checkpoints and the steps in `protect`.

    A checkpoint counts as good when its manifest is intact and every file has its size.  Damaged
    ones do not count, so the only good one is never deleted whatever stands above it.

    Returns:
        The steps that were deleted.

    Raises:
        CheckpointError: `keep_last` is below 1, or a folder cannot be deleted.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept.")
    good, removed = 0, []
    for step, path in reversed(list_checkpoints(run_dir)):
        if good < keep_last:
            good += _looks_good(path)
        elif step not in protect:
            with files.advise(f"deleting {path}"):
                files.discard(path, path.parent / f"step_{step}")
            removed.append(step)
    return removed


def _looks_good(path: Path) -> bool:
    try:
        verify_sizes(path, read_manifest(path), None)
    except CheckpointError:
        return False
    return True

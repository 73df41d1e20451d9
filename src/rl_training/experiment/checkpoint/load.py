"""Finding and loading checkpoints: all that is asked for is verified before any of it is returned.

A run's newest good one is found among damaged ones, while a trainer may be saving and pruning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import decode_tensors, unflatten_state
from rl_training.experiment.checkpoint.files import CheckpointEntry
from rl_training.experiment.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    state_path,
    verify_digests,
    verify_sizes,
)
from rl_training.experiment.checkpoint.segments import Segmented, read_segments

_T = TypeVar("_T")

ATTEMPTS = 20
"""How often a reader looks again when the trainer replaced or pruned what it was reading."""


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A verified checkpoint: header and states in memory, rows of replays read when asked for."""

    path: Path
    step: int
    header: dict[str, Any]
    states: dict[str, Any]
    manifest: Manifest

    def segment_range(self, name: str) -> tuple[int, int] | None:
        """Return (oldest kept, total inserted) of a segmented component, None if it has none."""
        table = self.manifest.table(name)
        return (table.oldest, table.total) if table else None

    def read_segments(self, name: str) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield (start, rows [1, rows, ...]) in order, verified once more as they are read."""
        return read_segments(self.path, self.manifest, name)

    def restore_segments(self, name: str, target: Segmented) -> None:
        """Load every kept row of component `name` into `target`."""
        restore_seed_segments([self], name, target)


def restore_seed_segments(
    checkpoints: Sequence[LoadedCheckpoint], name: str, target: Segmented
) -> None:
    """Load the rows of several seeds, one checkpoint each, into one target [S, rows, ...].

    Raises:
        CheckpointError: The checkpoints hold different rows, or a file is damaged.
    """
    ranges = {checkpoint.segment_range(name) for checkpoint in checkpoints}
    if len(ranges) != 1:
        raise CheckpointError(
            f"the checkpoints to be joined hold different rows of {name!r} ({ranges}); take "
            f"checkpoints of one group at one step."
        )
    for parts in zip(*(c.read_segments(name) for c in checkpoints), strict=True):
        start, first = parts[0]
        if any(other != start or rows.keys() != first.keys() for other, rows in parts):
            raise CheckpointError(f"the checkpoints to be joined segment {name!r} differently.")
        joined = {field: torch.cat([rows[field] for _, rows in parts]) for field in first}
        target.load_rows(start, joined)


def verify_checkpoint(path: Path | str, components: Collection[str] | None = None) -> Manifest:
    """Check manifest, sizes and digests of `components` (None: all, and no extra files).

    Raises:
        CheckpointError: Something is missing, damaged or foreign; the message names the file.
    """

    def verify(where: Path) -> Manifest:
        manifest = read_manifest(where)
        names = verify_sizes(where, manifest, components)
        verify_digests(where, manifest, names)
        return manifest

    return _while_steady(Path(path), verify)


def load_checkpoint(
    path: Path | str, components: Collection[str] | None = None
) -> LoadedCheckpoint:
    """Read a checkpoint folder once all that is asked for has been verified.

    With `components` given, only their states and rows are verified and read, so that prediction
    does not touch a replay of gigabytes.

    Raises:
        CheckpointError: Missing, damaged or foreign; the message names the file.
    """
    return _while_steady(Path(path), lambda where: _load(where, components))


def _while_steady(path: Path, read: Callable[[Path], _T]) -> _T:
    """Return `read` of the folder, starting again whenever a trainer replaced it meanwhile."""
    for _ in range(ATTEMPTS):
        where = _locate(path)
        before = _identity(where)
        try:
            return read(where)
        except CheckpointError as error:
            failure = error
        now = _locate(path)
        if (now, _identity(now)) == (where, before):
            break  # the same folder at the same place: the damage is real
    raise failure


def _locate(path: Path) -> Path:
    """Return where the folder is now; a crash or replacement may have it set aside."""
    step = files.step_of(path)
    if step is None or os.path.lexists(path):
        return path
    return dict(files.step_entries(path.parent)).get(step, path)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Tell one folder from another that takes its name, and maybe its inode, later."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _load(path: Path, components: Collection[str] | None) -> LoadedCheckpoint:
    manifest = read_manifest(path)
    known = {*manifest.states, *(table.name for table in manifest.segments)}
    unknown = sorted(set(components or ()) - known)
    if unknown:
        raise CheckpointError(
            f"{path} has no component {unknown[0]!r}; it has {', '.join(sorted(known))}."
        )
    names = verify_sizes(path, manifest, components)
    # Files of states are hashed by _read_tensors, on the bytes that are then decoded.
    states_only = {state_path(name) for name in manifest.states}
    verify_digests(path, manifest, [name for name in names if name not in states_only])
    states = {
        name: unflatten_state(structure, _read_tensors(path, manifest, name))
        for name, structure in manifest.states.items()
        if components is None or name in components
    }
    return LoadedCheckpoint(
        path=path,
        step=manifest.step,
        header=unflatten_state(manifest.header, {}),
        states=states,
        manifest=manifest,
    )


def _read_tensors(path: Path, manifest: Manifest, component: str) -> dict[str, Tensor]:
    name = state_path(component)
    if name not in manifest.files:
        return {}
    where = f"{path}: {name}"
    return decode_tensors(files.read_checked(path / name, manifest.files[name], where), where)


# -- which checkpoint -----------------------------------------------------------------------------


Warn = Callable[[str], None]
Accept = Callable[[LoadedCheckpoint], None]


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
        step: The one step to take, without a fallback.
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
        advice = (
            f"its steps are: {known}" if entries else "give a run folder, or one of its checkpoints"
        )
        raise CheckpointError(f"{path} holds no checkpoint{wanted}; {advice}.")
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

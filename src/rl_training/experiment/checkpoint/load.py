"""Loading a checkpoint: everything asked for is verified before anything is returned."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import unflatten_state
from rl_training.experiment.checkpoint.manifest import (
    Manifest,
    read_manifest,
    state_path,
    verify_digests,
    verify_sizes,
)
from rl_training.experiment.checkpoint.segments import Segmented, read_segments
from rl_training.experiment.checkpoint.tensors import decode_tensors

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

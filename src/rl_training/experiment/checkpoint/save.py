"""Saving a checkpoint: staged beside its place, made durable, then moved there in one step.

Old ones are deleted once newer ones are good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_training._version import __version__
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import encode_tensors, flatten_state
from rl_training.experiment.checkpoint.files import FileRecord
from rl_training.experiment.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_FILES,
    SCHEMA_VERSION,
    SEGMENT_FOLDER,
    Manifest,
    check_component_name,
    read_manifest,
    state_path,
    utc_now,
    verify_sizes,
)
from rl_training.experiment.checkpoint.segments import Segmented, SegmentWriter
from rl_training.experiment.checkpoint.single import encode_plain


def save_checkpoint(
    run_dir: Path | str,
    step: int,
    *,
    header: Mapping[str, Any],
    states: Mapping[str, Any],
    segmented: Mapping[str, Segmented] | None = None,
    seed_index: int = 0,
    previous: Path | str | None = None,
) -> Path:
    """Write the checkpoint of `step` and return its folder.

    Args:
        run_dir: The run; its `checkpoints` folder is made if missing.
        step: Number of the checkpoint; one that exists is replaced.
        header: What the caller wants to know before any state is read: config, env spec, counters.
        states: Component to state tree, of this seed alone (`slice_seed`).
        segmented: Component to append-only storage; the name may also be in `states`.
        seed_index: Which seed's rows of `segmented` are stored.
        previous: Checkpoint this run saved or resumed from last, to link full segments from;
            None takes the newest readable one that is not later than `step`.

    Raises:
        CheckpointError: Something cannot be stored, or the disk refuses; older ones are untouched.
    """
    if type(step) is not int or not 0 <= step < 10**18:
        raise CheckpointError(
            f"checkpoint step is {step!r}; it must be an int from 0 to 10**18 - 1."
        )
    final = files.checkpoints_dir(run_dir) / f"step_{step}"
    staged = files.hidden_path(final, "tmp")
    with files.advise(f"saving {final}"):
        files.make_parents(final.parent)
        files.sweep(final.parent)
        source = _linkable(final.parent, step, previous) if segmented else None
        with _staging(staged):
            writer = SegmentWriter(folder=staged, seed_index=seed_index, previous=source)
            _write_all(writer, step, header, states, segmented or {})
            files.publish(staged, final)
    return final


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[None]:
    """Make a folder that is gone again if what happens inside fails."""
    files.make_dir(folder)
    try:
        yield
    except BaseException:
        # Whatever cannot be removed now is swept by the next save; the first error matters.
        with contextlib.suppress(OSError):
            if folder.exists():
                files.remove_tree(folder)
        raise


def _linkable(folder: Path, step: int, previous: Path | str | None) -> tuple[Path, Manifest] | None:
    """Return the checkpoint to link segments from, or None to write all of them."""
    candidates = [Path(previous)] if previous is not None else [
        entry.path for entry in reversed(files.step_entries(folder)) if entry.step <= step
    ]  # fmt: skip
    for path in candidates:
        # A damaged one does not prevent a save; none of its files can be linked.
        with contextlib.suppress(CheckpointError):
            return path, read_manifest(path)
    return None


def _write_all(
    writer: SegmentWriter,
    step: int,
    header: Mapping[str, Any],
    states: Mapping[str, Any],
    segmented: Mapping[str, Segmented],
) -> None:
    """Fill the staged folder; the manifest comes last."""
    structures: dict[str, Any] = {}
    records: dict[str, FileRecord] = {}
    for name, state in states.items():
        structures[check_component_name(name)], tensors = flatten_state(state)
        if tensors:
            path = state_path(name)
            records[path] = files.write_file(writer.folder / path, encode_tensors(tensors))
    tables = []
    if segmented:
        files.make_dir(writer.folder / SEGMENT_FOLDER)
        for name, part in segmented.items():
            table, written = writer.write(name, part)
            tables.append(table)
            records |= written
        files.fsync_dir(writer.folder / SEGMENT_FOLDER)
    if len(records) > MAX_FILES:
        raise CheckpointError(
            f"the checkpoint would have {len(records)} files; at most {MAX_FILES} are allowed, so "
            f"use longer segments."
        )
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        package_version=__version__,
        created=utc_now(),
        step=step,
        header=encode_plain(header, "header"),
        states=structures,
        files=records,
        segments=tuple(tables),
    )
    files.write_file(writer.folder / MANIFEST_NAME, [manifest.to_bytes()])
    files.fsync_dir(writer.folder)


def prune_checkpoints(
    run_dir: Path | str, keep_last: int, protect: Collection[int] = ()
) -> list[int]:
    """Delete all but the newest `keep_last` good checkpoints and the steps in `protect`.

    A checkpoint counts as good when its manifest is intact and every file has its size.  Damaged
    ones do not count, so the only good one is never deleted whatever is above it.

    Returns:
        The steps that were deleted.

    Raises:
        CheckpointError: `keep_last` is below 1, or a folder cannot be deleted.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept.")
    good, removed = 0, []
    for step, path in reversed(files.step_entries(files.checkpoints_dir(run_dir))):
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

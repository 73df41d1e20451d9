"""Checkpoints: folders `<run>/checkpoints/step_<n>/` that are whole, verified, never pickled.

A checkpoint is `manifest.json`, one safetensors file per component with tensors, and the rows of
replays in `segments/`.  It appears under its name in one step, after everything in it has reached
the disk; it is verified against sizes and digests before anything of it is returned.  Readers need
no lock.  One process at a time may write to a run; the run's own lock sees to that.
"""

from rl_training.experiment.checkpoint.files import CheckpointEntry, FileRecord, checkpoints_dir
from rl_training.experiment.checkpoint.load import (
    ForeignCheckpoint,
    LoadedCheckpoint,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    open_checkpoint,
    passed_over,
    resolve_checkpoint,
    restore_seed_segments,
    verify_checkpoint,
)
from rl_training.experiment.checkpoint.manifest import SCHEMA_VERSION, Manifest, read_manifest
from rl_training.experiment.checkpoint.save import prune_checkpoints, save_checkpoint
from rl_training.experiment.checkpoint.segments import Segmented
from rl_training.experiment.checkpoint.single import SingleFile, load_single_file, save_single_file

__all__ = [
    "SCHEMA_VERSION",
    "CheckpointEntry",
    "FileRecord",
    "ForeignCheckpoint",
    "LoadedCheckpoint",
    "Manifest",
    "Segmented",
    "SingleFile",
    "checkpoints_dir",
    "is_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_single_file",
    "open_checkpoint",
    "passed_over",
    "prune_checkpoints",
    "read_manifest",
    "resolve_checkpoint",
    "restore_seed_segments",
    "save_checkpoint",
    "save_single_file",
    "verify_checkpoint",
]

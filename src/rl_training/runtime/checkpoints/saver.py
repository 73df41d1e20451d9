"""Turns the registered parts of a run into checkpoints, one per seed, and back.

The header of a checkpoint says what run it is of: `Saver` writes it, and `checked` looks at it
before any of it is used.  The manifest's digest shows that a header was not damaged, not that it is
honest.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from rl_training.envs.spec import EnvSpec
from rl_training.errors import CheckpointError, ConfigError, NonFiniteError, RLTrainingError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import slice_seed, stack_seeds
from rl_training.experiment.checkpointing import (
    LoadedCheckpoint,
    list_checkpoints,
    prune_checkpoints,
    restore_seed_segments,
    save_checkpoint,
)
from rl_training.experiment.config import MAX_THREADS, TrainConfig
from rl_training.experiment.runs import mark_saved, run_id
from rl_training.runtime.health.diagnostics import non_finite
from rl_training.state import require_same_keys, tensors_in
from rl_training.validation import parse

BEST_FILE = "best.json"
_Count = Annotated[int, Field(ge=0)]


class Part(Protocol):
    """Anything a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore the state; may return messages for the user."""
        ...


ADJUSTMENTS = "adjustments"
"""Part of a checkpoint that says what callbacks have changed."""
AHEAD = "ahead"
"""Part of a checkpoint that holds the next action, where it was chosen already."""
SUCCESSES = "successes"
"""Part of a checkpoint that says which episodes of the last evaluation succeeded."""
ACTING_ONLY = "acting_only"
"""Says in a file's header that its learner is what acting needs, and nothing to train with."""
LATER_PARTS = (ADJUSTMENTS, AHEAD, SUCCESSES)
"""Parts that checkpoints have not always had."""


class RunHeader(BaseModel):
    """The fields that loops and workflows read; a newer version may write more."""

    model_config = ConfigDict(strict=True, extra="ignore")

    run_id: str | None = None
    config: dict[str, Any]
    env_spec: dict[str, Any]
    seed: _Count
    log_offset: _Count
    best_step: Annotated[int, Field(ge=-1)]
    resume_level: str
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)]
    device: str
    group: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None
    rewards: list[float] | None = None
    notes: list[str] | None = None


class Saver:
    """Writes and reads the checkpoints of a run."""

    def __init__(
        self,
        config: TrainConfig,
        env_spec: EnvSpec,
        folders: Sequence[Path],
        resume_level: Callable[[], str],
        notes: Sequence[str] = (),
    ) -> None:
        self._notes = list(notes)
        self.config, self.env_spec, self.folders = config, env_spec, list(folders)
        self._resume_level = resume_level
        self._run_ids = [run_id(folder) for folder in folders]
        self.origins: list[dict[str, Any]] = []
        """Where the first parameters of each member came from, if not from its seed."""
        self.newest: list[Path] = []
        self._newest_step = -1
        grid = {name: list(values) for name, values in config.grid.items()}
        self._group = {"seeds": list(dict.fromkeys(config.all_seeds)), "grid": grid}

    def is_saved(self, step: int) -> bool:
        """Tell whether the newest checkpoint is of this step."""
        return step == self._newest_step

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        *,
        log_offsets: Sequence[int],
        best_steps: Sequence[int],
    ) -> list[Path]:
        """Write one checkpoint per seed, then drop those no longer kept.

        On a full disk older checkpoints are dropped and the save is tried once more.

        Raises:
            NonFiniteError: When a part holds NaN or infinity; nothing is written then.
            CheckpointError: When the disk refuses; older checkpoints stay.
        """
        states = {name: part.state_dict() for name, part in parts.items()}
        _require_finite(states, step)
        try:
            self._write(step, parts, states, log_offsets, best_steps)
        except CheckpointError as error:
            if not _is_full(error):
                raise
            # Older ones are worth less than the run.  The last step that all members have stays,
            # whatever some of them have written since, and so does the best.
            for folder, best in zip(self.folders, best_steps, strict=True):
                prune_checkpoints(folder, 1, protect={best, self._newest_step})
            self._write(step, parts, states, log_offsets, best_steps)
        for folder, best in zip(self.folders, best_steps, strict=True):
            mark_saved(folder)
            _write_best(folder, best)
            prune_checkpoints(folder, self.config.keep_checkpoints, protect={best})
        return self.newest

    def _write(
        self,
        step: int,
        parts: Mapping[str, Any],
        states: Mapping[str, Any],
        log_offsets: Sequence[int],
        best_steps: Sequence[int],
    ) -> None:
        segmented = {name: part for name, part in parts.items() if _has_segments(part)}
        self.newest = [
            save_checkpoint(
                folder,
                step,
                header=self._header(index, log_offsets[index], best_steps[index])
                | {"device": parts["learner"].device.type, "rewards": list(rewards_of(parts))},
                states={name: slice_seed(state, index) for name, state in states.items()},
                segmented=segmented,
                seed_index=index,
                previous=self.newest[index] if self.newest else None,
            )
            for index, folder in enumerate(self.folders)
        ]
        self._newest_step = step

    def space_warnings(self, parts: Mapping[str, Any]) -> list[str]:
        """Return a note when the checkpoints of the whole run would not fit onto the disk."""
        needed = bytes_of_checkpoints(parts, self.config.keep_checkpoints)
        free = shutil.disk_usage(self.folders[0]).free
        if needed <= free:
            return []
        return [
            f"checkpoints of this run will need about {needed / 2**30:.1f} GiB, but "
            f"{free / 2**30:.1f} GiB are free at {self.folders[0]}: free space, keep fewer, or "
            "make the replay smaller"
        ]

    def _header(self, index: int, log_offset: int, best_step: int) -> dict[str, Any]:
        member = self.config.members[index]
        return {
            "run_id": self._run_ids[index],
            "config": self.config.for_member(member).resolved(),
            "group": self._group,
            "env_spec": self.env_spec.model_dump(mode="json"),
            "seed": member.seed,
            "log_offset": log_offset,
            "best_step": best_step,
            "resume_level": self._resume_level(),
            "threads": torch.get_num_threads(),
            "origin": self.origins[index] if self.origins else None,
            "notes": self._notes,
        }

    def take_up(
        self, loaded: Sequence[LoadedCheckpoint], continues: Path | None = None
    ) -> list[str]:
        """Continue after the checkpoints that the parts were restored from; returns messages.

        Args:
            loaded: One per member.
            continues: What was given to continue from, when that is not in the run's own folder.
        """
        origins = [checkpoint.header.get("origin") for checkpoint in loaded]
        self.origins = [origin for origin in origins if origin is not None]
        if not self.config.is_group:  # a member that continues alone still belongs to its group
            self._group = loaded[0].header.get("group", self._group)
        if continues is not None:
            folder = self.folders[0].parent if self.config.is_group else self.folders[0]
            return [
                f"{continues} continues in a new run, {folder}, whose log starts at step "
                f"{loaded[0].step}: only a checkpoint in the folder of its own run is continued in "
                "place"
            ]
        self.newest = [checkpoint.path for checkpoint in loaded]
        self._newest_step = loaded[0].step
        messages: list[str] = []
        for checkpoint, folder in zip(loaded, self.folders, strict=True):
            messages += set_newer_aside(folder, checkpoint.step)
        return messages


def checked(loaded: LoadedCheckpoint) -> LoadedCheckpoint:
    """Return a checkpoint whose description can be relied on.

    Raises:
        CheckpointError: Naming what is missing or wrong in it.
    """
    check_header(loaded.header, loaded.path)
    return loaded


def check_header(header: object, path: Path) -> None:
    """Refuse a description that lacks something or has it of another type."""
    try:
        if not isinstance(header, Mapping):
            raise ConfigError(f"it is a {type(header).__name__}")
        parse(RunHeader, header)
    except ConfigError as error:
        raise CheckpointError(
            f"{path} describes its run in a way that cannot be used ({error}); it was not written "
            f"by this package, so use another checkpoint."
        ) from None


def restore_parts(loaded: Sequence[LoadedCheckpoint], parts: Mapping[str, Any]) -> list[str]:
    """Put saved states back into the parts; returns messages for the user.

    Raises:
        CheckpointError: When a state cannot be used.
    """
    messages: list[str] = []
    # Older checkpoints lack these: no callback could change anything, no action was chosen ahead.
    missing = {name for name in LATER_PARTS for saved in loaded if name not in saved.states}
    parts = {name: part for name, part in parts.items() if name not in missing}
    for checkpoint in loaded:
        require_same_keys(parts, checkpoint.states, str(checkpoint.path))
    for name, part in parts.items():
        state = stack_seeds([checkpoint.states[name] for checkpoint in loaded])
        with usable(name, str(loaded[0].path)):
            messages += part.load_state_dict(state) or []
            if _has_segments(part):
                restore_seed_segments(loaded, name, part)
    before, now = loaded[0].header["device"], parts["learner"].device.type
    if before != now:
        messages.append(
            f"the run was saved on {before} and continues here on {now}: not bit-exactly, "
            "and with other random numbers"
        )
    had, has = loaded[0].header["threads"], torch.get_num_threads()
    if had != has and now == "cpu":
        messages.append(
            f"the run was saved with threads={had} and continues with threads={has}: it is not "
            f"bit-exact from here on (resume with --threads {had} where that matters)"
        )
    return messages


def _is_full(error: CheckpointError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def usable(name: str, where: str) -> Iterator[None]:
    """Turn what goes wrong in taking over a state of the wrong form into one sentence.

    Raises:
        CheckpointError: Naming the part; errors that are sentences already pass.
    """
    try:
        yield
    except RLTrainingError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: the state of {name} cannot be used ({type(error).__name__}: "
            f"{str(error)[:200]}); it was not written by this package, so use another checkpoint."
        ) from error


def bytes_of_checkpoints(parts: Mapping[str, Any], keep: int) -> int:
    """Return about how many bytes the checkpoints of a run come to, its replay being full.

    Rows of the replay are stored once, whatever the number of checkpoints; beside those kept there
    may be the best, and the one being written.
    """
    learner = sum(t.nbytes for t in tensors_in(parts["learner"].state_dict()).values())
    segmented = [part for part in parts.values() if _has_segments(part)]
    tables = [tensors_in(getattr(part, "rows", None)) for part in segmented]
    rows = sum(tensor.nbytes for table in tables for tensor in table.values())
    return (keep + 2) * learner + rows


def set_newer_aside(folder: Path, step: int) -> list[str]:
    """Move checkpoints after `step` out of the way: the run continues and will write others."""
    newer = [entry for entry in list_checkpoints(folder) if entry.step > step]
    if not newer:
        return []
    # Folders cannot be renamed onto another disk, where a link may have put all of them.
    home = files.checkpoints_dir(folder)
    parent = home if home.is_symlink() else folder
    aside = parent / f"superseded-{datetime.now(timezone.utc).strftime('%Y%m%d-%H%M%S-%f')}"
    with files.advise(f"moving later checkpoints to {aside}"):
        files.make_dir(aside)
        # The newest first: what a crash leaves behind must not be followed by a gap.
        for entry in reversed(newer):
            files.rename(entry.path, aside / f"step_{entry.step}")
        files.fsync_dir(aside)
        files.fsync_dir(home)
    steps = ", ".join(str(entry.step) for entry in newer)
    return [f"continuing from step {step}; later checkpoints ({steps}) were moved to {aside}"]


def rewards_of(parts: Mapping[str, Any]) -> tuple[float, float]:
    """Return what a run does to its rewards: a factor, and what is added."""
    replay = parts.get("replay")
    return (1.0, 0.0) if replay is None else (replay.reward_scale, replay.reward_shift)


def _has_segments(part: object) -> bool:
    return getattr(part, "segment_range", None) is not None


def _require_finite(states: Mapping[str, Any], step: int) -> None:
    bad = non_finite(states)
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise NonFiniteError(
            f"{bad[0]}{more} holds NaN or infinity at step {step}, so no checkpoint was written; "
            "the last one is good. Lower learning_rate or scale the rewards and resume from it"
        )


def _write_best(folder: Path, step: int) -> None:
    """Say which checkpoint is the best, for people and for `--best`."""
    if not (files.checkpoints_dir(folder) / f"step_{step}").is_dir():
        return  # never evaluated, or in the folder of the run that this one continues
    text = json.dumps({"step": step, "path": f"checkpoints/step_{step}"})
    temporary = folder / f".{BEST_FILE}.tmp"
    with files.advise(f"writing {folder / BEST_FILE}"):
        files.remove_file(temporary)  # a process that died while writing may have left one
        files.write_file(temporary, [text.encode()])
        files.rename(temporary, folder / BEST_FILE)
        files.fsync_dir(folder)

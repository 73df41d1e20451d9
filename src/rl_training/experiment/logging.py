"""Metrics of a run as JSON lines, in TensorBoard files, and at the services that it names.

A resumed run first cuts the JSON lines back to the length the checkpoint remembers, so that no step
is there twice and none is missing.  Where lines were lost it says so, and a line is never
continued by another.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.trackers import Tracker, trackers_for

METRICS_FILE = "metrics.jsonl"
MAX_STEP = 10**18
"""Steps are below this, as those of checkpoints are."""
LARGEST = 1e150
"""Numbers beyond it count as infinite: their squares and sums would be."""


class MetricLogger:
    """Writer of one seed's metrics."""

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        resume_offset: int,
        step: int,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Open the files.

        Args:
            folder: The seed's folder.
            tensorboard: Write TensorBoard files too, when that is installed.
            resume_offset: Length of the JSON lines when the checkpoint was written; 0 if new.
            step: Step the run continues from; TensorBoard drops what came after it.
            trackers: Services that get the metrics too; a resumed run hands them its log so far,
                and they leave out what they have.
        """
        self.path = folder / METRICS_FILE
        self.note: str | None = None
        """What there is to say about lines that were lost."""
        if self.path.is_symlink():
            raise CheckpointError(
                f"{self.path} is a link, but a run writes into its own folder only; put the file "
                "itself there"
            )
        if resume_offset and not self.path.exists():
            self.note = f"{self.path} is missing: it starts again after step {step}"
        with files.advise(f"opening {self.path}"):
            # Without a buffer, so that what a full disk refuses is not tried again on closing.
            self._file = io.FileIO(self.path, "a+")
            self._cut_back(resume_offset, step)
        board = tensorboard_tracker(folder / "tensorboard", step) if tensorboard else None
        self._trackers = [*([] if board is None else [board]), *trackers]
        if trackers and resume_offset:
            self._replay(folder, trackers)

    def _cut_back(self, resume_offset: int, step: int) -> None:
        """Cut the lines back to the checkpoint's length, or to the last whole one before it."""
        length = self._file.seek(0, os.SEEK_END)
        kept = min(length, resume_offset)
        self._file.seek(0)
        whole = self._file.read(kept).rfind(b"\n") + 1
        if whole < length:
            self._file.truncate(whole)
        self._file.seek(whole)
        if self.note is None and whole < resume_offset:
            self.note = f"{self.path} lost its last lines: some before step {step} are missing"

    @property
    def offset(self) -> int:
        """Length of the JSON lines so far."""
        return self._file.tell()

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Write one line; `kind` says what they are of.  Non-finite numbers are written as text."""
        line = {"step": step, "kind": kind}
        line |= {name: v if math.isfinite(v) else str(v) for name, v in values.items()}
        self._append(json.dumps(line, allow_nan=False))
        if self._trackers:
            with files.advise(f"writing the metrics of {self.path.parent}"):
                _hand_on(self._trackers, kind, step, values)

    def _append(self, line: str) -> None:
        with files.advise(f"writing {self.path}"):
            files.append(self._file, line.encode() + b"\n")

    def _replay(self, folder: Path, trackers: Sequence[Tracker]) -> None:
        for row in read_metrics(folder):
            values = {n: v for n, v in row.items() if isinstance(v, (int, float)) and n != "step"}
            if values:  # notes have none
                _hand_on(trackers, row["kind"], row["step"], values)

    def log_notes(self, notes: Sequence[str]) -> None:
        """Write what there is to say about the run's data, one line of kind `note` each."""
        for note in notes:
            self._append(json.dumps({"step": 0, "kind": "note", "text": note}))

    def sync(self) -> None:
        """Force the lines to the disk, before a checkpoint refers to them."""
        with files.advise(f"writing {self.path}"):
            os.fsync(self._file.fileno())
            for tracker in self._trackers:
                tracker.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        trackers, self._trackers = self._trackers, []  # may be called twice
        with files.advise(f"writing the metrics of {self.path.parent}"):
            for tracker in trackers:
                tracker.close()


def open_loggers(
    config: TrainConfig, run_dir: Path, folders: Sequence[Path], offsets: Sequence[int], step: int
) -> list[MetricLogger]:
    """Open the logs of a run's members, with the services it names.

    Args:
        config: The run's.
        run_dir: Folder of the run; removed again when a log of a new run cannot be opened.
        folders: Folder of each member.
        offsets: Length of each member's JSON lines in its checkpoint; none begins a new run.
        step: Step the run begins at.

    Raises:
        RLTrainingError: When a log or a new run's service cannot be opened.
    """
    # A run with a checkpoint is never new, even if somebody has removed its log.
    is_new = not offsets and not (folders[0] / METRICS_FILE).exists()
    with ExitStack() as undo:
        if is_new:
            undo.callback(shutil.rmtree, run_dir, ignore_errors=True)
        trackers: list[list[Tracker]] = [[] for _ in folders]
        if config.trackers:
            trackers = trackers_for(config, folders, is_new=is_new)
        loggers = [
            MetricLogger(
                folder,
                tensorboard=config.tensorboard,
                resume_offset=offset,
                step=step,
                trackers=services,
            )
            for folder, offset, services in zip(
                folders, offsets or [0] * len(folders), trackers, strict=True
            )
        ]
        undo.pop_all()
    return loggers


def tensorboard_tracker(folder: Path, step: int) -> Tracker | None:
    """Return a writer of TensorBoard files, or None where that is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None  # the extra is not installed; `doctor` says so
    return TensorBoardTracker(SummaryWriter(str(folder), purge_step=step + 1 if step else None))


class TensorBoardTracker:
    """Event files in the run's folder; a resumed run drops what came after its checkpoint."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Force them to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


def _hand_on(
    trackers: Sequence[Tracker], kind: str, step: int, values: Mapping[str, float]
) -> None:
    named = {n if "/" in n else f"{kind}/{n}": value for n, value in values.items()}
    for tracker in trackers:
        tracker.log(named, step)


def read_metrics(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Read a run's metrics back, one mapping with `step` and `kind` per line.

    Lines that are none are left out: one cut short by a crash, or what somebody else wrote there.
    """
    path = folder / METRICS_FILE
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    rows = [row for line in lines if (row := _parse_line(line)) is not None]
    return [row for row in rows if kind is None or row["kind"] == kind]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    step = row.get("step")
    return row if type(step) is int and 0 <= step < MAX_STEP else None


def number_in(row: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a line; the log holds NaN and infinity as text, others have none."""
    value = row.get(name)
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value)

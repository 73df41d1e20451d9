"""Append-only storage in checkpoints: a replay is saved as immutable segments, each written once.

Rows are named by their absolute insertion index.  Segment k holds rows [k * R, (k + 1) * R); once
full it never changes, so a later checkpoint of the run links to the same file and takes over its
digest.  A save costs the new rows and at most one segment.
"""

# S seeds, R rows per segment

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import (
    decode_tensors,
    digest_tensors,
    encode_tensors,
)
from rl_training.experiment.checkpoint.files import FileRecord
from rl_training.experiment.checkpoint.manifest import (
    SEGMENT_FOLDER,
    Manifest,
    SegmentFile,
    SegmentTable,
    check_component_name,
)

_PROBES = 8
"""Rows compared before a segment of an earlier checkpoint is taken over."""


class Segmented(Protocol):
    """A part with append-only rows.  A row must never change once it is inserted.

    What does change (priorities, cursors, counters) belongs to the part's ordinary state.
    """

    @property
    def segment_rows(self) -> int:
        """Rows per segment file."""

    def segment_range(self) -> tuple[int, int]:
        """Return the insertion index of the oldest row to keep, and the number ever inserted."""

    def read_rows(self, start: int, stop: int) -> Mapping[str, Tensor]:
        """Return rows [start, stop) by insertion index, each field [S, stop - start, ...]."""

    def load_rows(self, start: int, rows: Mapping[str, Tensor]) -> None:
        """Restore rows from index `start` on; called in order of `start`, without gaps."""


@dataclass(frozen=True, kw_only=True)
class SegmentWriter:
    """Writes the segments of one save, linking what an earlier checkpoint already has."""

    folder: Path
    """The staged checkpoint."""
    seed_index: int
    """Which seed's rows are stored."""
    previous: tuple[Path, Manifest] | None
    """The checkpoint to link from."""

    def write(self, name: str, part: Segmented) -> tuple[SegmentTable, dict[str, FileRecord]]:
        """Store all kept rows of `part`; returns its table and the files' records."""
        check_component_name(name)
        size, (oldest, total) = part.segment_rows, part.segment_range()
        if size < 1 or not 0 <= oldest <= total:
            raise CheckpointError(
                f"{name} offers rows {oldest} to {total} in segments of {size}; the range must "
                f"not be negative and a segment must hold at least one row."
            )
        entries: list[SegmentFile] = []
        records: dict[str, FileRecord] = {}
        for start in range(oldest - oldest % size, total, size):
            wanted = max(start, oldest), min(start + size, total)
            path = f"{SEGMENT_FOLDER}/{name}-{start // size:012d}.safetensors"
            entry, records[path] = self._store(name, part, path, wanted)
            entries.append(entry)
        table = SegmentTable(
            name=name, segment_rows=size, oldest=oldest, total=total, files=tuple(entries)
        )
        return table, records

    def _store(
        self, name: str, part: Segmented, path: str, wanted: tuple[int, int]
    ) -> tuple[SegmentFile, FileRecord]:
        start, stop = wanted
        earlier = self._find(name, part.segment_rows, start, stop)
        if earlier is not None and self._is_ours(part, earlier):
            record = self._take_over(earlier.path, path)
            if record is not None:
                return replace(earlier, path=path), record
        rows = self._rows(part, start, stop)
        record = files.write_file(self.folder / path, encode_tensors(rows))
        places = range(stop - 1, start - 1, -max(1, part.segment_rows // _PROBES))
        probes = {
            str(place): _probe({f: value[:, place - start, None] for f, value in rows.items()})
            for place in places
        }
        return SegmentFile(path=path, start=start, stop=stop, probes=probes), record

    def _find(self, name: str, size: int, start: int, stop: int) -> SegmentFile | None:
        """Return the earlier file that holds at least these rows and no later ones."""
        table = self.previous[1].table(name) if self.previous else None
        if table is None or table.segment_rows != size:
            return None
        for file in table.files:
            if file.start <= start and file.stop == stop:
                return file
        return None

    def _is_ours(self, part: Segmented, file: SegmentFile) -> bool:
        """Compare a few rows, the last among them, with what the component holds now.

        A run resumed from before the segment was full may have inserted other rows since.
        """
        oldest = part.segment_range()[0]
        return all(
            probe == _probe(self._rows(part, int(place), int(place) + 1))
            for place, probe in file.probes.items()
            if int(place) >= oldest
        )

    def _rows(self, part: Segmented, start: int, stop: int) -> dict[str, Tensor]:
        rows = {}
        for field, value in part.read_rows(start, stop).items():
            if (
                value.ndim < 2
                or value.shape[1] != stop - start
                or value.shape[0] <= self.seed_index
            ):
                raise CheckpointError(
                    f"field {field!r} of rows {start} to {stop} has shape {tuple(value.shape)}; "
                    f"it must be [seeds, {stop - start}, ...] with seed {self.seed_index} in it."
                )
            rows[field] = value[self.seed_index : self.seed_index + 1].detach()
        return rows

    def _take_over(self, source: str, target: str) -> FileRecord | None:
        """Link an earlier segment, or copy it where links are not supported."""
        assert self.previous is not None
        folder, manifest = self.previous
        origin, record = folder / source, manifest.files[source]
        try:
            files.check_size(origin, record, f"{folder}: {source}")
        except CheckpointError:
            return None  # damaged or gone: the rows are still in memory and are written afresh
        try:
            files.link_file(origin, self.folder / target)
        except OSError:
            with files.open_regular(origin, f"{folder}: {source}") as file:
                copied = files.write_file(self.folder / target, files.read_chunks(file))
            if copied != record:
                files.remove_file(self.folder / target)
                return None
        return record


def _probe(row: Mapping[str, Tensor]) -> str:
    return digest_tensors(row)[:16]


def read_segments(
    path: Path, manifest: Manifest, name: str
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (start, rows) of a component in order, [1, rows, ...] each, one segment at a time.

    Raises:
        CheckpointError: The checkpoint has no such rows, or a file of them is damaged.
    """
    table = manifest.table(name)
    if table is None:
        known = ", ".join(table.name for table in manifest.segments) or "none"
        raise CheckpointError(f"{path} has no rows of {name!r}; it has those of: {known}.")
    for file in table.files:
        where = f"{path}: {file.path}"
        rows = decode_tensors(
            files.read_checked(path / file.path, manifest.files[file.path], where), where
        )
        count = file.stop - file.start
        if any(value.ndim < 2 or value.shape[:2] != (1, count) for value in rows.values()):
            raise CheckpointError(
                f"{where} does not hold {count} rows of one seed; it was not written by this "
                f"package."
            )
        start = max(file.start, table.oldest)
        yield start, {field: value[:, start - file.start :] for field, value in rows.items()}

"""Reads what Weights & Biases wrote for a run offline: records in the log format of LevelDB.

The package itself reads these files only in its compiled part, so the framing is taken apart here
and its own message definitions do the rest.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_HEADER, BLOCK = 7, 32768
WHOLE, LAST = 1, 4


@dataclass(frozen=True)
class OfflineRun:
    """One offline file."""

    run_id: str
    name: str
    group: str
    tags: list[str]
    config: dict[str, Any]
    metrics: dict[str, list[tuple[int, float]]]
    """Steps and values of each metric, in the order of the file."""
    exit_code: int | None


def read_offline_runs(folder: Path) -> list[OfflineRun]:
    """Read the offline files below a run's folder, oldest first."""
    paths = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda p: p.parent.name)
    return [_read(path) for path in paths]


def _read(path: Path) -> OfflineRun:
    records = {kind: list[Any]() for kind in ("run", "history", "exit")}
    for record in _records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind in records:
            records[kind].append(getattr(record, kind))
    (run,) = records["run"]
    metrics: dict[str, list[tuple[int, float]]] = {}
    for history in records["history"]:
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item}
        for name in row:
            if not name.startswith("_"):
                metrics.setdefault(name, []).append((row["_step"], row[name]))
    return OfflineRun(
        run_id=run.run_id,
        name=run.display_name,
        group=run.run_group,
        tags=list(run.tags),
        config={item.key: json.loads(item.value_json) for item in run.config.update},
        metrics=metrics,
        exit_code=records["exit"][0].exit_code if records["exit"] else None,
    )


def _records(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    position, parts = FILE_HEADER, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:  # no header fits: the rest of a block is filled up
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record

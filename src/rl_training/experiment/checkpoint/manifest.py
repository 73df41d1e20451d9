"""The manifest of a checkpoint: what it holds, and proof that nothing of it has changed.

`manifest.json` is read from strangers, so everything in it is checked before it is believed: size,
depth and counts against caps, paths against a pattern that leaves no way out of the folder, and
its own text against the digest it carries.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import MAX_DEPTH
from rl_training.experiment.checkpoint.files import FileRecord

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
SEGMENT_FOLDER = "segments"
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_FILES = 100_000
MAX_VALUES = 1_000_000
"""Most values in a manifest: bounds the memory that reading a hostile one can take."""

_DIGEST_FIELD = "manifest_sha256"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_PATH = re.compile(rf"(?:{SEGMENT_FOLDER}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{{0,139}}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class SegmentFile:
    """Rows [start, stop) of a segmented component, by absolute insertion index."""

    path: str
    start: int
    stop: int
    probes: Mapping[str, str]
    """Row index to digest, for a few rows, by which a later save knows the segment for its own."""


@dataclass(frozen=True, kw_only=True)
class SegmentTable:
    """The stored rows of one segmented component."""

    name: str
    segment_rows: int
    oldest: int
    """First row that the component still kept; earlier rows of the first file are ignored."""
    total: int
    """Rows inserted since the beginning, so the index after the newest."""
    files: tuple[SegmentFile, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`, checked."""

    schema_version: int
    package_version: str
    created: str
    """UTC, ISO 8601."""
    step: int
    header: Any
    """Structure of the caller's header; it refers to no tensors."""
    states: Mapping[str, Any]
    """Component to structure, see `codec.py`."""
    files: Mapping[str, FileRecord]
    """Relative path to size and digest, of every file but the manifest."""
    segments: tuple[SegmentTable, ...]

    def to_bytes(self) -> bytes:
        """Return the file's text, with its own digest in it.

        Raises:
            CheckpointError: It would exceed what `read_manifest` accepts.
        """
        fields = {name: getattr(self, name) for name in _FIELDS}
        fields["files"] = {path: asdict(record) for path, record in self.files.items()}
        fields["segments"] = [asdict(table) for table in self.segments]
        return seal(fields, "the checkpoint")

    def table(self, name: str) -> SegmentTable | None:
        """Return the rows of component `name`, if it has any entry."""
        return next((table for table in self.segments if table.name == name), None)

    def files_of(self, components: Collection[str] | None) -> Iterator[str]:
        """Yield the paths that belong to `components` (None: all)."""
        for path in self.files:
            if components is None or path in map(state_path, components):
                yield path
        for table in self.segments:
            if components is not None and table.name in components:
                yield from (file.path for file in table.files)


_FIELDS = tuple(Manifest.__dataclass_fields__)


def utc_now() -> str:
    """Return the time for the field `created`."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def state_path(component: str) -> str:
    """Return where the tensors of a component are stored."""
    return f"{component}.safetensors"


def check_component_name(name: str) -> str:
    """Return `name` if it can be part of a file name, else raise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"component name {name!r} is not allowed; use letters, digits, '_', '-' and '.'."
        )
    return name


# -- sealed JSON: text that carries a digest of itself -------------------------------------------


def seal(fields: Mapping[str, Any], where: str) -> bytes:
    """Return JSON text of `fields` and their digest, within the caps of `unseal`."""
    digest = hashlib.sha256(_canonical(fields)).hexdigest()
    data = _text({**fields, _DIGEST_FIELD: digest})
    _check_caps(data, where)
    return data


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Return the fields of `seal`.

    Raises:
        CheckpointError: Too large, not JSON, of another schema, or changed by as much as a bit.
    """
    _check_caps(data, where)
    try:
        fields = json.loads(data.decode("ascii"), parse_int=_small_int)
        _check_depth(fields, where)
        _check_schema(fields, where)
        intact = _text(fields) == data  # no spelling but our own, so a flip in a space is seen too
        digest = fields.pop(_DIGEST_FIELD, None)
        intact = intact and digest == hashlib.sha256(_canonical(fields)).hexdigest()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is damaged: it is not the JSON of a checkpoint ({type(error).__name__}); "
            f"use another checkpoint."
        ) from error
    if not intact:
        raise CheckpointError(
            f"{where} is damaged: its content does not fit its {_DIGEST_FIELD}; use another "
            f"checkpoint."
        )
    checked: dict[str, Any] = fields
    return checked


def _canonical(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _text(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=1, allow_nan=False).encode("ascii") + b"\n"


def _small_int(text: str) -> int:
    if len(text) > 20:  # the codec writes larger ones as hexadecimal; long decimals cost O(n^2)
        raise ValueError("integer too long")
    return int(text)


def _check_caps(data: bytes, where: str) -> None:
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    for count, cap, unit in (
        (len(data), MAX_MANIFEST_BYTES, "bytes"),
        (values, MAX_VALUES, "values"),
    ):
        if count > cap:
            raise CheckpointError(
                f"{where} has a manifest of {count} {unit}; at most {cap} are allowed, so keep "
                f"long lists of numbers in tensors or arrays."
            )


def _check_depth(node: object, where: str) -> None:
    level: list[object] = [node]
    for _ in range(MAX_DEPTH + 8):  # the manifest's own levels come on top of a tree's
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise CheckpointError(f"{where} is nested deeper than {MAX_DEPTH} levels; it is not ours.")


def _check_schema(fields: object, where: str) -> None:
    version = fields.get("schema_version") if isinstance(fields, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"{where} is damaged: schema_version is {version!r}, not a number from 1 to "
            f"{SCHEMA_VERSION}; use another checkpoint."
        )
    if version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{where} has schema version {version}, newer than {SCHEMA_VERSION}, the newest this "
            f"version of rl-training reads; upgrade rl-training."
        )


# -- reading and checking ------------------------------------------------------------------------


def read_manifest(path: Path | str) -> Manifest:
    """Read and check `manifest.json` of the checkpoint folder `path`; no other file is touched.

    Raises:
        CheckpointError: It is missing, damaged, forged, too large, or of a newer schema.
    """
    path = Path(path)
    where = f"{path}: {MANIFEST_NAME}"
    files.check_folder(path)
    with files.open_regular(path / MANIFEST_NAME, where) as file, files.advise(f"reading {where}"):
        data = file.read(MAX_MANIFEST_BYTES + 1)
    fields = unseal(data, where)
    try:
        return _parse(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where} is not a manifest of schema {SCHEMA_VERSION}: {error}; it was not written by "
            f"this package."
        ) from error


def _parse(fields: dict[str, Any]) -> Manifest:
    _require(set(fields) == set(_FIELDS), "fields", sorted(fields))
    for name, kind in (("package_version", str), ("created", str), ("step", int), ("files", dict),
                       ("states", dict), ("segments", list)):  # fmt: skip
        _require(type(fields[name]) is kind, name, fields[name])
    _require(fields["step"] >= 0, "step", fields["step"])
    count = len(fields["files"])
    _require(count <= MAX_FILES, "number of files", count)
    records = {path: _parse_record(path, value) for path, value in fields["files"].items()}
    tables = tuple(_parse_table(value, records) for value in fields["segments"])
    for name in fields["states"]:
        _require(_NAME.fullmatch(name) is not None, "component name", name)
    owned = [*map(state_path, fields["states"]), *(f.path for t in tables for f in t.files)]
    _require(len(set(owned)) == len(owned), "list of segments", "a file used twice")
    _require(set(records) <= set(owned), "file without owner", set(records) - set(owned))
    return Manifest(**{**fields, "files": records, "segments": tables})


def _parse_record(path: str, value: dict[str, Any]) -> FileRecord:
    _require(_PATH.fullmatch(path) is not None, "path", path)
    record = FileRecord(**value)
    _require(type(record.size) is int and record.size >= 0, f"size of {path}", record.size)
    _require(_is_sha256(record.sha256), f"sha256 of {path}", record.sha256)
    return record


def _parse_table(value: dict[str, Any], records: Mapping[str, FileRecord]) -> SegmentTable:
    table = SegmentTable(**{**value, "files": tuple(SegmentFile(**f) for f in value["files"])})
    _require(_NAME.fullmatch(table.name) is not None, "component name", table.name)
    numbers = [table.segment_rows, table.oldest, table.total]
    numbers += [number for file in table.files for number in (file.start, file.stop)]
    _require(all(type(n) is int and n >= 0 for n in numbers), "segment bounds", numbers[:8])
    position = table.oldest
    for file in table.files:
        _require(file.path in records, "segment file", file.path)
        _require(_are_probes(file.probes, file.start, file.stop), "probes", file.probes)
        # The first file may begin with rows that were dropped since; after it no rows are missing.
        _require(file.start <= position < file.stop, "segment bounds", (file.start, file.stop))
        _require(file.start == position or position == table.oldest, "segment gap", file.start)
        position = file.stop
    _require(position == table.total, "segment end", position)
    return table


def _are_probes(probes: object, start: int, stop: int) -> bool:
    if not isinstance(probes, dict) or str(stop - 1) not in probes or len(probes) > 64:
        return False
    places = [int(place) for place in probes if re.fullmatch(r"[0-9]{1,18}", place)]
    inside = all(start <= place < stop for place in places) and len(places) == len(probes)
    return inside and all(isinstance(probe, str) for probe in probes.values())


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _require(holds: bool, what: str, value: object) -> None:
    if not holds:
        raise ValueError(f"unusable {what} {str(value)[:200]!r}")


def verify_sizes(path: Path, manifest: Manifest, components: Collection[str] | None) -> list[str]:
    """Check that the files of `components` are there, plain and complete; returns their names.

    None means all of them, and that there are no others.  Digests come after this, so that a
    truncated file is found before gigabytes are hashed.
    """
    names = list(manifest.files_of(components))
    _check_segment_folder(path, names)
    if components is None:
        _check_no_extras(path, manifest)
    for name in names:
        files.check_size(path / name, manifest.files[name], f"{path}: {name}")
    return names


def verify_digests(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check the content of the named files."""
    for name in names:
        files.check_digest(path / name, manifest.files[name], f"{path}: {name}")


def _check_segment_folder(path: Path, chosen: list[str]) -> None:
    uses_segments = any(name.startswith(f"{SEGMENT_FOLDER}/") for name in chosen)
    if uses_segments and (path / SEGMENT_FOLDER).is_symlink():
        raise CheckpointError(
            f"{path}: {SEGMENT_FOLDER} is a link; checkpoints hold plain folders only."
        )


def _check_no_extras(path: Path, manifest: Manifest) -> None:
    expected = {MANIFEST_NAME, *manifest.files}
    with files.advise(f"listing {path}"):
        for folder, subfolders, names in os.walk(path, onerror=_raise):
            base = Path(folder).relative_to(path)
            folders = {(base / name).as_posix() for name in subfolders} - {SEGMENT_FOLDER}
            extra = {(base / name).as_posix() for name in names} - expected | folders
            if extra:
                raise CheckpointError(
                    f"{path}: {min(extra)} does not belong to the checkpoint; move it elsewhere."
                )


def _raise(error: OSError) -> None:
    raise error

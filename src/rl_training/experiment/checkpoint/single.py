"""A checkpoint in one file, for evaluation and prediction: safetensors with the manifest inside.

The header of the file carries the sealed manifest, the manifest a digest of all tensors, and the
header must be spelled exactly as this package writes it: no bit of the file is left unguarded.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_training._version import __version__
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import (
    MAX_HEADER_BYTES,
    decode_tensors,
    digest_tensors,
    encode_header,
    encode_tensors,
    flatten_state,
    unflatten_state,
)
from rl_training.experiment.checkpoint.manifest import (
    SCHEMA_VERSION,
    check_component_name,
    seal,
    unseal,
    utc_now,
)
from rl_training.output_files import check_replaceable

_KEY = "rl_training"
_FIELDS = {"schema_version", "package_version", "created", "header", "states", "tensors_sha256"}


@dataclass(frozen=True, kw_only=True)
class SingleFile:
    """What a single-file checkpoint holds, verified."""

    path: Path
    package_version: str
    created: str
    header: dict[str, Any]
    states: dict[str, Any]


def save_single_file(
    path: Path | str, *, header: Mapping[str, Any], states: Mapping[str, Any]
) -> Path:
    """Write `header` and `states` to one file; an older file of that name is replaced at once.

    Raises:
        CheckpointError: Something cannot be stored, or the disk refuses; nothing is left behind.
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    structures: dict[str, Any] = {}
    for name, state in states.items():
        structures[check_component_name(name)], part = flatten_state(state)
        tensors.update({f"{name}{key}": tensor for key, tensor in part.items()})
    fields = {
        "schema_version": SCHEMA_VERSION,
        "package_version": __version__,
        "created": utc_now(),
        "header": encode_plain(header, "header"),
        "states": structures,
        "tensors_sha256": digest_tensors(tensors),
    }
    metadata = {_KEY: seal(fields, str(path)).decode("ascii")}
    staged = path.parent / f".tmp-{path.name}-{os.getpid()}"
    with files.advise(f"writing {path}"):
        check_replaceable(path)
        files.make_parents(path.parent)
        try:
            files.remove_file(staged)
            files.write_file(staged, encode_tensors(tensors, metadata))
            files.rename(staged, path)
            files.fsync_dir(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                files.remove_file(staged)
            raise
    return path


def encode_plain(value: Any, what: str) -> Any:
    """Return a structure for a tree that may not hold tensors or arrays."""
    structure, tensors = flatten_state(value)
    if tensors:
        raise CheckpointError(
            f"the {what} holds a tensor at {min(tensors)}; put tensors into a state instead."
        )
    return structure


def load_single_file(path: Path | str) -> SingleFile:
    """Read and verify a file of `save_single_file`.

    Raises:
        CheckpointError: It is missing, damaged, or no such file.
    """
    path = Path(path)
    where = str(path)
    opened = files.open_regular(path, where, follow_symlinks=True)
    with opened as file, files.advise(f"reading {where}"):
        # The header alone shows whether the file is ours; a foreign one may be of any size.
        data = file.read(8)
        length = struct.unpack("<Q", data)[0] if len(data) == 8 else 0
        data += file.read(length) if length <= MAX_HEADER_BYTES else b""
        fields, metadata = _read_fields(data, where)
        data += file.read()
    tensors = decode_tensors(data, where)
    expected = encode_header(tensors, metadata)
    if data[: len(expected)] != expected or digest_tensors(tensors) != fields["tensors_sha256"]:
        raise CheckpointError(
            f"{where} is damaged: its tensors do not fit its manifest; use another copy."
        )
    return SingleFile(
        path=path,
        package_version=fields["package_version"],
        created=fields["created"],
        header=unflatten_state(fields["header"], {}),
        states=_split_states(fields["states"], tensors),
    )


def _read_fields(data: bytes, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    try:
        if not 0 < length <= min(MAX_HEADER_BYTES, len(data) - 8):
            raise ValueError("no header")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        sealed = metadata[_KEY].encode("ascii")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not a single-file checkpoint of this package, or is damaged; give a file "
            f"that save wrote."
        ) from error
    fields = unseal(sealed, where)
    if set(fields) != _FIELDS or not isinstance(fields["states"], dict) or len(metadata) != 1:
        raise CheckpointError(f"{where} has a manifest with unknown fields; it is not ours.")
    return fields, metadata


def _split_states(structures: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in structures}
    for name, tensor in tensors.items():
        component, slash, rest = name.partition("/")
        parts.setdefault(component, {})[slash + rest] = tensor
    # A component without a structure has tensors left over, which unflatten refuses.
    return {name: unflatten_state(structures.get(name), part) for name, part in parts.items()}

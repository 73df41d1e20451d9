"""Tensors as bytes: the safetensors format, written as a stream and read from memory.

Writing is done here rather than by the safetensors library because a checkpoint file must be hashed
while it is written, and because the library's writer hides the `OSError` of a full disk.  Reading
leaves the hostile part, the header, to the library's own checks of offsets and sizes.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator, Mapping

import safetensors
import torch
from torch import Tensor

from rl_training.errors import CheckpointError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Every dtype a checkpoint can hold, with its name in a safetensors header."""

MAX_TENSORS = 100_000
"""Most tensors in one file or one state tree."""

MAX_HEADER_BYTES = 80 * 2**20
"""Largest safetensors header; a single-file checkpoint carries its manifest there."""

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_METADATA = "__metadata__"


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of `tensor` in row-major order as bytes, copying only if it must."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # With no or one element the stride may be anything, which view refuses.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def encode_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return length field and header of a safetensors file; the same input gives the same bytes."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian; this machine is not, use another.")
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in ordered_names(tensors):
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode("ascii")
    text += b" " * (-len(text) % 8)  # keeps the first tensor aligned for readers that map the file
    return struct.pack("<Q", len(text)) + text


def encode_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file piece by piece, one tensor in memory at a time."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES or name == _METADATA:
            raise CheckpointError(
                f"tensor {name!r} of dtype {tensor.dtype} cannot be stored; allowed are "
                f"{', '.join(sorted(str(dtype) for dtype in DTYPE_NAMES))} under another name "
                f"than {_METADATA!r}, so convert or rename it."
            )
    yield encode_header(tensors, metadata or {})
    for name in ordered_names(tensors):
        yield raw_bytes(tensors[name])


def decode_tensors(data: bytes, where: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file held in memory; `where` names it in errors.

    Raises:
        CheckpointError: The bytes are not a well-formed file within the limits.
    """
    if len(data) < 8 or struct.unpack("<Q", data[:8])[0] > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where} is damaged: it has no header of at most {MAX_HEADER_BYTES} bytes; "
            f"use another copy."
        )
    try:
        views = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # no stubs
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{where} is damaged: {error}; use another copy.") from error
    if len(views) > MAX_TENSORS:
        raise CheckpointError(
            f"{where} holds {len(views)} tensors; at most {MAX_TENSORS} are read, so it was not "
            f"written by this package."
        )
    return {name: _tensor(name, view, where) for name, view in views}


def _tensor(name: str, view: Mapping[str, object], where: str) -> Tensor:
    dtype, shape, data = _DTYPES.get(str(view["dtype"])), view["shape"], view["data"]
    if dtype is None or not isinstance(shape, list) or not isinstance(data, bytes | bytearray):
        raise CheckpointError(
            f"{where}: tensor {name!r} has dtype {view['dtype']}, which this version does not "
            f"read; allowed are {', '.join(_DTYPES)}."
        )
    if len(data) == 0:
        return torch.empty(shape, dtype=dtype)  # frombuffer refuses an empty buffer
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and elements, in an order of its own."""
    digest = hashlib.sha256()
    digest.update(encode_header(tensors, {}))
    for name in ordered_names(tensors):
        digest.update(raw_bytes(tensors[name]))
    return digest.hexdigest()


def ordered_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return names with the widest dtype first, so that every tensor in a file is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))

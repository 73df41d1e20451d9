"""State trees, the one kind of value a checkpoint holds: as JSON and tensors, and back.

A tree is a dict with string keys whose leaves are tensors, numpy arrays, int, float, bool, str or
None; lists and tuples may be anywhere (tuples come back as lists, mappings as dicts).  Integers
of any size, NaN with its bits, and infinities survive.  Memory shared between tensors is not kept:
each comes back on its own, on the CPU.  `envs/plain.py` makes such trees of what environments hold.

Seed axis: in a component's state every tensor or array with at least one axis has the S seeds in
front; 0-d tensors and Python scalars are shared by all seeds; the list under a dict key `per_seed`
holds one arbitrary subtree per seed.

On disk the structure is plain JSON in which an object with a key that starts with one "$" stands
for a leaf: `$tensor` and `$array` refer to a tensor by name, `$int` is a large integer in
hexadecimal, `$float` the eight bytes of a NaN or infinity.  A "$" of the user's own is doubled.

Tensors are safetensors, written as a stream and read from memory.  Writing is done here rather than
by the safetensors library because a checkpoint file must be hashed while it is written, and because
the library's writer hides the `OSError` of a full disk.  Reading leaves the hostile part, the
header, to the library's own checks of offsets and sizes.
"""

# S seeds; leaves are [S, ...] or shared

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import safetensors
import torch
from torch import Tensor

from rl_training.errors import CheckpointError

# A precise recursive alias would force every reader of a state to narrow every level by hand.
StateTree: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

PER_SEED = "per_seed"
"""Key of a list with one subtree per seed."""

MAX_DEPTH = 64
"""Deepest nesting of a tree; far above any real state, far below Python's recursion limit."""

_BIG_INT = 2**53  # beyond it, JSON readers other than Python's would round
_ARRAY_DTYPE = re.compile(r"\|[biu]1|[<>](?:[iu][248]|f[248]|c8)")

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


# -- trees as JSON and tensors --------------------------------------------------------------------


def flatten_state(tree: StateTree) -> tuple[Any, dict[str, Tensor]]:
    """Split `tree` into a JSON-able structure and the tensors it refers to by name.

    The tensors may share memory with the live state: write them before the state changes.

    Raises:
        CheckpointError: A leaf, key or dtype that cannot be stored; the message names its path.
    """
    tensors: dict[str, Tensor] = {}
    structure = _encode(tree, "", 0, tensors)
    if len(tensors) > MAX_TENSORS:
        raise CheckpointError(
            f"the state holds {len(tensors)} tensors; at most {MAX_TENSORS} can be stored, "
            f"so stack small tensors into larger ones."
        )
    return structure, tensors


def unflatten_state(structure: Any, tensors: Mapping[str, Tensor]) -> StateTree:
    """Rebuild the tree of `flatten_state`.

    Raises:
        CheckpointError: A tensor is missing or unused, or the structure is malformed.
    """
    unused = dict(tensors)
    tree = _decode(structure, (), unused)
    if unused:
        raise CheckpointError(
            f"tensor {min(unused)!r} (of {len(unused)} such) belongs to no part of the state; "
            f"the checkpoint was not written by this package."
        )
    return tree


def child_path(path: str, key: str | int) -> str:
    """Extend a JSON pointer, which stays unique whatever characters the keys hold."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _too_deep(path: str) -> CheckpointError:
    return CheckpointError(
        f"state at {path[:80]!r}... is nested deeper than {MAX_DEPTH} levels; flatten it."
    )


def _encode(node: StateTree, path: str, depth: int, tensors: dict[str, Tensor]) -> Any:
    if depth > MAX_DEPTH:
        raise _too_deep(path)
    if isinstance(node, Mapping):
        result = {}
        for key, value in node.items():
            _check_text(key, path)
            # "$" marks the objects of _encode_leaf; a user's own "$" is doubled.
            name = f"${key}" if key.startswith("$") else key
            result[name] = _encode(value, child_path(path, key), depth + 1, tensors)
        return result
    if isinstance(node, list | tuple):
        return [_encode(v, child_path(path, i), depth + 1, tensors) for i, v in enumerate(node)]
    if isinstance(node, Tensor):
        tensors[path] = _plain_tensor(node, path)
        return {"$tensor": path}
    if type(node) is np.ndarray:
        tensors[path] = array_tensor(node, path)
        return {"$array": path, "dtype": node.dtype.str}
    return encode_scalar(node, path)


def encode_scalar(node: StateTree, path: str) -> Any:
    """Return a number, text or None as JSON; anything else is refused."""
    # Exact types: an enum or a numpy scalar would come back as something else.
    if node is None or type(node) is bool:
        return node
    if type(node) is str:
        _check_text(node, path)
        return node
    if type(node) is int:
        return node if abs(node) <= _BIG_INT else {"$int": hex(node)}
    if type(node) is float:
        return node if math.isfinite(node) else {"$float": struct.pack(">d", node).hex()}
    raise CheckpointError(
        f"state at {path or '/'} is a {type(node).__name__}, which cannot be stored; allowed are "
        f"tensors, numpy arrays, int, float, bool, str, None, dicts and lists, so convert it."
    )


def _check_text(text: object, path: str) -> None:
    try:
        if type(text) is str and text.encode("utf-8") is not None:
            return
    except UnicodeEncodeError:
        text = ascii(text)
    raise CheckpointError(
        f"state at {path or '/'} has the key or text {text!r}; only text that UTF-8 can hold is "
        f"stored, so use str keys without surrogates."
    )


def _plain_tensor(tensor: Tensor, path: str) -> Tensor:
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"tensor at {path or '/'} is {tensor.dtype}, {tensor.layout} on {tensor.device}, which "
            f"cannot be stored; allowed are dense tensors of {', '.join(DTYPE_NAMES.values())}."
        )
    return tensor.detach().cpu()


def array_tensor(array: Array, path: str) -> Tensor:
    """Return an array as a tensor, without a copy where its layout allows."""
    if not _ARRAY_DTYPE.fullmatch(array.dtype.str):
        raise CheckpointError(
            f"array at {path or '/'} has dtype {array.dtype}, which cannot be stored; allowed are "
            f"bool, integers, float16 to float64 and complex64, so convert it."
        )
    # from_numpy warns about read-only memory and refuses negative strides and foreign byte order.
    if not (array.flags.c_contiguous and array.flags.writeable and array.dtype.isnative):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def _decode(node: Any, place: tuple[str | int, ...], tensors: dict[str, Tensor]) -> StateTree:
    """Rebuild the tree below `place`, the keys from the root, which become text in errors alone."""
    if len(place) > MAX_DEPTH:
        raise _too_deep(_pointer(place))
    if isinstance(node, list):
        return [_decode(value, (*place, i), tensors) for i, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    result = {}
    for name, value in node.items():
        if name[:1] == "$" and name[1:2] != "$":
            return _decode_leaf(name, node, place, tensors)
        key = name[1:] if name[:1] == "$" else name
        result[key] = _decode(value, (*place, key), tensors)
    return result


def _pointer(place: tuple[str | int, ...]) -> str:
    return functools.reduce(child_path, place, "")


def _decode_leaf(
    marker: str,
    node: Mapping[str, Any],
    place: tuple[str | int, ...],
    tensors: dict[str, Tensor],
) -> StateTree:
    value = node[marker]
    if isinstance(value, str) and set(node) <= {marker, "dtype"}:
        if marker == "$int" and re.fullmatch(r"-?0x[0-9a-f]+", value):
            return int(value, 16)
        if marker == "$float" and re.fullmatch(r"[0-9a-f]{16}", value):
            return struct.unpack(">d", bytes.fromhex(value))[0]
        if marker in ("$tensor", "$array"):
            if value not in tensors:
                raise CheckpointError(
                    f"tensor {value!r} of the state at {_pointer(place) or '/'} is missing from "
                    f"the checkpoint; use another copy."
                )
            tensor = tensors.pop(value)
            return tensor if marker == "$tensor" else _as_array(tensor, node.get("dtype"), place)
    raise CheckpointError(
        f"state at {_pointer(place) or '/'} has the unknown entry {marker!r}; the checkpoint is "
        f"damaged or was written by a newer version."
    )


def _as_array(tensor: Tensor, dtype: object, place: tuple[str | int, ...]) -> Array:
    if isinstance(dtype, str) and _ARRAY_DTYPE.fullmatch(dtype) and tensor.dtype != torch.bfloat16:
        array: Array = tensor.numpy()
        if array.dtype.str[1:] == dtype[1:]:
            return array if array.dtype.str == dtype else array.astype(dtype)
    raise CheckpointError(
        f"array at {_pointer(place) or '/'} is stored as {tensor.dtype} but described as "
        f"{dtype!r}; the checkpoint was not written by this package."
    )


# -- the seed axis --------------------------------------------------------------------------------


def count_seeds(tree: StateTree) -> int | None:
    """Return S of a tree, or None when all of it is shared.

    Raises:
        CheckpointError: Two parts disagree about S.
    """
    found: list[tuple[str, int]] = []
    _map_seeds(tree, "", lambda path, value: found.append((path, len(value))))
    for path, count in found:
        if count != found[0][1]:
            raise CheckpointError(
                f"the state has {found[0][1]} seeds at {found[0][0]} but {count} at {path}; every "
                f"tensor with an axis must have the seed axis first."
            )
    return found[0][1] if found else None


def slice_seed(tree: StateTree, index: int) -> StateTree:
    """Return the state of one seed, with S = 1; tensors are views of the given ones.

    Raises:
        CheckpointError: The state has no such seed, or its parts disagree about S.
    """
    seeds = count_seeds(tree)
    if seeds is not None and not 0 <= index < seeds:
        raise CheckpointError(f"seed index {index} is outside 0..{seeds - 1} of this state.")
    return _map_seeds(tree, "", lambda _, value: value[index : index + 1])


def _map_seeds(node: StateTree, path: str, visit: Callable[[str, Any], Any]) -> StateTree:
    """Rebuild a tree with `visit` applied to everything that has the seed axis in front."""
    if isinstance(node, Mapping):
        return {
            key: visit(child_path(path, key), _seed_list(value, child_path(path, key)))
            if key == PER_SEED
            else _map_seeds(value, child_path(path, key), visit)
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        return [_map_seeds(value, child_path(path, i), visit) for i, value in enumerate(node)]
    return visit(path, node) if has_seed_axis(node) else node


def has_seed_axis(node: StateTree) -> bool:
    """Whether this leaf is a tensor or array with at least one axis."""
    return isinstance(node, Tensor | np.ndarray) and node.ndim > 0


def _seed_list(value: StateTree, path: str) -> list[StateTree]:
    if not isinstance(value, list | tuple):
        raise CheckpointError(
            f"state at {path} is a {type(value).__name__}; the key {PER_SEED!r} is reserved for "
            f"a list with one entry per seed."
        )
    return list(value)


def stack_seeds(trees: Sequence[StateTree]) -> StateTree:
    """Join states along the seed axis; the inverse of `slice_seed` over all seeds.

    Raises:
        CheckpointError: The trees differ in structure, or in a leaf that all seeds share.
    """
    if not trees:
        raise CheckpointError("no state to stack; give at least one.")
    return trees[0] if len(trees) == 1 else _stack(list(trees), "")


def _stack(nodes: list[StateTree], path: str) -> StateTree:
    first = nodes[0]
    if isinstance(first, Mapping):
        if any(not isinstance(n, Mapping) or n.keys() != first.keys() for n in nodes):
            raise _unlike(path, "has different keys")
        return {key: _stack_entry(key, nodes, child_path(path, key)) for key in first}
    if isinstance(first, list | tuple):
        if any(not isinstance(n, list | tuple) or len(n) != len(first) for n in nodes):
            raise _unlike(path, "has different lengths")
        return [_stack([n[i] for n in nodes], child_path(path, i)) for i in range(len(first))]
    if has_seed_axis(first):
        return _concatenate(nodes, path)
    if any(digest_state(n) != digest_state(first) for n in nodes[1:]):
        raise _unlike(path, f"is shared by all seeds but differs ({first!r})")
    return first


def _stack_entry(key: str, nodes: list[StateTree], path: str) -> StateTree:
    if key == PER_SEED:
        return [item for node in nodes for item in _seed_list(node[key], path)]
    return _stack([node[key] for node in nodes], path)


def _concatenate(nodes: list[StateTree], path: str) -> StateTree:
    first = nodes[0]
    for node in nodes:
        if isinstance(node, Tensor) != isinstance(first, Tensor) or not has_seed_axis(node):
            raise _unlike(path, "has different types")
        if node.dtype != first.dtype or node.shape[1:] != first.shape[1:]:
            raise _unlike(path, "has different dtypes or shapes behind the seed axis")
    if isinstance(first, Tensor):
        return torch.cat([node.detach() for node in nodes])
    return np.concatenate(nodes)


def _unlike(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the states of several seeds cannot be stacked: {path or '/'} {what} from seed to seed; "
        f"take checkpoints of one group at one step."
    )


# -- content and differences ----------------------------------------------------------------------


def digest_state(tree: StateTree) -> str:
    """Return the SHA-256 of the content of `tree`; dict order and memory layout do not matter."""
    structure, tensors = flatten_state(tree)
    text = json.dumps(structure, sort_keys=True, separators=(",", ":"), allow_nan=False)
    both = f"{hashlib.sha256(text.encode()).hexdigest()}{digest_tensors(tensors)}"
    return hashlib.sha256(both.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One place where two states are not bit-exact."""

    path: str
    """Where, as a JSON pointer."""
    kind: Literal["missing", "type", "length", "dtype", "shape", "value"]
    detail: str
    """Both values, or the number of differing elements and the largest difference."""


def compare_states(a: StateTree, b: StateTree) -> list[Difference]:
    """Return every difference between two trees; an empty list means bit-identical.

    NaN equals NaN with the same bits, 0.0 differs from -0.0, lists equal tuples, and the order of
    dict entries does not count.
    """
    found: list[Difference] = []
    _compare(a, b, "", found)
    return found


def _compare(a: StateTree, b: StateTree, path: str, found: list[Difference]) -> None:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            here = child_path(path, key)
            if key in a and key in b:
                _compare(a[key], b[key], here, found)
            else:
                side = "second" if key in a else "first"
                found.append(Difference(path=here, kind="missing", detail=f"not in the {side}"))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            found.append(Difference(path=path, kind="length", detail=f"{len(a)} and {len(b)}"))
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            _compare(x, y, child_path(path, i), found)
    else:
        difference = _compare_leaves(a, b, path)
        if difference is not None:
            found.append(difference)


def _compare_leaves(a: StateTree, b: StateTree, path: str) -> Difference | None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _compare_tensors(a, b, path)
    if type(a) is not type(b):
        detail = f"{type(a).__name__} and {type(b).__name__}"
        return Difference(path=path, kind="type", detail=detail)
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype:
            return Difference(path=path, kind="dtype", detail=f"{a.dtype} and {b.dtype}")
        return _compare_tensors(array_tensor(a, path), array_tensor(b, path), path)
    # The text of a float tells -0.0 from 0.0 and one NaN from another; == does not.
    if repr(encode_scalar(a, path)) != repr(encode_scalar(b, path)):
        return Difference(path=path, kind="value", detail=f"{a!r} and {b!r}")
    return None


def _compare_tensors(a: Tensor, b: Tensor, path: str) -> Difference | None:
    if a.dtype != b.dtype:
        return Difference(path=path, kind="dtype", detail=f"{a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        return Difference(path=path, kind="shape", detail=f"{[*a.shape]} and {[*b.shape]}")
    size = (a.numel(), a.element_size())
    raw = [np.frombuffer(raw_bytes(t), np.uint8).reshape(size) for t in (a, b)]
    unlike = torch.from_numpy((raw[0] != raw[1]).any(axis=1))  # [elements]
    if not unlike.any():
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = (t.detach().cpu().reshape(-1).to(wide)[unlike] for t in (a, b))
    largest = float((x - y).abs().max())
    detail = f"{len(x)} of {len(unlike)} elements differ, max abs difference {largest:.3g}"
    return Difference(path=path, kind="value", detail=detail)


# -- tensors as bytes -----------------------------------------------------------------------------


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

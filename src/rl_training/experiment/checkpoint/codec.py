"""State trees to JSON and tensors, and back.

The structure is plain JSON in which an object with a key that starts with one "$" stands for a
leaf: `$tensor` and `$array` refer to a tensor by name, `$int` is a large integer in hexadecimal,
`$float` the eight bytes of a NaN or infinity.  A "$" of the user's own is doubled.
`tree.py` says what a tree may hold; `envs/plain.py` makes such trees of what environments hold.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint.tensors import (
    DTYPE_NAMES,
    MAX_TENSORS,
)

# A precise recursive alias would force every reader of a state to narrow every level by hand.
StateTree: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MAX_DEPTH = 64
"""Deepest nesting of a tree; far above any real state, far below Python's recursion limit."""

_BIG_INT = 2**53  # beyond it, JSON readers other than Python's would round
_ARRAY_DTYPE = re.compile(r"\|[biu]1|[<>](?:[iu][248]|f[248]|c8)")


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
    tree = _decode(structure, "", 0, unused)
    if unused:
        raise CheckpointError(
            f"tensor {min(unused)!r} (of {len(unused)} such) belongs to no part of the state; "
            f"the checkpoint was not written by this package."
        )
    return tree


def child_path(path: str, key: str | int) -> str:
    """Extend a JSON pointer, which stays unique whatever characters the keys hold."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _check_depth(path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"state at {path[:80]!r}... is nested deeper than {MAX_DEPTH} levels; flatten it."
        )


def _encode(node: StateTree, path: str, depth: int, tensors: dict[str, Tensor]) -> Any:
    _check_depth(path, depth)
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


def _decode(node: Any, path: str, depth: int, tensors: dict[str, Tensor]) -> StateTree:
    _check_depth(path, depth)
    if isinstance(node, list):
        return [_decode(v, child_path(path, i), depth + 1, tensors) for i, v in enumerate(node)]
    if not isinstance(node, dict):
        return node
    marker = next((key for key in node if re.match(r"\$(?!\$)", key)), None)
    if marker is not None:
        return _decode_leaf(marker, node, path, tensors)
    result = {}
    for name, value in node.items():
        key = name[1:] if name.startswith("$") else name
        result[key] = _decode(value, child_path(path, key), depth + 1, tensors)
    return result


def _decode_leaf(
    marker: str, node: Mapping[str, Any], path: str, tensors: dict[str, Tensor]
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
                    f"tensor {value!r} of the state at {path or '/'} is missing from the "
                    f"checkpoint; use another copy."
                )
            tensor = tensors.pop(value)
            return tensor if marker == "$tensor" else _as_array(tensor, node.get("dtype"), path)
    raise CheckpointError(
        f"state at {path or '/'} has the unknown entry {marker!r}; the checkpoint is damaged or "
        f"was written by a newer version."
    )


def _as_array(tensor: Tensor, dtype: object, path: str) -> Array:
    if isinstance(dtype, str) and _ARRAY_DTYPE.fullmatch(dtype) and tensor.dtype != torch.bfloat16:
        array: Array = tensor.numpy()
        if array.dtype.str[1:] == dtype[1:]:
            return array if array.dtype.str == dtype else array.astype(dtype)
    raise CheckpointError(
        f"array at {path or '/'} is stored as {tensor.dtype} but described as {dtype!r}; the "
        f"checkpoint was not written by this package."
    )

"""State trees: the one kind of value a checkpoint holds.

A tree is a dict with string keys whose leaves are tensors, numpy arrays, int, float, bool, str or
None; lists and tuples may stand anywhere (tuples come back as lists, mappings as dicts).  Integers
of any size, NaN with its bits, and infinities survive.  Memory shared between tensors is not kept:
each comes back on its own, on the CPU.

Seed axis: in a component's state every tensor or array with at least one axis has the S seeds in
front; 0-d tensors and Python scalars are shared by all seeds; the list under a dict key `per_seed`
holds one arbitrary subtree per seed.
"""

# S seeds; leaves are [S, ...] or shared

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint.codec import (
    StateTree,
    array_tensor,
    child_path,
    encode_scalar,
    flatten_state,
    unflatten_state,
)
from rl_training.experiment.checkpoint.tensors import digest_tensors, raw_bytes

PER_SEED = "per_seed"


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
        CheckpointError: There is no such seed, or the parts disagree about S.
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
        raise CheckpointError("there is no state to stack; give at least one.")
    return _stack(list(trees), "")


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


def digest_state(tree: StateTree) -> str:
    """Return the SHA-256 of the content of `tree`; dict order and memory layout do not matter."""
    structure, tensors = flatten_state(tree)
    text = json.dumps(structure, sort_keys=True, separators=(",", ":"), allow_nan=False)
    both = f"{hashlib.sha256(text.encode()).hexdigest()}{digest_tensors(tensors)}"
    return hashlib.sha256(both.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One place where two states are not the same, bit for bit."""

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


__all__ = [
    "Difference",
    "StateTree",
    "compare_states",
    "count_seeds",
    "digest_state",
    "flatten_state",
    "slice_seed",
    "stack_seeds",
    "unflatten_state",
]

"""Plain state: Python objects as nested dicts of numbers, strings and arrays, and back.

A snapshot goes into JSON and safetensors, never through pickle, so it may hold only dicts with
string keys, lists, ints of any size, finite floats, bools, strings, None and numeric NumPy arrays.
Other values are written as a dict with a `__type__` key: tuples, deques, dicts with other keys,
NumPy scalars and strings, non-finite floats, random generators.  It is the step before
`experiment/checkpoint/codec.py`, which splits such dicts into JSON and tensors; workers and Ray
send snapshots without it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import numpy as np

from rl_training.errors import CheckpointError

State: TypeAlias = dict[str, Any]

_TAG = "__type__"
_BIT_GENERATORS = {
    name: getattr(np.random, name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
}


class NotPlain(TypeError):
    """A value that has no plain form."""


def encode(value: Any) -> Any:
    """The plain form of a value; arrays are copied.

    Raises:
        NotPlain: The value (or something inside it) cannot be written as plain data.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.generic):
        return {_TAG: "scalar", "data": _encode_array(np.array([value]))}
    raise NotPlain(f"{kind.__module__}.{kind.__qualname__}")


def _encode_float(value: float) -> Any:
    # JSON has no NaN or infinity; an array carries them.
    return value if math.isfinite(value) else {_TAG: "float", "data": np.array([value])}


def _encode_array(value: np.ndarray[Any, Any]) -> Any:
    if value.dtype.kind in "SU":
        data = np.frombuffer(value.tobytes(), dtype=np.uint8).copy()
        return {_TAG: "text", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise NotPlain(f"array of {value.dtype}")
    return np.array(value, order="C", copy=True)


def _encode_dict(value: dict[Any, Any]) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item) for key, item in value.items()}
    keys, values = encode(list(value)), encode(list(value.values()))
    return {_TAG: "dict", "keys": keys, "values": values}


def _encode_generator(value: np.random.Generator) -> Any:
    state = value.bit_generator.state
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise NotPlain(f"generator {state['bit_generator']}")
    return {_TAG: "generator", "state": encode(dict(state))}


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    float: _encode_float,
    np.ndarray: _encode_array,
    dict: _encode_dict,
    list: lambda value: [encode(item) for item in value],
    tuple: lambda value: {_TAG: "tuple", "items": encode(list(value))},
    deque: lambda value: {_TAG: "deque", "items": encode(list(value)), "maxlen": value.maxlen},
    np.random.Generator: _encode_generator,
    random.Random: lambda value: {_TAG: "random", "state": encode(value.getstate())},
}


def decode(value: Any) -> Any:
    """The value that `encode` wrote; arrays are copies."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item) for key, item in value.items()}
    return _DECODERS[value[_TAG]](value)


def _decode_text(value: State) -> Any:
    raw = np.asarray(value["data"], dtype=np.uint8).tobytes()
    return np.frombuffer(raw, dtype=value["dtype"]).reshape(value["shape"]).copy()


def _decode_generator(value: State) -> np.random.Generator:
    state = decode(value["state"])
    bit_generator = _BIT_GENERATORS[state["bit_generator"]]()
    bit_generator.state = state
    return np.random.Generator(bit_generator)


def generator_from(value: Any) -> np.random.Generator:
    """The generator that `encode` wrote.

    Raises:
        CheckpointError: It wrote something else.
    """
    generator = decode(value)
    if not isinstance(generator, np.random.Generator):
        raise CheckpointError(
            f"environment snapshot: its generator is a {type(generator).__name__}; use another "
            "checkpoint."
        )
    return generator


def _decode_random(value: State) -> random.Random:
    generator = random.Random()
    generator.setstate(decode(value["state"]))
    return generator


_DECODERS: dict[str, Callable[[State], Any]] = {
    "float": lambda value: float(value["data"][0]),
    "scalar": lambda value: decode(value["data"])[0],
    "text": _decode_text,
    "dict": lambda value: dict(zip(decode(value["keys"]), decode(value["values"]), strict=True)),
    "tuple": lambda value: tuple(decode(value["items"])),
    "deque": lambda value: deque(decode(value["items"]), maxlen=value["maxlen"]),
    "generator": _decode_generator,
    "random": _decode_random,
}


def is_plain(value: Any) -> bool:
    """Whether `encode` takes the value."""
    try:
        encode(value)
    except NotPlain:
        return False
    return True


def plain_attributes(owner: object, skip: Collection[str], max_bytes: int | None = None) -> State:
    """Plain forms of an object's own attributes; what has none is left out.

    Args:
        owner: The object.
        skip: Names to leave out.
        max_bytes: Arrays larger than this are left out; None for no limit.
    """
    state: State = {}
    for name, value in vars(owner).items():
        too_large = (
            max_bytes is not None and isinstance(value, np.ndarray) and value.nbytes > max_bytes
        )
        if name in skip or too_large:
            continue
        try:
            state[name] = encode(value)
        except NotPlain:
            continue  # Windows, spaces, simulators: the adapters know which of these matter.
    return state


def set_attributes(
    owner: object, state: State, *, complete: bool = False, skip: Collection[str] = ()
) -> None:
    """Put plain attributes back.

    An attribute that now holds something without a plain form (an open window, a simulator) is left
    alone, and a generator is set in place, so that whoever shares it sees the same stream.

    Args:
        owner: The object.
        state: What `plain_attributes` gave.
        complete: Whether it must hold every attribute that the object has a plain value for now.
        skip: Names that `plain_attributes` left out.

    Raises:
        CheckpointError: An attribute is missing, or is a mapping where the object has none.
    """
    if complete:
        _require_all(owner, state, skip)
    for name, value in state.items():
        current = vars(owner).get(name)
        if current is not None and not is_plain(current):
            continue
        restored = decode(value)
        if isinstance(restored, dict) and not isinstance(current, dict | None):
            raise CheckpointError(
                f"environment snapshot: {name} of {type(owner).__name__} is a mapping, but the "
                f"environment has a {type(current).__name__}; use another checkpoint."
            )
        if isinstance(current, np.random.Generator) and isinstance(restored, np.random.Generator):
            same = type(current.bit_generator) is type(restored.bit_generator)
            if same:
                current.bit_generator.state = restored.bit_generator.state
                continue
        setattr(owner, name, restored)


def _require_all(owner: object, state: State, skip: Collection[str]) -> None:
    # What is None now may have been a window then, which is not kept.
    needed = {name for name, value in plain_attributes(owner, skip).items() if value is not None}
    missing = sorted(needed - state.keys())
    if missing:
        raise CheckpointError(
            f"environment snapshot: {', '.join(missing)} of {type(owner).__name__} is missing; use "
            "another checkpoint, or the versions of the packages that the run began with."
        )


def without_reward_transform(wrappers: State) -> State:
    """States of wrappers, outermost first, as they are now.

    Up to version 0.1 rewards were transformed by an outermost wrapper.
    """
    if "0:RewardTransform" not in wrappers:
        return wrappers
    places = {key: key.split(":") for key in wrappers if key != "0:RewardTransform"}
    return {f"{int(at) - 1}:{name}": wrappers[key] for key, (at, name) in places.items()}

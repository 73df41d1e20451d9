"""Observations of several parts: rows against a slow version, masks, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pydantic import ValidationError

from helpers.envs import SpacesEnv
from rl_training.envs.factory import make_env, probe_env
from rl_training.envs.observing import with_rows
from rl_training.envs.spec import EnvSpec
from rl_training.errors import DataError, EnvError, SpecMismatch
from rl_training.models.rows import as_floats, is_number, join, split
from rl_training.observations import MOST_LEAVES, LeafSpec, ObservationSpec
from rl_training.spaces import MOST_ONE_HOT, MOST_VALUES, observation_spec

Space = spaces.Space[Any]
Random = np.random.Generator


# A slow version: one number after the other, from the space alone


def leaves_of(space: Space, obs: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield name, space and value of each leaf, in the order of the space."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from leaves_of(part, obs[key], (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from leaves_of(part, obs[index], (*path, str(index)))
    else:
        yield "/".join(path) or "observation", space, obs


def slow_leaf(space: Space, value: Any) -> tuple[str, list[float]]:
    """What a row holds of a leaf: how bytes hold it (`wide` or `byte`), and its numbers."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counts = space.n if isinstance(space, spaces.Discrete) else space.nvec
        sizes = [int(n) for n in np.ravel(counts)]
        starts = [int(n) for n in np.ravel(space.start)]
        numbers = [int(n) - start for n, start in zip(np.ravel(value), starts, strict=True)]
        if sum(sizes) > 512:
            return "wide", [float(n) for n in numbers]
        flags = [[float(i == n) for i in range(s)] for n, s in zip(numbers, sizes, strict=True)]
        return "byte", [flag for part in flags for flag in part]
    kind = "byte" if isinstance(space, spaces.MultiBinary) or space.dtype == np.uint8 else "wide"
    value = np.asarray(value)
    if value.ndim == 3 and value.shape[2] < value.shape[0] and value.shape[2] <= 16:
        height, width, channels = value.shape
        return kind, [
            float(value[y, x, c])
            for c in range(channels)
            for y in range(height)
            for x in range(width)
        ]
    return kind, [float(number) for number in value.flat]


def slow_row(space: Space, obs: Any, mask: str = "") -> tuple[list[float], bytes]:
    """A row in its float32 form, and as bytes."""
    wide: list[float] = []
    others: list[float] = []
    last: list[float] = []
    for name, leaf, value in leaves_of(space, obs):
        kind, numbers = slow_leaf(leaf, value)
        if name == mask:
            last = numbers
        else:
            (wide if kind == "wide" else others).extend(numbers)
    packed = struct.pack(f"={len(wide)}f", *wide) + bytes(int(n) for n in others)
    padding = bytes(-(len(packed) + len(last)) % 4)
    return [*wide, *others, *last], packed + padding + bytes(int(n) for n in last)


def random_leaf(rng: Random) -> Space:
    """A leaf of any kind."""
    shape = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3)))
    side, channels = int(rng.integers(5, 9)), int(rng.integers(1, 5))
    kinds: list[Any] = [
        lambda: spaces.Box(-np.inf, np.inf, shape, np.float64),
        lambda: spaces.Box(-1.0, 1.0, shape, np.float32),
        lambda: spaces.Box(-9, 9, shape, np.int32),
        lambda: spaces.Box(-1.0, 1.0, shape, np.float16),
        lambda: spaces.Box(0, 255, (*shape, 3), np.uint8),
        lambda: spaces.Box(0, 255, (side, side, channels), np.uint8),
        lambda: spaces.Box(0, 255, (channels, side, side), np.uint8),
        lambda: spaces.Box(0.0, 1.0, (side, side, channels), np.float32),
        lambda: spaces.Discrete(int(rng.integers(1, 9)), start=int(rng.integers(-5, 5))),
        lambda: spaces.Discrete(int(rng.integers(513, 9000)), start=int(rng.integers(-5, 5))),
        lambda: spaces.MultiDiscrete(
            rng.integers(1, 5, (*shape, 2)), start=np.full((*shape, 2), 7)
        ),
        lambda: spaces.MultiDiscrete([600, 2]),
        lambda: spaces.MultiBinary(shape or 3),
    ]
    made: Space = kinds[rng.integers(len(kinds))]()
    return made


def random_space(rng: Random, depth: int = 0) -> Space:
    """Dictionaries and tuples of leaves, nested up to three deep."""
    if depth == 3 or (depth and rng.random() < 0.6):
        return random_leaf(rng)
    parts = [random_space(rng, depth + 1) for _ in range(rng.integers(1, 5))]
    if rng.random() < 0.5:
        return spaces.Tuple(parts)
    return spaces.Dict({f"key {i}": part for i, part in enumerate(parts)})


def stacked(space: Space, batch: list[Any]) -> Any:
    """A batch with the nesting of the space."""
    if isinstance(space, spaces.Dict):
        return {key: stacked(part, [obs[key] for obs in batch]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            stacked(part, [obs[index] for obs in batch]) for index, part in enumerate(space)
        )
    return np.stack(batch)


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_random_spaces_are_those_of_the_slow_version(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(12):
        space = random_space(rng)
        space.seed(int(rng.integers(1000)))
        parts = observation_spec(space, "mine")
        batch = [space.sample() for _ in range(3)]
        floats, in_bytes = zip(*(slow_row(space, obs) for obs in batch), strict=True)
        expected = np.array(floats, np.float32)
        rows = np.stack([parts.pack(obs) for obs in batch])
        if parts.in_bytes:
            assert [row.tobytes() for row in rows] == list(in_bytes)
        else:
            np.testing.assert_array_equal(rows, expected, strict=True)
        np.testing.assert_array_equal(parts.pack(stacked(space, batch), 1), rows, strict=True)
        assert (parts.width, parts.dtype) == (rows.shape[1], rows.dtype)
        assert parts.num_floats == expected.shape[1]
        # As tensors, with a seed axis before the batch.
        tensor = torch.from_numpy(rows)[None]
        np.testing.assert_array_equal(as_floats(parts, tensor)[0], expected, strict=True)
        shown = split(parts, tensor), split(parts, torch.from_numpy(expected)[None])
        for name, leaf, values in leaves_of(space, stacked(space, batch)):
            numbers = np.array([slow_leaf(leaf, value)[1] for value in values], np.float32)
            for leaves in shown:
                assert leaves[name].shape[:2] == (1, 3)
                np.testing.assert_array_equal(leaves[name][0].flatten(1).float(), numbers)
        by_name = {name: value for name, _, value in leaves_of(space, stacked(space, batch))}
        joined = join(parts, {n: torch.from_numpy(np.asarray(v)) for n, v in by_name.items()})
        np.testing.assert_array_equal(joined, expected, strict=True)
        np.testing.assert_array_equal(parts.pack(parts.nested(by_name), 1), rows, strict=True)
        assert ObservationSpec.model_validate_json(parts.model_dump_json()) == parts


def test_the_slow_version_can_fail() -> None:
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3))
    obs = {"a": np.array([0.5, -1], np.float32), "b": 2}
    assert slow_row(space, obs)[0] == [0.5, -1.0, 0.0, 0.0, 1.0]
    assert slow_row(space, {**obs, "b": 1})[0] != observation_spec(space, "mine").pack(obs).tolist()


IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)


def test_floats_in_rows_of_bytes_keep_every_bit() -> None:
    special = [0.0, -0.0, 1e-45, -1.1754944e-38, 3.4028235e38, 1 / 3, np.nextafter(1, 2), -np.pi]
    number = spaces.Box(-np.inf, np.inf, (len(special),), np.float32)
    parts = observation_spec(spaces.Dict(image=IMAGE, room=spaces.Discrete(60_000), x=number), "m")
    value = np.array(special, np.float32)
    obs = {"image": np.zeros((8, 8, 3), np.uint8), "room": 59_999, "x": value}
    row = torch.from_numpy(parts.pack(obs))
    for leaves in (split(parts, row), split(parts, as_floats(parts, row))):
        assert leaves["x"].numpy().tobytes() == value.tobytes()
        assert leaves["room"].tolist() == [59_999.0]


def test_bytes_that_were_cast_to_floats_are_no_rows() -> None:
    parts = observation_spec(spaces.Dict(image=IMAGE, x=spaces.Box(-1, 1, (2,))), "mine")
    row = torch.from_numpy(parts.example_rows(1, np.random.default_rng(0)))
    assert split(parts, row)["x"].shape == (1, 2)
    with pytest.raises(AssertionError):
        split(parts, row.float())


def test_float64_is_rounded_to_the_nearest_float32() -> None:
    parts = observation_spec(spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float64)), "mine")
    row = parts.pack({"x": np.array([0.1, -0.7])})
    np.testing.assert_array_equal(row, np.array([0.1, -0.7], np.float32), strict=True)


@pytest.mark.parametrize(
    ("space", "kind", "width"),
    [
        (spaces.Discrete(MOST_ONE_HOT), "one_hot", MOST_ONE_HOT),
        (spaces.Discrete(MOST_ONE_HOT + 1), "index", 1),
        (spaces.Discrete(MOST_VALUES), "index", 1),
        (spaces.MultiDiscrete([256, 256]), "one_hot", 512),
        (spaces.MultiDiscrete([256, 257]), "index", 2),
        (spaces.MultiBinary((2, 3)), "flags", 6),
        (spaces.Box(0, 1, (2, 3), np.int8), "numbers", 6),
    ],
)
def test_few_values_are_one_hot_and_many_are_embedded(space: Space, kind: str, width: int) -> None:
    (leaf,) = observation_spec(space, "mine").leaves
    assert (leaf.kind, leaf.row_shape, leaf.name) == (kind, (width,), "observation")


@pytest.mark.parametrize(
    ("shape", "row_shape"),
    [
        ((84, 84, 3), (3, 84, 84)),
        ((84, 80, 1), (1, 84, 80)),
        ((84, 84, 16), (16, 84, 84)),
        ((84, 84, 17), (84, 84, 17)),
        ((3, 84, 84), (3, 84, 84)),
        ((9, 9, 9), (9, 9, 9)),
    ],
)
def test_channels_that_come_last_are_brought_forward(
    shape: tuple[int, ...], row_shape: tuple[int, ...]
) -> None:
    parts = observation_spec(spaces.Dict(image=spaces.Box(0, 255, shape, np.uint8)), "mine")
    assert parts.leaves[0].row_shape == row_shape
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    shown = split(parts, torch.from_numpy(parts.pack({"image": image})))["image"].numpy()
    expected = image.transpose(2, 0, 1) if row_shape != shape else image
    np.testing.assert_array_equal(shown, expected, strict=True)


def test_what_is_standardised_are_real_numbers_alone() -> None:
    space = spaces.Dict(
        image=IMAGE,
        x=spaces.Box(-1, 1, (2,)),
        room=spaces.Discrete(900),
        door=spaces.Discrete(2),
        keys=spaces.MultiBinary(2),
    )
    parts = observation_spec(space, "mine")
    flags = is_number(parts, "cpu")
    assert flags.sum() == 2
    assert flags[parts.columns("x")].all()


def test_examples_are_observations_of_the_task() -> None:
    space = spaces.Tuple(
        (
            IMAGE,
            spaces.Discrete(4, start=-3),
            spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[1, 1], [0, 9]])),
            spaces.MultiBinary(3),
            spaces.Box(0, 9, (2,), np.uint16),
            spaces.Box(-9, 9, (2,), np.int8),
        )
    )
    parts = observation_spec(space, "mine")
    for name, values in parts.examples(50, np.random.default_rng(0)).items():
        leaf = next(leaf for leaf in parts.leaves if leaf.name == name)
        assert (values.shape, str(values.dtype)) == ((50, *leaf.shape), leaf.dtype)
        leaf.row(values, 1)
    assert parts.example_rows(5, np.random.default_rng(0)).shape == (5, parts.width)


# What does not belong to a task


PARTS = spaces.Dict(
    state=spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(4, start=1))),
    camera=IMAGE,
    keys=spaces.MultiBinary(2),
    tools=spaces.MultiDiscrete([2, 600]),
)


def observation(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "state": (np.zeros(2), 1),
        "camera": np.zeros((8, 8, 3), np.uint8),
        "keys": np.array([0, 1], np.int8),
        "tools": np.array([1, 599]),
    }
    return {key: value for key, value in (values | changes).items() if value is not None}


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": None}, "keys is missing"),
        ({"state": (np.zeros(2),)}, r"state must have a part '1', got tuple"),
        ({"state": np.zeros(2)}, r"state must have a part '0', got ndarray"),
        ({"state": (np.zeros(3), 1)}, r"state/0 has shape \(3,\), not \(2,\)"),
        ({"state": (np.array([0.0, NAN]), 1)}, "state/0 holds nan, which is not a finite float32"),
        ({"state": (np.array([0.0, np.inf]), 1)}, "state/0 holds inf, which is not a finite"),
        ({"state": (np.array([0.0, 1e39]), 1)}, r"state/0 holds 1e\+39, which is not a finite"),
        ({"state": (np.zeros(2), 0)}, "state/1 is 0, but its entries have 4 values from 1"),
        ({"state": (np.zeros(2), 5)}, "state/1 is 5, but"),
        ({"state": (np.zeros(2), 1.5)}, "state/1 is 1.5, but"),
        ({"state": (np.zeros(2), NAN)}, "state/1 is nan, but"),
        ({"state": (np.zeros(2), "1")}, "state/1 must be numbers, got '1'"),
        ({"state": (np.zeros(2), [1])}, r"state/1 has shape \(1,\), not \(\)"),
        ({"camera": np.zeros((3, 8, 8), np.uint8)}, r"camera has shape \(3, 8, 8\), not"),
        (
            {"camera": np.full((8, 8, 3), 0.5)},
            "camera must be whole numbers from 0 to 255, got 0.5",
        ),
        ({"camera": np.full((8, 8, 3), NAN)}, "camera must be whole numbers .* got nan"),
        ({"camera": np.full((8, 8, 3), 256)}, "camera must be whole numbers .* got 256"),
        ({"camera": np.full((8, 8, 3), -1)}, "camera must be whole numbers .* got -1"),
        ({"keys": np.array([0, 2])}, "keys must be zeros and ones, got 0, 2"),
        ({"keys": np.array([0, NAN])}, "keys must be zeros and ones"),
        ({"keys": np.array([None, 1])}, "keys must be numbers"),
        (
            {"tools": np.array([2, 0])},
            "tools is 2, 0, but its entries have 2, 600 values from 0, 0",
        ),
        ({"tools": np.array([0, 600])}, "tools is 0, 600, but"),
    ],
)
def test_what_does_not_belong_to_a_task_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    parts = observation_spec(PARTS, "mine")
    with pytest.raises(ValueError, match=message) as told:
        parts.pack(observation(**changes))
    assert "\n" not in str(told.value)
    with pytest.raises(DataError, match=f"the observation does not fit the task: {message}"):
        parts.pack_given(observation(**changes))


@pytest.mark.parametrize("wrong", [None, 5, "text", [], np.zeros(3), {"other": 1}, object(), ()])
def test_what_is_no_observation_at_all_is_refused(wrong: Any) -> None:
    with pytest.raises(DataError, match=r"does not fit the task: .*state/0 \[2\], state/1 \[\]"):
        observation_spec(PARTS, "mine").pack_given(wrong)


def test_batches_and_rows_are_told_from_single_observations() -> None:
    parts = observation_spec(PARTS, "mine")
    row = parts.pack(observation())
    assert_given(parts, observation(), row[None], single=True)
    many = {
        "state": (np.zeros((3, 2)), np.ones(3, np.int64)),
        "camera": np.zeros((3, 8, 8, 3), np.uint8),
        "keys": np.array([[0, 1]] * 3),
        "tools": np.array([[1, 599]] * 3),
    }
    assert_given(parts, many, np.stack([row] * 3), single=False)
    assert_given(parts, row, row[None], single=True)
    assert_given(parts, np.stack([row] * 3), np.stack([row] * 3), single=False)
    with pytest.raises(DataError, match=r"tools has shape|tools is a batch of \(2,\), others of"):
        parts.pack_given({**many, "tools": np.zeros((2, 2), np.int64)})
    with pytest.raises(DataError, match="neither one observation nor a batch"):
        parts.pack_given({**many, "state": (np.zeros((1, 1, 2)), 1)})


def assert_given(parts: ObservationSpec, obs: Any, rows: Any, *, single: bool) -> None:
    found, was_single = parts.pack_given(obs)
    np.testing.assert_array_equal(found, rows, strict=True)
    assert was_single == single


def test_a_number_is_no_row() -> None:
    """Whole numbers of a task that counts are observations, however wide its rows are."""
    parts = observation_spec(spaces.Discrete(3), "mine")
    assert_given(parts, np.array([0, 1, 2]), np.eye(3, dtype=np.float32), single=False)
    assert_given(parts, 1, np.eye(3, dtype=np.float32)[1:2], single=True)


# Spaces that cannot be used


BOX = spaces.Box(-1, 1, (2,))
REFUSED: list[tuple[Space, str]] = [
    (spaces.Text(5), r"its observation space is Text\(1, 5"),
    (spaces.Graph(BOX, None), r"its observation space is Graph\("),
    (spaces.Sequence(BOX), r"its observation space is Sequence\("),
    (spaces.OneOf([BOX, spaces.Discrete(2)]), r"its observation space is OneOf\("),
    (spaces.Dict(a=BOX, note=spaces.Text(5)), r"part 'note' of its observation space is Text\("),
    (
        spaces.Dict(a=spaces.Tuple((BOX, spaces.Graph(BOX, BOX)))),
        r"part 'a/1' of its .* is Graph\(",
    ),
    (spaces.Tuple((BOX, spaces.Sequence(BOX))), r"part '1' of its observation space is Sequence\("),
    (spaces.Dict(a=spaces.Box(-1, 1, (2, 0))), "part 'a' of its observation space is Box"),
    (spaces.Dict({}), r"its observation space Dict\(\) has no part"),
    (spaces.Tuple(()), r"its observation space Tuple\(\) has no part"),
    (spaces.Discrete(MOST_VALUES + 1), "at most 65,536 values can be told apart"),
    (spaces.Dict({"a/b": BOX, "a": spaces.Dict(b=BOX)}), "two parts .* are called 'a/b'"),
    (spaces.Tuple([spaces.Discrete(2)] * (MOST_LEAVES + 1)), "has 1001 parts, more than the 1000"),
]


@pytest.mark.parametrize(("space", "message"), REFUSED)
def test_spaces_that_cannot_be_used_are_refused_in_one_sentence(space: Space, message: str) -> None:
    env = SpacesEnv()
    env.observation_space = space
    with pytest.raises(SpecMismatch, match=f"environment mine: .*{message}") as told:
        with_rows(env, "mine")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_long_spaces_do_not_fill_lines_of_a_message(shape: tuple[int, ...]) -> None:
    space = spaces.MultiDiscrete(np.full((*shape, 400), 200))
    many = spaces.Dict(x=spaces.Text(5000, charset="ab"), y=space)
    with pytest.raises(SpecMismatch) as told:
        with_rows(SpacesEnv(many), "mine")
    assert len(str(told.value)) < 600


# Specs that no task has


def leaf(**changes: Any) -> LeafSpec:
    given: dict[str, Any] = {"path": ("x",), "kind": "numbers", "shape": (2,), "dtype": "float32"}
    return LeafSpec(**(given | changes))


COUNTED: dict[str, Any] = {"kind": "one_hot", "dtype": "int64", "sizes": (3, 2), "starts": (0, 0)}
MASK: dict[str, Any] = {"path": ("m",), "kind": "mask", "dtype": "int8", "shape": (5,)}


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (0,)},
        {"shape": (-1,)},
        {"dtype": "object"},
        {"dtype": "float32,int8"},
        {"kind": "text"},
        {"colour": "red"},
        {"sizes": (2,)},
        {"starts": (0, 0)},
        COUNTED | {"sizes": ()},
        COUNTED | {"sizes": (3,)},
        COUNTED | {"sizes": (3, 0)},
        COUNTED | {"starts": (0,)},
        COUNTED | {"shape": (3,)},
        COUNTED | {"kind": "index", "starts": ()},
        MASK,
        MASK | {"sizes": (3, 3)},
        MASK | {"sizes": (3, 2), "starts": (0, 0)},
        {"kind": "image"},
        {"kind": "image", "shape": (2, 2)},
        {"kind": "image", "shape": (2, 2, 2, 2)},
        {"kind": "flags", "sizes": (2,)},
    ],
    ids=str,
)
def test_forged_leaves_are_refused(changes: dict[str, Any]) -> None:
    assert leaf().name == "x"
    with pytest.raises(ValidationError):
        leaf(**changes)


def test_forged_observations_are_refused() -> None:
    mask = leaf(**MASK, sizes=(3, 2))
    assert ObservationSpec(leaves=(leaf(), mask)).mask_size == 5
    wrong: list[tuple[Any, ...]] = [
        (),
        (leaf(), leaf()),
        (leaf(path=("a/b",)), leaf(path=("a", "b"))),
        (mask, leaf()),
        tuple(leaf(path=(str(i),)) for i in range(MOST_LEAVES + 1)),
    ]
    for leaves in wrong:
        with pytest.raises(ValidationError):
            ObservationSpec(leaves=leaves)


def test_forged_tasks_are_refused() -> None:
    honest = probe_env("rl_training.testing.contract:SwitchedParts").model_dump()
    assert EnvSpec(**honest).mask_size == 5
    narrow = honest["observation"]["leaves"][:-1]
    swapped = [*narrow, honest["observation"]["leaves"][-1] | {"sizes": (2, 3)}]
    box = {"action_kind": "continuous", "action_shape": (5,), "action_dtype": "float32"}
    for changes in (
        {"obs_shape": (7,)},
        {"obs_dtype": "float32"},
        {"observation": {"leaves": narrow}},
        {"observation": {"leaves": swapped}},
        {"action_sizes": (3, 3)},
        {"action_starts": (0,)},
        box | {"action_sizes": (), "action_starts": ()},
    ):
        with pytest.raises(ValidationError):
            EnvSpec(**(honest | changes))


def test_a_policy_of_other_parts_is_refused() -> None:
    ours = probe_env("rl_training.testing.contract:Parts")
    assert ours.observation is not None
    ours.require_same_task(ours, "go")
    first, *others = ours.observation.leaves
    renamed = ObservationSpec(leaves=(first.model_copy(update={"path": ("other",)}), *others))
    theirs = ours.model_copy(update={"observation": renamed})
    with pytest.raises(SpecMismatch, match=r"whose observations are other \[8, 8, 3\], .*; go"):
        ours.require_same_task(theirs, "go")


# Masks


class Masked(SpacesEnv):
    """Its masks are those in `masks`, one for each observation; the last stays."""

    masks: tuple[Any, ...] = ([0, 1, 0],)
    at = 0

    def next_mask(self) -> Any:
        self.at += 1
        return self.masks[min(self.at, len(self.masks)) - 1]


class ByMethod(Masked):
    def action_masks(self) -> Any:
        return self.next_mask()


class ByInfo(Masked):
    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {"action_mask": self.next_mask()}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"action_mask": self.next_mask(), "other": 1}


class ByKey(Masked):
    def _obs(self) -> Any:
        return {"x": super()._obs(), "action_mask": np.array(self.next_mask())}


def masked(kind: type[Masked], action: Space, *masks: Any, at: str = "auto") -> Any:
    space = None
    if issubclass(kind, ByKey):
        size = len(np.ravel(masks[0]))
        space = spaces.Dict(x=SpacesEnv().observation_space, action_mask=spaces.MultiBinary(size))
    env = kind(space, action)
    env.masks = masks
    mode: Any = "info" if issubclass(kind, ByInfo) and at == "auto" else at
    return with_rows(env, "mine", mode)


def allowed(env: Any, row: Any) -> list[int]:
    spec = EnvSpec.from_env(env, "mine")
    assert spec.observation is not None
    mask: list[int] = spec.observation.allowed(row).astype(int).tolist()
    return mask


every_source = pytest.mark.parametrize("kind", [ByMethod, ByInfo, ByKey])


@every_source
def test_masks_of_every_source_end_the_row(kind: type[Masked]) -> None:
    env = masked(kind, spaces.Discrete(3), [0, 1, 0], [1, 0, 1])
    row = env.reset()[0]
    assert allowed(env, row) == [0, 1, 0]
    assert row[:2].tolist() == [1, 0]
    assert allowed(env, env.step(1)[0]) == [1, 0, 1]


@every_source
def test_a_mask_that_allows_nothing_is_an_error_but_at_the_end(kind: type[Masked]) -> None:
    nothing = [0, 0, 0]
    env = masked(kind, spaces.Discrete(3), nothing)
    with pytest.raises(ValueError, match=r"action_mask allows no action; at least one of its ent"):
        env.reset()
    # An episode has three steps; after its last one nobody acts.
    env = masked(kind, spaces.Discrete(3), [1, 0, 0], [1, 0, 0], [0, 1, 0], nothing)
    env.reset()
    env.step(0)
    assert allowed(env, env.step(0)[0]) == [0, 1, 0]
    row, _, terminated, truncated, _ = env.step(1)
    assert (terminated, truncated) == (True, False)
    assert allowed(env, row) == [1, 1, 1]


def test_each_part_of_an_action_needs_one_that_is_allowed() -> None:
    action = spaces.MultiDiscrete([3, 2])
    env = masked(ByMethod, action, [1, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="at least one of its entries of each part of the action"):
        env.reset()
    last = [0, 0, 1, 0, 0]
    env = masked(ByMethod, action, *[[1, 1, 1, 1, 1]] * 3, last)
    env.reset()
    rows = [env.step(0)[0] for _ in range(3)]
    assert allowed(env, rows[-1]) == [0, 0, 1, 1, 1], "the part that allows nothing is filled"


def test_masks_of_several_parts_may_be_one_for_each() -> None:
    for given in (([0, 1, 1], [1, 0]), [np.array([0, 1, 1]), (1, 0)], [0, 1, 1, 1, 0]):
        env = masked(ByMethod, spaces.MultiDiscrete([3, 2]), given)
        assert allowed(env, env.reset()[0]) == [0, 1, 1, 1, 0]
    env = masked(ByMethod, spaces.MultiBinary(2), [1, 0, 1, 1])
    assert allowed(env, env.reset()[0]) == [1, 0, 1, 1]


def test_a_mask_of_bytes_stays_aligned() -> None:
    """Behind pixels, whatever their number."""
    for channels in range(1, 5):
        image = spaces.Box(0, 255, (3, 5, channels), np.uint8)
        space = spaces.Dict(action_mask=spaces.MultiBinary(3), image=image)
        parts = observation_spec(space, "mine", (3,))
        obs = {"image": image.sample(), "action_mask": np.array([1, 0, 1])}
        row = parts.pack(obs)
        assert row.tobytes() == slow_row(space, obs, "action_mask")[1]
        assert len(row) % 4 == 0
        assert parts.allowed(row).tolist() == [True, False, True]
        assert parts.allowed(as_floats(parts, torch.from_numpy(row))).tolist() == [
            True,
            False,
            True,
        ]


@pytest.mark.parametrize("kind", [ByMethod, ByInfo])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 0], r"gives a mask of 2 entries, but its action space Discrete\(3\) needs 3"),
        ([1, 0, 1, 1], "gives a mask of 4 entries"),
        (None, "gives no mask of actions"),
        ("abc", "must be zeros and ones, got abc"),
        ([[1], [1, 0]], "must be zeros and ones, got"),
        ({"a": 1}, "must be zeros and ones, got"),
    ],
)
def test_wrong_masks_are_refused(kind: type[Masked], mask: Any, message: str) -> None:
    source = "its method action_masks" if kind is ByMethod else "an info with 'action_mask'"
    with pytest.raises(EnvError, match=message) as told:
        masked(kind, spaces.Discrete(3), mask).reset()
    assert source in str(told.value)
    assert "\n" not in str(told.value)


@every_source
@pytest.mark.parametrize("mask", [[2, 1, 0], [0.5, 1, 0], [NAN, 1, 0]])
def test_masks_are_zeros_and_ones(kind: type[Masked], mask: Any) -> None:
    env = masked(kind, spaces.Discrete(3), mask)
    with pytest.raises(ValueError, match="action_mask must be zeros and ones"):
        env.reset()


def test_an_info_without_a_mask_says_what_it_has() -> None:
    env = with_rows(SpacesEnv(None, spaces.Discrete(3)), "mine", "info")
    with pytest.raises(EnvError, match=r"an info with nothing gives no mask .*\(the key 'action_m"):
        env.reset()


def test_masks_of_continuous_actions_are_refused() -> None:
    for kind in (ByMethod, ByInfo):
        with pytest.raises(SpecMismatch, match="is not of discrete actions"):
            masked(kind, BOX, [1, 1])


def test_a_part_with_the_name_of_the_mask_must_be_one() -> None:
    x = spaces.Box(-1, 1, (2,))
    for wrong, found in (
        (spaces.MultiBinary(2), "has 2 entries, but a mask of its actions needs 3 zeros and ones"),
        (spaces.MultiDiscrete([2, 2, 2]), "has 3 whole numbers, but"),
        (spaces.Discrete(2), "has 1 whole numbers, but"),
    ):
        space = spaces.Dict(x=x, action_mask=wrong)
        with pytest.raises(SpecMismatch, match=f"part 'action_mask' of its observation .*{found}"):
            with_rows(SpacesEnv(space, spaces.Discrete(3)), "mine")
        assert with_rows(SpacesEnv(space, spaces.Discrete(3)), "mine", "off") is not None
    alone = spaces.Dict(action_mask=spaces.MultiBinary(3))
    with pytest.raises(SpecMismatch, match="nothing but a mask of actions"):
        with_rows(SpacesEnv(alone, spaces.Discrete(3)), "mine")


def test_without_masks_the_key_is_an_ordinary_part_and_the_method_is_not_asked() -> None:
    env = masked(ByKey, spaces.Discrete(3), [0, 0, 0], at="off")
    spec = EnvSpec.from_env(env, "mine")
    assert spec.mask_size == 0
    assert env.reset()[0].tolist() == [1, 0, 0, 0, 0]
    plain = masked(ByMethod, spaces.Discrete(3), [0, 0, 0], at="off")
    assert plain.reset()[0].tolist() == [1, 0]


def test_a_mask_in_the_observation_wins_over_the_method() -> None:
    class Both(ByKey):
        def action_masks(self) -> Any:
            raise AssertionError("asked")

    env = masked(Both, spaces.Discrete(3), [0, 1, 1])
    assert allowed(env, env.reset()[0]) == [0, 1, 1]


def test_random_actions_are_those_that_masks_allow() -> None:
    for name in ("Parts", "SwitchedParts"):
        task = f"rl_training.testing.contract:{name}"
        spec, env = probe_env(task), make_env(task)
        generator, taken = np.random.default_rng(0), set()
        row, ended = env.reset(seed=0)[0], False
        for _ in range(300):
            action = spec.allowed_action(row, generator)
            taken.add(tuple(np.ravel(action).tolist()))
            row, _, terminated, ended, _ = env.step(action)  # it refuses what is not allowed
            if terminated or ended:
                row = env.reset()[0]
        assert len(taken) == np.prod(spec.choices)

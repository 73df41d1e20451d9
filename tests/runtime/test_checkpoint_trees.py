"""State trees: flattening, the seed axis, bit-exact comparison."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.checkpoints import DTYPES, awkward_tree
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpoint.codec import (
    compare_states,
    digest_state,
    flatten_state,
    slice_seed,
    stack_seeds,
    unflatten_state,
)
from rl_training.experiment.checkpointing import (
    load_single_file,
    save_single_file,
)

# -- trees ---------------------------------------------------------------------------------------


def test_awkward_tree_survives_flattening_through_json() -> None:
    tree = awkward_tree()
    structure, tensors = flatten_state(tree)
    structure = json.loads(json.dumps(structure, allow_nan=False))
    back = unflatten_state(structure, tensors)
    assert compare_states(tree, back) == []
    assert back["flags"] == [True, False, 0, 1]
    assert back["arrays"]["big_endian"].dtype == np.dtype(">f4")
    assert back["zero_d"].shape == ()
    assert list(back) == list(tree)


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2**31, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
_arrays = _tensors.filter(lambda t: t.dtype != torch.bfloat16).map(lambda t: t.numpy())
_trees = st.recursive(
    _scalars | _tensors | _arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_trees)
def test_any_tree_survives_a_single_file(tmp_path_factory: Any, tree: Any) -> None:
    path = tmp_path_factory.mktemp("single") / "agent.rlt"
    save_single_file(path, header={"tree": 1}, states={"x": tree})
    assert compare_states(load_single_file(path).states["x"], tree) == []


def test_missing_and_unused_tensors_are_refused() -> None:
    structure, tensors = flatten_state({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(CheckpointError, match="/b"):
        unflatten_state(structure, {"/a": tensors["/a"]})
    with pytest.raises(CheckpointError, match="/c"):
        unflatten_state(structure, {**tensors, "/c": torch.ones(1)})


@pytest.mark.parametrize(
    "leaf",
    [
        object(),
        np.float64(1),
        {1: 2},
        b"x",
        np.array(["a"]),
        np.array([object()]),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2, device="meta"),
        "\ud800",
        {"\ud800": 1},
        1j,
    ],
)
def test_leaf_that_cannot_be_stored_is_named_by_its_path(leaf: Any) -> None:
    with pytest.raises(CheckpointError, match="/learner/0"):
        flatten_state({"learner": [leaf]})


def test_tree_deeper_than_the_limit_is_refused() -> None:
    tree: Any = 1
    for _ in range(70):
        tree = [tree]
    with pytest.raises(CheckpointError, match="deeper"):
        flatten_state(tree)


# -- seeds ---------------------------------------------------------------------------------------


def seeded_tree(seeds: int) -> dict[str, Any]:
    return {
        "w": torch.arange(seeds * 4, dtype=torch.float32).reshape(seeds, 4),
        "nested": [{"mask": np.arange(seeds, dtype=np.uint32)}, 3, math.nan],
        "shared": torch.tensor(2.0),
        "env": {"per_seed": [{"rng": 2**100 + i, "x": torch.ones(i)} for i in range(seeds)]},
    }


def test_stacking_is_the_inverse_of_slicing() -> None:
    tree = seeded_tree(3)
    slices = [slice_seed(tree, i) for i in range(3)]
    assert slices[1]["w"].shape == (1, 4)
    assert slices[2]["env"]["per_seed"][0]["x"].shape == (2,)
    assert compare_states(stack_seeds(slices), tree) == []
    again = stack_seeds(slices)
    assert all(compare_states(slice_seed(again, i), slices[i]) == [] for i in range(3))


def test_slicing_refuses_parts_that_disagree_about_the_number_of_seeds() -> None:
    with pytest.raises(CheckpointError, match="2 seeds at /a but 3 at /b"):
        slice_seed({"a": torch.ones(2), "b": torch.ones(3)}, 0)
    with pytest.raises(CheckpointError, match="2 seeds at /a but 3 at /b/per_seed"):
        slice_seed({"a": np.ones(2), "b": {"per_seed": [1, 2, 3]}}, 0)
    with pytest.raises(CheckpointError, match="index 2"):
        slice_seed(seeded_tree(2), 2)
    with pytest.raises(CheckpointError, match="per_seed"):
        slice_seed({"per_seed": 3}, 0)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"nested": [{"mask": np.arange(1, dtype=np.uint32)}, 4, math.nan]}, "/nested/1"),
        ({"shared": torch.tensor(2.5)}, "/shared"),
        ({"w": torch.zeros(1, 5)}, "/w"),
        ({"w": torch.zeros(1, 4, dtype=torch.float64)}, "/w"),
        ({"w": np.zeros((1, 4), dtype=np.float32)}, "/w"),
        ({"nested": [1]}, "/nested"),
        ({"env": {}}, "/env"),
    ],
)
def test_stacking_names_what_is_not_alike(change: dict[str, Any], path: str) -> None:
    one = slice_seed(seeded_tree(2), 0)
    with pytest.raises(CheckpointError, match=path):
        stack_seeds([one, {**one, **change}])


# -- comparison ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_comparison_finds_one_flipped_bit(dtype: torch.dtype) -> None:
    a = torch.arange(6).to(dtype).reshape(2, 3)
    b = a.clone()
    b.view(torch.uint8).view(-1)[-1] ^= 1
    (difference,) = compare_states({"x": {"y": [a]}}, {"x": {"y": (b,)}})
    assert (difference.path, difference.kind) == ("/x/y/0", "value")
    assert difference.detail.startswith("1 of 6 elements differ")
    assert digest_state(a) != digest_state(b)


def test_comparison_tells_kinds_of_difference_apart() -> None:
    a = {"n": math.nan, "z": 0.0, "t": torch.ones(2), "l": [1], "k": 1, "b": True, "d": np.ones(1)}
    b = {"n": math.nan, "z": -0.0, "t": torch.ones(3), "l": [1, 2], "j": 1, "b": 1}
    b["d"] = np.ones(1, dtype=np.float32)
    found = {d.path: d.kind for d in compare_states(a, b)}
    assert found == {"/z": "value", "/t": "shape", "/l": "length", "/k": "missing",
                     "/j": "missing", "/b": "type", "/d": "dtype"}  # fmt: skip


def test_digest_ignores_order_and_layout_but_not_content() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    assert digest_state({"a": base.T, "b": 1}) == digest_state({"b": 1, "a": base.T.contiguous()})
    assert digest_state({"a": base}) != digest_state({"a": base.reshape(3, 2)})
    assert digest_state({"a": 1}) != digest_state({"a": 1.0})

"""Randomness: one generator per seed and owner, nothing global, restored to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rl_training.rng import Rng, derive_seed

SEEDS = (4, 9, 2)


def test_derived_seed_is_the_head_of_a_digest() -> None:
    digest = hashlib.sha256(b"3/replay/1").hexdigest()
    assert derive_seed(3, "replay", 1) == int(digest[:16], 16) // 2
    assert 0 <= derive_seed(3, "replay", 1) < 2**63


def test_derived_seed_never_changes_between_versions() -> None:
    assert derive_seed(0, "learner") == 1_041_353_269_543_673_150


def test_streams_and_seeds_are_told_apart() -> None:
    names = [(seed, stream) for seed in range(20) for stream in ("a", "b", "learner")]
    assert len({derive_seed(*name) for name in names}) == len(names)
    assert not torch.equal(Rng((0,), "a").normal(8), Rng((0,), "b").normal(8))


def test_a_seed_draws_the_same_numbers_alone_or_in_a_group() -> None:
    group = Rng(SEEDS, "x")
    alone = [Rng((seed,), "x") for seed in SEEDS]
    draws: list[Callable[[Rng], Tensor]] = [
        lambda r: r.normal(3, 2),
        lambda r: r.uniform(5),
        lambda r: r.exponential(5),
        lambda r: r.integers(10, 7),
        lambda r: r.permutation(9),
    ]
    for draw in draws:
        together = draw(group)
        assert together.shape[0] == 3
        assert torch.equal(together, torch.cat([draw(single) for single in alone]))


def test_draws_have_the_promised_ranges() -> None:
    rng = Rng(SEEDS, "x")
    uniform, integers = rng.uniform(1000), rng.integers(3, 1000)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert integers.dtype == torch.int64
    assert set(integers.flatten().tolist()) == {0, 1, 2}
    assert rng.normal(5000).std().item() == pytest.approx(1.0, abs=0.05)
    exponential = rng.exponential(5000)
    assert exponential.min() > 0
    assert exponential.mean().item() == pytest.approx(1.0, abs=0.05)
    for row in rng.permutation(20):
        assert row.sort().values.tolist() == list(range(20))


def test_restored_generators_go_on_to_the_bit_whatever_their_seeds_were() -> None:
    first, second = Rng(SEEDS, "x"), Rng((100, 101, 102), "y")
    first.normal(5)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.uniform(7), second.uniform(7))


def test_saved_state_is_not_touched_by_later_draws() -> None:
    rng = Rng((0,), "x")
    state = rng.state_dict()
    before = rng.normal(4)
    rng.load_state_dict(state)
    assert torch.equal(rng.normal(4), before)


def test_state_of_another_number_of_seeds_is_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        Rng((0, 1), "x").load_state_dict(Rng((0,), "x").state_dict())


def test_nothing_global_is_drawn_from_or_seeded() -> None:
    before = torch.get_rng_state()
    rng = Rng((0,), "x")
    first = rng.normal(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert torch.equal(Rng((0,), "x").normal(4), first)

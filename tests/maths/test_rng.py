"""Randomness: one key per seed and owner, nothing global, restored to the bit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training import rng as rng_module
from rl_training.errors import CheckpointError
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
    with pytest.raises(CheckpointError, match="keys"):
        Rng((0, 1), "x").load_state_dict(Rng((0,), "x").state_dict())


def test_nothing_global_is_drawn_from_or_seeded() -> None:
    before = torch.get_rng_state()
    rng = Rng((0,), "x")
    first = rng.normal(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert torch.equal(Rng((0,), "x").normal(4), first)


def test_tensors_and_host_draw_the_same_numbers() -> None:
    host, tensors = Rng(SEEDS, "x"), Rng(SEEDS, "x")
    tensors.as_tensors = True
    for _ in range(2):
        assert torch.equal(host.integers(10**6, 4, 7), tensors.integers(10**6, 4, 7))
        assert torch.equal(host.uniform(33), tensors.uniform(33))
        assert torch.equal(host.permutation(50), tensors.permutation(50))
        torch.testing.assert_close(host.normal(999), tensors.normal(999), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(host.exponential(999), tensors.exponential(999))
    assert torch.equal(host.counter, tensors.counter)


def test_words_are_those_of_splitmix64() -> None:
    # Steele et al. (2014): the published first output of the generator started at zero.
    state = torch.tensor(rng_module._signed(rng_module._GOLDEN))
    word = int(rng_module._tensor_mix(state))
    assert word & (2**64 - 1) == 0xE220A8397B1DCDAF
    assert rng_module._mix(np.array([rng_module._GOLDEN], np.uint64))[0] == 0xE220A8397B1DCDAF


def test_normal_numbers_have_the_moments_and_tails_of_a_gaussian() -> None:
    draws = Rng((3,), "moments").normal(400_000)[0].double()
    assert draws.mean().item() == pytest.approx(0.0, abs=0.006)
    assert draws.var().item() == pytest.approx(1.0, abs=0.01)
    assert draws.pow(3).mean().item() == pytest.approx(0.0, abs=0.02)
    assert draws.pow(4).mean().item() == pytest.approx(3.0, abs=0.06)
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = (draws > bound).double().mean().item()
        exact = 0.5 * math.erfc(bound / math.sqrt(2))
        assert share == pytest.approx(exact, abs=4 * math.sqrt(exact / len(draws)))


def test_draws_of_neighbouring_positions_counters_and_keys_are_uncorrelated() -> None:
    rng = Rng(range(50), "x")
    block = torch.stack([rng.uniform(100) for _ in range(50)]).double() - 0.5  # [draw, seed, place]
    for axis in range(3):
        product = block.narrow(axis, 0, block.shape[axis] - 1) * block.narrow(
            axis, 1, block.shape[axis] - 1
        )
        assert abs(product.mean().item()) < 4 * (1 / 12) / math.sqrt(product.numel())


def test_uniform_numbers_fill_the_interval_evenly() -> None:
    counts = torch.histc(Rng((1,), "x").uniform(100_000)[0], 100, 0.0, 1.0)
    chi_square = ((counts - 1000).square() / 1000).sum().item()
    assert 60 < chi_square < 150  # 99 degrees of freedom


def test_permutations_of_members_are_permutations_and_differ() -> None:
    drawn = Rng((0, 1), "x").permutation(20, 3)
    assert torch.equal(drawn.sort(-1).values, torch.arange(20).expand(2, 3, 20))
    assert len({tuple(row.tolist()) for row in drawn.flatten(0, 1)}) == 6
    assert torch.equal(Rng((0,), "x").permutation(20), Rng((0,), "x").permutation(20, 1)[:, 0])


def test_seeking_goes_to_a_numbered_draw() -> None:
    rng, other = Rng((0,), "x"), Rng((0,), "x")
    draws = [rng.uniform(3) for _ in range(70)]
    for position in (69, 0, 5):  # over the blocks in which starting points are made
        other.seek(position)
        assert torch.equal(other.uniform(3), draws[position])

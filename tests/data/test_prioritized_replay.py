"""Prioritized replay: frequencies, importance weights and block sums by their formulas."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.data.replay.prioritized import PRIORITY_FLOOR, PrioritizedReplayBuffer
from rl_training.errors import DataError


def make_buffer(capacity: int, rows: int, **options: Any) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(capacity, (1,), **options)
    add_rows(buffer, rows)
    return buffer


def add_rows(buffer: PrioritizedReplayBuffer, rows: int) -> None:
    shape = (buffer.num_seeds, buffer.num_envs)
    for _ in range(rows // buffer.num_envs):
        number = np.full(shape, buffer.inserted.value, np.float32)
        false = np.zeros(shape, bool)
        buffer.add(number[..., None], number, number, number[..., None], false, false)


def set_all(buffer: PrioritizedReplayBuffer, priority: Tensor) -> None:
    index = torch.arange(priority.shape[1]).expand(buffer.num_seeds, -1)
    buffer.update_priorities(index, priority)


def drawn(buffer: PrioritizedReplayBuffer, batch_size: int, batches: int = 1) -> Tensor:
    parts = []
    for _ in range(batches):
        index = buffer.sample(batch_size).index
        assert index is not None
        parts.append(index)
    return torch.cat(parts, 1)


def probabilities(priority: Tensor, exponent: float) -> Tensor:
    powers = (priority.double() + PRIORITY_FLOOR) ** exponent
    return powers / powers.sum(-1, keepdim=True)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
def test_frequencies_are_proportional_to_powers_of_the_priority(exponent: float) -> None:
    buffer = make_buffer(10, 10, seeds=(0, 1), priority_exponent=exponent)
    priority = torch.stack((torch.arange(1.0, 11.0), torch.tensor([0.1, 5.0] * 5)))
    set_all(buffer, priority)
    index = drawn(buffer, 8, batches=2500)
    for row, share in zip(index, probabilities(priority, exponent), strict=True):
        expected = share * row.numel()
        counts = torch.bincount(row, minlength=10)
        chi_square = ((counts - expected).square() / expected).sum().item()
        assert chi_square < 27.88, "the 99.9 % point with 9 degrees of freedom"


def test_one_draw_comes_from_each_stratum() -> None:
    buffer = make_buffer(16, 16, priority_exponent=1.0)
    set_all(buffer, torch.ones(1, 16))
    # Equal priorities and as many strata as rows: every row exactly once, in order.
    assert drawn(buffer, 16).tolist() == [list(range(16))]


def test_importance_weights_follow_their_formula() -> None:
    buffer = make_buffer(10, 7, seeds=(0, 1), priority_exponent=0.7, importance_exponent=0.4)
    priority = torch.stack((torch.arange(1.0, 8.0), torch.linspace(0.0, 3.0, 7)))
    set_all(buffer, priority)
    share = probabilities(priority, 0.7)
    for progress, exponent in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0)):
        buffer.set_progress(progress)
        batch = buffer.sample(8)
        assert batch.weight is not None
        assert batch.index is not None
        raw = (7 * share.gather(1, batch.index)) ** -exponent
        expected = (raw / raw.amax(1, keepdim=True)).float()
        torch.testing.assert_close(batch.weight, expected)
        assert batch.weight.amax(1).tolist() == [1.0, 1.0]


def test_importance_weights_follow_their_formula_for_a_large_exponent() -> None:
    buffer = make_buffer(4, 4, priority_exponent=3.0, importance_exponent=1.0)
    priority = torch.tensor([[0.001, 0.002, 0.002, 0.002]])
    set_all(buffer, priority)
    batch = buffer.sample(64)
    assert batch.weight is not None
    assert batch.index is not None
    raw = 1 / probabilities(priority, 3.0).gather(1, batch.index)
    torch.testing.assert_close(batch.weight, (raw / raw.amax(1, keepdim=True)).float())


def test_equal_priorities_give_equal_weights() -> None:
    weight = make_buffer(10, 10).sample(8).weight
    assert weight is not None
    assert weight.tolist() == [[1.0] * 8]


def test_new_rows_get_the_largest_priority_so_far() -> None:
    buffer = make_buffer(10, 4, seeds=(0, 1), priority_exponent=0.5)
    assert buffer.powers.flatten(1)[:, :4].tolist() == [[1.0] * 4] * 2
    set_all(buffer, torch.tensor([[1.0, 2.0, 9.0, 3.0], [0.1, 0.2, 0.3, 0.4]]))
    add_rows(buffer, 1)
    newest = buffer.powers.flatten(1)[:, 4]
    # sqrt 9 in one seed; in the other nothing has passed the starting value of 1.
    torch.testing.assert_close(newest, torch.tensor([3.0, 1.0], dtype=torch.float64))


def test_a_large_priority_is_remembered_after_it_was_lowered() -> None:
    buffer = make_buffer(10, 2, priority_exponent=1.0)
    set_all(buffer, torch.tensor([[9.0, 1.0]]))
    set_all(buffer, torch.tensor([[1.0, 1.0]]))
    add_rows(buffer, 1)
    assert buffer.powers.flatten()[2].item() == pytest.approx(9.0, rel=1e-6)


def test_an_overwritten_row_loses_its_old_priority() -> None:
    buffer = make_buffer(4, 4, priority_exponent=1.0)
    set_all(buffer, torch.tensor([[0.25, 0.5, 0.5, 0.5]]))
    add_rows(buffer, 1)
    powers = buffer.powers.flatten()[:4]
    torch.testing.assert_close(powers.float(), torch.tensor([1.0, 0.5, 0.5, 0.5]))


def test_priorities_are_absolute_errors_and_never_zero() -> None:
    buffer = make_buffer(4, 4, priority_exponent=1.0)
    set_all(buffer, torch.tensor([[-2.0, 2.0, 0.0, 1.0]]))
    powers = buffer.powers.flatten()[:4]
    assert powers[0] == powers[1]
    assert powers[2].item() == pytest.approx(PRIORITY_FLOOR)


@pytest.mark.parametrize(("capacity", "envs"), [(10, 1), (1, 1), (50, 3), (129, 1)])
def test_block_sums_equal_row_sums_after_many_random_updates(capacity: int, envs: int) -> None:
    buffer = make_buffer(capacity, 0, seeds=(0, 1), num_envs=envs)
    rng = np.random.default_rng(0)
    for _ in range(100):
        add_rows(buffer, envs * int(rng.integers(1, 4)))
        index = torch.from_numpy(rng.integers(0, len(buffer), (2, 8)))
        buffer.update_priorities(index, index * 0.37)  # equal rows have equal priorities
        drawn_rows = drawn(buffer, 8)
        assert drawn_rows.min() >= 0
        assert drawn_rows.max() < len(buffer)
    assert torch.equal(buffer.sums, buffer.powers.sum(-1))
    stored = buffer.powers.flatten(1)
    assert (stored[:, : len(buffer)] > 0).all()
    assert not stored[:, buffer.capacity :].any(), "cells past the capacity hold no mass"


def test_a_row_with_all_the_mass_is_always_drawn_wherever_it_is() -> None:
    buffer = make_buffer(11, 11, priority_exponent=8.0)
    assert buffer.capacity % buffer.block, "otherwise the last block is not a partial one"
    for row in range(11):
        priority = torch.full((1, 11), 1e-3)
        priority[0, row] = 100.0
        set_all(buffer, priority)
        assert drawn(buffer, 8).tolist() == [[row] * 8]


def test_state_round_trip_goes_on_to_the_bit() -> None:
    first = make_buffer(10, 8, seeds=(0, 1))
    set_all(first, torch.rand(2, 8, generator=torch.Generator().manual_seed(0)))
    second = make_buffer(10, 0, seeds=(7, 8))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.load_rows(0, first.read_rows(0, 8))
    for _ in range(5):
        ours, theirs = first.sample(8), second.sample(8)
        for name in ("obs", "reward", "index", "weight"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for buffer, batch in ((first, ours), (second, theirs)):
            assert batch.index is not None
            buffer.update_priorities(batch.index, batch.reward.abs())
            add_rows(buffer, 1)
    assert torch.equal(first.powers, second.powers)
    assert torch.equal(first.sums, second.sums)


def test_a_seed_draws_the_same_rows_alone_or_in_a_group() -> None:
    group, alone = make_buffer(16, 12, seeds=(7, 8)), make_buffer(16, 12, seeds=(8,))
    set_all(group, torch.arange(12.0).expand(2, -1))
    set_all(alone, torch.arange(12.0).expand(1, -1))
    assert torch.equal(drawn(group, 8)[1], drawn(alone, 8)[0])


def test_an_empty_buffer_says_so() -> None:
    with pytest.raises(DataError, match="empty"):
        make_buffer(5, 0).sample(1)

"""Replay: the ring, uniform draws, and n-step returns against a naive reference."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from rl_training.data.replay.storage import ReplayBuffer
from rl_training.errors import CheckpointError, DataError

Array = NDArray[Any]
GAMMA = 0.9


class History:
    """Steps [T, S, n]: every observation is a number of its own, rewards and flags are given."""

    def __init__(self, flags: Array, seed: int = 0) -> None:
        self.terminated, self.truncated = flags[..., 0], flags[..., 1]
        self.steps, self.seeds, self.envs = self.terminated.shape
        self.reward = np.random.default_rng(seed).normal(size=self.terminated.shape)
        numbers = np.arange(self.terminated.size, dtype=np.float32).reshape(self.terminated.shape)
        self.obs, self.next_obs = numbers, numbers + 0.5

    def fill(self, buffer: ReplayBuffer, start: int = 0, stop: int | None = None) -> ReplayBuffer:
        for t in range(start, self.steps if stop is None else stop):
            buffer.add(
                self.obs[t][..., None],
                self.obs[t][..., None] + 0.25,
                self.reward[t],
                self.next_obs[t][..., None],
                self.terminated[t],
                self.truncated[t],
            )
        return buffer

    def n_step(self, t: int, seed: int, env: int, n: int) -> tuple[float, float, float]:
        """Sum, discount of the bootstrap and observation to bootstrap from, by plain counting."""
        total, last, discount = 0.0, t, 1.0
        for k in range(n):
            if t + k >= self.steps:
                break
            last = t + k
            total += GAMMA**k * self.reward[last, seed, env]
            discount *= GAMMA
            if self.terminated[last, seed, env] or self.truncated[last, seed, env]:
                break
        if self.terminated[last, seed, env]:
            discount = 0.0
        return total, discount, float(self.next_obs[last, seed, env])


def make_buffer(capacity: int, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, (1,), (1,), gamma=GAMMA, **options)


def endless(steps: int, seeds: int = 1, envs: int = 1) -> History:
    return History(np.zeros((steps, seeds, envs, 2), dtype=bool))


@st.composite
def histories(draw: st.DrawFn) -> History:
    shape = (draw(st.integers(1, 14)), 2, draw(st.sampled_from([1, 3])), 2)
    # Ends in a third of the steps keep both short and long episodes in view.
    flags = draw(npst.arrays(np.uint8, shape, elements=st.integers(0, 5))) == 0
    return History(flags, draw(st.integers(0, 1000)))


@settings(deadline=None, derandomize=True, max_examples=120)
@given(histories(), st.sampled_from([1, 2, 3, 5]), st.integers(0, 20))
def test_n_step_returns_equal_a_naive_count(history: History, n: int, slack: int) -> None:
    envs = history.envs
    capacity = (n + slack // 2) * envs + slack % 3  # from the smallest allowed to never wrapping
    buffer = make_buffer(capacity, num_envs=envs, seeds=(0, 1), n_step=n)
    history.fill(buffer)
    kept = range(max(0, history.steps - buffer.capacity // envs), history.steps)
    assert len(buffer) == len(kept) * envs
    where = [(t, env) for t in kept for env in range(envs)]
    index = torch.tensor([(t * envs + env) % buffer.capacity for t, env in where])
    batch = buffer.gather(index.expand(2, -1))
    for seed in range(2):
        expected = np.array([history.n_step(t, seed, env, n) for t, env in where])
        np.testing.assert_allclose(batch.reward[seed], expected[:, 0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(batch.discount[seed], expected[:, 1], rtol=1e-6)
        np.testing.assert_array_equal(batch.next_obs[seed, :, 0], expected[:, 2])
        own = [history.obs[t, seed, env] for t, env in where]
        np.testing.assert_array_equal(batch.obs[seed, :, 0], own)
        np.testing.assert_array_equal(batch.action[seed, :, 0], np.array(own) + 0.25)


def n_step_by_hand(flag: int) -> tuple[float, float, float]:
    """Three-step return from row 0 of an episode that ends (0 terminated, 1 truncated) at row 1."""
    flags = np.zeros((4, 1, 1, 2), dtype=bool)
    flags[1, 0, 0, flag] = True
    history = History(flags)
    history.reward[:, 0, 0] = [1.0, 2.0, 50.0, 50.0]
    batch = history.fill(make_buffer(8, n_step=3)).gather(torch.tensor([[0]]))
    return batch.reward.item(), batch.discount.item(), batch.next_obs.item()


def test_truncation_stops_the_sum_and_keeps_the_bootstrap() -> None:
    assert n_step_by_hand(1) == pytest.approx((1 + 0.9 * 2, 0.81, 1.5))


def test_termination_stops_the_sum_and_the_bootstrap() -> None:
    assert n_step_by_hand(0) == pytest.approx((1 + 0.9 * 2, 0.0, 1.5))


def test_one_step_batches_tell_termination_from_truncation() -> None:
    flags = np.zeros((4, 1, 1, 2), dtype=bool)
    flags[1, 0, 0] = [True, False]
    flags[2, 0, 0] = [False, True]
    flags[3, 0, 0] = [True, True]
    batch = History(flags).fill(make_buffer(4)).gather(torch.arange(4).unsqueeze(0))
    torch.testing.assert_close(batch.discount, torch.tensor([[0.9, 0.0, 0.9, 0.0]]))


def test_the_ring_overwrites_the_oldest_rows() -> None:
    buffer = endless(7).fill(make_buffer(5))
    assert len(buffer) == 5
    assert buffer.rows["obs"].flatten().tolist() == [5, 6, 2, 3, 4]
    assert buffer.segment_range() == (2, 7)


def test_capacity_is_a_multiple_of_the_environments() -> None:
    buffer = endless(6, envs=3).fill(make_buffer(11, num_envs=3))
    assert buffer.capacity == len(buffer) == 9
    assert sorted(buffer.rows["obs"].flatten().tolist()) == list(range(9, 18))


def test_draws_are_uniform_over_the_stored_rows_only() -> None:
    buffer = endless(10, seeds=2).fill(make_buffer(32, seeds=(0, 1)))
    index = buffer.sample(20_000).index
    assert index is not None
    for row in index:
        counts = torch.bincount(row, minlength=32)
        assert not counts[10:].any(), "rows never written were drawn"
        chi_square = ((counts[:10] - 2000.0).square() / 2000).sum().item()
        assert chi_square < 27.88, "the 99.9 % point with 9 degrees of freedom"
    assert not torch.equal(index[0], index[1])


def test_a_batch_holds_the_rows_its_index_names() -> None:
    history = endless(10, seeds=2)
    batch = history.fill(make_buffer(16, seeds=(3, 4))).sample(8)
    assert batch.index is not None
    assert batch.weight is None
    for seed in range(2):
        expected = history.obs[batch.index[seed].numpy(), seed, 0]
        np.testing.assert_array_equal(batch.obs[seed, :, 0], expected)


def test_draws_depend_on_the_generator_alone() -> None:
    first, second = make_buffer(16, seeds=(5,)), make_buffer(16, seeds=(99,))
    for buffer in (first, second):
        endless(10).fill(buffer)
    first.sample(3)
    torch.manual_seed(0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    expected = first.sample(8)
    torch.manual_seed(1)
    got = second.sample(8)
    assert torch.equal(got.obs, expected.obs)
    assert not torch.equal(second.sample(8).obs, got.obs)


def test_a_seed_draws_the_same_rows_alone_or_in_a_group() -> None:
    group = endless(10, seeds=3).fill(make_buffer(16, seeds=(7, 8, 9)))
    alone = endless(10).fill(make_buffer(16, seeds=(8,)))
    together, single = group.sample(8).index, alone.sample(8).index
    assert together is not None
    assert single is not None
    assert torch.equal(together[1], single[0])


@pytest.mark.parametrize("steps", [3, 8, 21])
def test_rows_read_and_loaded_by_segments_restore_the_buffer(steps: int) -> None:
    flags = np.random.default_rng(0).random((steps + 4, 2, 3, 2)) < 0.2
    history = History(flags)
    first = make_buffer(24, num_envs=3, seeds=(0, 1), n_step=3)
    second = make_buffer(24, num_envs=3, seeds=(5, 6), n_step=3)
    history.fill(first, stop=steps)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    begin, end = first.segment_range()
    for start in range(begin, end, 9):
        stop = min(start + 9, end)
        rows = first.read_rows(start, stop)
        assert rows["reward"].shape == (2, stop - start)
        second.load_rows(start, rows)
    for buffer in (first, second):
        history.fill(buffer, start=steps)  # both go on, over the wrap-around
    for name, stored in first.rows.items():
        assert torch.equal(stored, second.rows[name]), name
    ours, theirs = first.sample(8), second.sample(8)
    assert torch.equal(ours.reward, theirs.reward)
    assert torch.equal(ours.next_obs, theirs.next_obs)


def test_rows_read_are_in_the_order_of_insertion() -> None:
    buffer = endless(7).fill(make_buffer(5))
    assert buffer.read_rows(2, 7)["obs"].flatten().tolist() == [2, 3, 4, 5, 6]


def test_segments_hold_whole_steps() -> None:
    buffer = make_buffer(1000, num_envs=3)
    assert buffer.segment_rows % 3 == 0
    assert 0 < buffer.segment_rows <= buffer.capacity


def test_pixels_and_discrete_actions_come_back_as_stored() -> None:
    buffer = ReplayBuffer(4, (2, 2), action_dtype=torch.int64, obs_dtype=torch.uint8)
    obs = np.full((1, 1, 2, 2), 200, np.uint8)
    false = np.zeros((1, 1), bool)
    buffer.add(obs, np.array([[3]]), np.array([[1.0]]), obs + 1, false, false)
    batch = buffer.sample(2)
    assert batch.obs.dtype == torch.uint8
    assert set(batch.obs.flatten().tolist()) == {200}
    assert set(batch.next_obs.flatten().tolist()) == {201}
    assert batch.action.dtype == torch.int64
    assert batch.action.tolist() == [[3, 3]]


def test_a_capacity_below_n_steps_is_refused() -> None:
    with pytest.raises(DataError, match=r"buffer_capacity must be >= .* = 6, got 5"):
        make_buffer(5, num_envs=3, n_step=2)


def test_an_empty_buffer_says_so() -> None:
    with pytest.raises(DataError, match="empty"):
        make_buffer(5).sample(1)


def test_a_state_with_a_part_missing_is_refused() -> None:
    buffer = make_buffer(5)
    with pytest.raises(CheckpointError, match=r"missing \['rng'\]"):
        buffer.load_state_dict({"inserted": {"value": 0}})


@pytest.mark.parametrize("action_dtype", [torch.float32, torch.int64])
def test_rows_sent_to_another_device_are_those_stored_here(action_dtype: torch.dtype) -> None:
    discrete = action_dtype == torch.int64
    shape = () if discrete else (2,)
    here, there = (
        ReplayBuffer(9, (3,), shape, action_dtype=action_dtype, num_envs=3, seeds=(0, 1))
        for _ in range(2)
    )
    there._arrays = None  # as on a device whose memory NumPy does not see
    generator = np.random.default_rng(0)
    for _ in range(5):
        lead = (2, 3)
        row = (
            generator.normal(size=(*lead, 3)).astype(np.float32),
            generator.integers(4, size=(*lead, *shape)),
            generator.normal(size=lead).astype(np.float32),
            generator.normal(size=(*lead, 3)).astype(np.float32),
            generator.random(lead) < 0.5,
            generator.random(lead) < 0.5,
        )
        here.add(*row)
        there.add(*row)
    for name, rows in here.rows.items():
        assert torch.equal(rows, there.rows[name]), name

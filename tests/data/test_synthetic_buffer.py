"""Imagined rows: the newest count, batches are mixed to the row, ends keep their meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_training.algorithms.mobile import MOBILEConfig
from rl_training.data.replay.mixed import SyntheticBuffer
from rl_training.data.replay.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay.storage import ReplayBuffer

GAMMA = 0.9


def real_rows(
    count: int = 20, seeds: tuple[int, ...] = (0,), kind: Any = ReplayBuffer, **options: Any
) -> ReplayBuffer:
    """Real rows have reward -1; the last one is truncated."""
    buffer: ReplayBuffer = kind(count, (1,), (1,), seeds=seeds, gamma=GAMMA, **options)
    shape = (len(seeds), 1)
    for index in range(count):
        buffer.add(
            np.zeros((*shape, 1), np.float32),
            np.zeros((*shape, 1), np.float32),
            np.full(shape, -1.0, np.float32),
            np.zeros((*shape, 1), np.float32),
            np.zeros(shape, bool),
            np.full(shape, index == count - 1),
        )
    return buffer


def imagined(first: int, count: int, seeds: int = 1, ends: bool = False) -> dict[str, torch.Tensor]:
    """Rows whose reward is their number."""
    reward = torch.arange(first, first + count).float().expand(seeds, -1)
    rows = {name: reward.unsqueeze(-1) for name in ("obs", "action", "next_obs")}
    return rows | {"reward": reward, "terminated": torch.full_like(reward, ends).bool()}


def make(real: ReplayBuffer, capacity: int = 30, ratio: float = 0.05) -> SyntheticBuffer:
    seeds = tuple(range(real.num_seeds))
    return SyntheticBuffer(capacity, (1,), (1,), real=real, real_ratio=ratio, seeds=seeds)


def drawn(buffer: SyntheticBuffer) -> set[float]:
    batch = buffer.sample(4000)
    return set(batch.reward[batch.reward >= 0].tolist())


def test_every_batch_is_five_percent_real_to_the_row() -> None:
    buffer = make(real_rows())
    buffer.extend(imagined(0, 10), 30)
    for _ in range(5):
        reward = buffer.sample(256).reward
        assert int((reward == -1).sum()) == 13  # 12.8
        assert (reward[0, :13] == -1).all()


@pytest.mark.parametrize(("ratio", "real"), [(0.0, 0), (1.0, 64)])
def test_a_batch_may_be_all_of_one_kind(ratio: float, real: int) -> None:
    buffer = make(real_rows(), ratio=ratio)
    buffer.extend(imagined(0, 10), 30)
    assert int((buffer.sample(64).reward == -1).sum()) == real


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 0.5, 0.95, 1.0])
def test_the_settings_know_how_many_rows_of_a_batch_are_real(ratio: float) -> None:
    config = MOBILEConfig(synthetic_batch_ratio=ratio)
    buffer = make(real_rows(), ratio=1 - config.synthetic_batch_ratio)
    buffer.extend(imagined(0, 10), 30)
    for rows in (1, 8, 10, 30, 100, 128, 256):
        assert config.real_rows(rows) == buffer.other_rows(rows)


def test_only_the_newest_rows_count_and_their_number_may_grow() -> None:
    buffer = make(real_rows())
    buffer.extend(imagined(0, 10), 10)
    assert drawn(buffer) == set(map(float, range(10)))
    buffer.extend(imagined(10, 10), 10)
    assert drawn(buffer) == set(map(float, range(10, 20)))
    assert len(buffer) == 10
    buffer.extend(imagined(20, 20), 30)  # passes the end of the ring
    assert drawn(buffer) == set(map(float, range(10, 40)))
    assert buffer.segment_range() == (10, 40)


def test_imagined_ends_have_no_future_and_cut_episodes_do() -> None:
    buffer = make(real_rows(1), ratio=0.5)
    buffer.extend(imagined(0, 10, ends=True), 10)
    batch = buffer.sample(40)
    imagined_ones = batch.reward >= 0
    assert (batch.discount[imagined_ones] == 0).all()
    # The only real row is truncated.
    assert torch.equal(batch.discount[~imagined_ones], torch.full((20,), GAMMA))


def test_rows_and_window_survive_a_checkpoint() -> None:
    first = make(real_rows())
    first.extend(imagined(0, 20), 20)
    first.extend(imagined(20, 20), 25)
    second = make(real_rows())
    second.load_state_dict(first.state_dict())
    oldest, total = first.segment_range()
    assert (oldest, total) == (15, 40)
    second.load_rows(oldest, first.read_rows(oldest, total))
    for _ in range(3):
        ours, theirs = first.sample(16), second.sample(16)
        assert torch.equal(ours.reward, theirs.reward)


def test_real_rows_keep_their_priorities_and_weights() -> None:
    real = real_rows(kind=PrioritizedReplayBuffer)
    buffer = make(real, ratio=0.5)
    buffer.extend(imagined(0, 10), 30)
    batch = buffer.sample(8)
    assert batch.weight is not None
    assert batch.index is not None
    assert (batch.weight[0, 4:] == 1).all()
    priority = torch.full((1, 8), 100.0)
    buffer.update_priorities(batch.index, priority)
    assert isinstance(real, PrioritizedReplayBuffer)
    powers = real.powers.flatten(1)[0]
    hit = set(batch.index[0, :4].tolist())
    assert {index for index in range(20) if powers[index] > 2} == hit


def test_a_seed_draws_the_same_rows_alone_and_in_a_group() -> None:
    group = make(real_rows(seeds=(0, 1)))
    group.extend(imagined(0, 20, seeds=2), 20)
    alone = make(real_rows())
    alone.extend(imagined(0, 20), 20)
    assert torch.equal(group.sample(64).reward[:1], alone.sample(64).reward)

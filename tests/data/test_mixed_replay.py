"""Replay with prior data: what a batch is made of, rewards on one scale, and the state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.datasets import TOY, toy_data
from rl_training.algorithms.sources import PriorSettings
from rl_training.data.batch import TransitionBatch
from rl_training.data.datasets.blocks import RowSource
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.view import view_of
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.mixed import (
    MixedPrioritizedReplayBuffer,
    MixedReplayBuffer,
    UnionReplayBuffer,
    WithPrior,
)
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.errors import CheckpointError, ConfigError
from rl_training.validation import parse

OWN = 1000.0
"""Every entry of an own observation is at least this; those of the dataset are small."""


def learner_data(seed: int = 0) -> OfflineDataset:
    return toy_data(seed=seed).in_learner_units(TOY)


def make_replay(
    ratio: float = 0.5,
    *,
    kind: type[WithPrior] = MixedReplayBuffer,
    data: RowSource | None = None,
    seeds: tuple[int, ...] = (0,),
    n_step: int = 1,
) -> WithPrior:
    data = learner_data() if data is None else data
    prior = DatasetBuffer(data, seeds=seeds, n_step=n_step)
    return kind(50, (3,), (2,), seeds=seeds, n_step=n_step, prior=prior, prior_ratio=ratio)


def add_step(replay: ReplayBuffer, number: int = 0, reward: float = 1.0) -> None:
    lead = (replay.num_seeds, 1)
    obs = np.full((*lead, 3), OWN + number, np.float32)
    never = np.zeros(lead, bool)
    action = np.zeros((*lead, 2), np.float32)
    replay.add(obs, action, np.full(lead, reward, np.float32), obs + 1, never, never)


def own_rows(batch: TransitionBatch) -> Tensor:
    """Which rows are of the run's own experience, `[S, B]`."""
    return batch.obs[..., 0] >= OWN


@pytest.mark.parametrize("kind", [MixedReplayBuffer, MixedPrioritizedReplayBuffer])
@pytest.mark.parametrize(
    ("ratio", "prior"), [(0.0, 0), (0.25, 2), (0.5, 4), (0.8, 6), (0.99, 8), (1.0, 8)]
)
def test_every_batch_has_exactly_the_share_of_prior_rows(
    kind: type[WithPrior], ratio: float, prior: int
) -> None:
    replay = make_replay(ratio, kind=kind, seeds=(1, 2), n_step=3)
    for number in range(7):
        add_step(replay, number)
    for _ in range(30):
        own = own_rows(replay.sample(8))
        assert own.sum(1).tolist() == [8 - prior, 8 - prior]


def test_before_there_is_experience_batches_are_of_the_dataset_alone() -> None:
    replay = make_replay(0.25)
    assert len(replay) == 0
    assert replay.prior_rows(8) == 8
    assert not own_rows(replay.sample(8)).any()
    add_step(replay)
    assert own_rows(replay.sample(8)).sum() == 6


def test_the_union_draws_every_row_of_data_and_experience_equally_often() -> None:
    prior = DatasetBuffer(learner_data(), seeds=(1, 2))
    replay = UnionReplayBuffer(50, (3,), (2,), seeds=(1, 2), prior=prior)
    rows = len(prior)
    assert not own_rows(replay.sample(64)).any(), "without experience it is the dataset alone"
    for number in range(2 * rows):  # the ring keeps the newest 50
        add_step(replay, number)
    share = len(replay) / (len(replay) + rows)
    batch = replay.sample(20_000)
    torch.testing.assert_close(
        own_rows(batch).float().mean(1), torch.full((2,), share), atol=0.02, rtol=0
    )
    drawn = set(batch.obs[0, :, 0].tolist())
    assert len(drawn) == len(replay) + rows, "every row is drawn"
    assert (batch.next_obs[own_rows(batch)] == batch.obs[own_rows(batch)] + 1).all()
    assert replay.prior_rows(100) == round(100 * (1 - share))


def test_the_union_is_not_drawn_by_priority() -> None:
    settings = {"dataset_kind": "random", "offline_batch_ratio": "union"}
    parse(PriorSettings, settings)
    with pytest.raises(ConfigError, match="offline_batch_ratio union draws uniformly"):
        parse(PriorSettings, settings | {"prioritized": True})


def test_without_prior_rows_the_draws_are_those_of_a_plain_replay() -> None:
    replay, plain = make_replay(0.0), ReplayBuffer(50, (3,), (2,))
    for number in range(9):
        add_step(replay, number)
        add_step(plain, number)
    for _ in range(5):
        assert torch.equal(replay.sample(8).obs, plain.sample(8).obs)


def test_the_two_halves_are_drawn_independently() -> None:
    data = learner_data()
    replay = make_replay(0.5, data=data)
    while len(replay) < 50:
        add_step(replay, len(replay))
    index = torch.cat([replay.sample(64).index for _ in range(40)])  # type: ignore[misc]
    prior, own = index[:, :32].double() / len(data), index[:, 32:].double() / 50
    correlation = torch.corrcoef(torch.stack((prior.flatten(), own.flatten())))[0, 1]
    assert abs(float(correlation)) < 0.1


def test_rows_of_a_mix_are_gathered_from_where_their_index_says() -> None:
    replay = make_replay(0.5)
    for number in range(9):
        add_step(replay, number)
    batch = replay.sample(8)
    assert batch.index is not None
    expected = torch.cat(
        (replay.prior.gather(batch.index[:, :4]).obs, replay.gather(batch.index[:, 4:]).obs), 1
    )
    assert torch.equal(batch.obs, expected)


@pytest.mark.parametrize("changed", ["before", "when read"])
def test_rewards_of_the_task_get_what_those_of_the_data_got(changed: str) -> None:
    raw = learner_data()
    data: RowSource = raw.with_normalized_rewards().scaled(0.3, -1.0)
    if changed == "when read":
        data = view_of([toy_data()], TOY).with_normalized_rewards().scaled(0.3, -1.0)
    replay = make_replay(0.5, data=data)
    for row in range(5):
        add_step(replay, row, reward=float(raw.rewards[row]))
    torch.testing.assert_close(replay.rows["reward"][:, :5], replay.prior.rows["reward"][:, :5])
    assert not np.allclose(raw.rewards[:5], replay.prior.rows["reward"][0, :5].numpy())


def test_scaling_alone_gives_the_same_bits_in_both_halves() -> None:
    raw = learner_data()
    replay = make_replay(0.5, data=raw.scaled(0.1, 0.7))
    for row in range(50):
        add_step(replay, row, reward=float(raw.rewards[row]))
    assert torch.equal(replay.rows["reward"][:, :50], replay.prior.rows["reward"][:, :50])


def test_scalings_compose() -> None:
    view = view_of([toy_data()], TOY).scaled(2.0, 1.0).scaled(3.0, 0.5)
    for data in (learner_data().scaled(2.0, 1.0).scaled(3.0, 0.5), view, view.to_dataset()):
        assert (data.reward_scale, data.reward_shift) == (6.0, 3.5)


def test_priorities_reach_the_own_rows_and_prior_rows_weigh_one() -> None:
    replay = make_replay(0.5, kind=MixedPrioritizedReplayBuffer)
    assert isinstance(replay, MixedPrioritizedReplayBuffer)
    for number in range(20):
        add_step(replay, number)
    index = torch.tensor([[100, 101, 3, 4]])
    before = replay.powers.clone()
    replay.update_priorities(index, torch.tensor([[9.0, 9.0, 5.0, 7.0]]))
    changed = (replay.powers != before).flatten().nonzero().flatten()
    assert changed.tolist() == [3, 4]
    weight = replay.sample(8).weight
    assert weight is not None
    assert torch.equal(weight[:, :4], torch.ones(1, 4))
    assert (weight[:, 4:] < 1).any()


def test_priorities_of_a_batch_of_prior_rows_go_nowhere() -> None:
    replay = make_replay(0.5, kind=MixedPrioritizedReplayBuffer)
    batch = replay.sample(8)
    assert batch.index is not None
    replay.update_priorities(batch.index, torch.ones(1, 8))
    assert isinstance(replay, MixedPrioritizedReplayBuffer)
    assert not replay.powers.any()


@pytest.mark.parametrize("kind", [MixedReplayBuffer, MixedPrioritizedReplayBuffer])
def test_a_restored_buffer_draws_the_same_and_holds_no_row_of_the_dataset(
    kind: type[WithPrior],
) -> None:
    replay, other = make_replay(kind=kind, seeds=(0, 1)), make_replay(kind=kind, seeds=(5, 6))
    for number in range(12):
        add_step(replay, number)
    replay.sample(8)
    state = replay.state_dict()
    assert sum(t.numel() for t in _tensors(state)) < 1000
    other.load_state_dict(state)
    other.load_rows(0, replay.read_rows(*replay.segment_range()))
    for _ in range(3):
        assert torch.equal(replay.sample(8).obs, other.sample(8).obs)


def test_other_prior_data_is_refused() -> None:
    state = make_replay(data=learner_data(1)).state_dict()
    with pytest.raises(CheckpointError, match="the dataset is not the one this run was trained on"):
        make_replay(data=learner_data(2)).load_state_dict(state)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [t for value in tree.values() for t in _tensors(value)] if isinstance(tree, dict) else []

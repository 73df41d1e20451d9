"""Return-to-go: the sums themselves, those of a dataset's batches, and of episodes as they end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.datasets import TOY, rebuilt, tiny_columns, toy_data
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.mapped import MappedBuffer
from rl_training.data.replay.mixed import MixedReplayBuffer, UnionReplayBuffer
from rl_training.data.replay.returns import UNKNOWN, returns_to_go

Array = NDArray[Any]
GAMMA = 0.9


def slow_returns(rewards: Array, terminated: Array, truncated: Array, gamma: float) -> list[float]:
    """Row by row: look ahead to the end of the episode, then go on with its mean reward."""
    found = []
    for row in range(len(rewards)):
        first = row
        while first > 0 and not (terminated[first - 1] or truncated[first - 1]):
            first -= 1
        last = row
        while not (terminated[last] or truncated[last] or last == len(rewards) - 1):
            last += 1
        total = sum(float(rewards[k]) * gamma ** (k - row) for k in range(row, last + 1))
        if not terminated[last]:
            mean = float(rewards[first : last + 1].mean())
            total += gamma ** (last + 1 - row) * mean / (1 - gamma)
        found.append(total)
    return found


def learner_data(seed: int = 0) -> OfflineDataset:
    return toy_data(seed=seed).in_learner_units(TOY)


def column(data: OfflineDataset) -> tuple[Array, Array, Array]:
    return data.rewards, data.terminations, data.truncations


def test_the_sums_by_hand() -> None:
    """The first episode is truncated with a mean of 2, which is worth 20 then; the second ends."""
    columns = tiny_columns()
    ends = columns["terminations"], columns["truncations"]
    found = returns_to_go(columns["rewards"], *ends, GAMMA)
    third = 3 + 0.9 * 20
    second = 2 + 0.9 * third
    np.testing.assert_allclose(found, [1 + 0.9 * second, second, third, 4 + 0.9 * 5, 5], rtol=1e-6)


def test_the_sums_are_those_of_a_slow_version() -> None:
    data = toy_data()
    found = returns_to_go(*column(data), 0.97)
    np.testing.assert_allclose(found, slow_returns(*column(data), 0.97), rtol=1e-4, atol=1e-4)


def test_a_task_that_always_pays_the_same_and_never_ends_has_its_value_everywhere() -> None:
    never = np.zeros(7, bool)
    found = returns_to_go(np.full(7, -1.0, np.float32), never, never, 0.99)
    np.testing.assert_allclose(found, -100.0, rtol=1e-5)


def test_without_discount_nothing_is_added_after_a_truncation() -> None:
    never = np.zeros(3, bool)
    assert returns_to_go(np.ones(3, np.float32), never, never, 1.0).tolist() == [3, 2, 1]


def test_no_rows_have_no_returns() -> None:
    assert len(returns_to_go(np.zeros(0), np.zeros(0, bool), np.zeros(0, bool), 0.9)) == 0


# Of a dataset


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("kind", [DatasetBuffer, MappedBuffer])
def test_batches_of_a_dataset_hold_those_of_their_first_rows(
    n_step: int, kind: type[DatasetBuffer]
) -> None:
    data = learner_data()
    buffer = kind(data, gamma=GAMMA, seeds=(3, 4), n_step=n_step, returns_to_go=True)
    batch = buffer.sample(16)
    assert batch.return_to_go is not None
    assert batch.index is not None
    expected = np.array(slow_returns(*column(data), GAMMA))[batch.index.numpy()]
    np.testing.assert_allclose(batch.return_to_go, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_step", [1, 3])
def test_they_change_nothing_else_of_a_batch(n_step: int) -> None:
    plain = DatasetBuffer(learner_data(), seeds=(3, 4), n_step=n_step).sample(16)
    more = DatasetBuffer(learner_data(), seeds=(3, 4), n_step=n_step, returns_to_go=True).sample(16)
    assert plain.return_to_go is None
    for name in ("obs", "action", "reward", "next_obs", "discount", "index"):
        assert torch.equal(getattr(plain, name), getattr(more, name)), name


def test_next_actions_and_returns_may_be_asked_for_together() -> None:
    data = rebuilt(tiny_columns(), learner_units=True)
    both = DatasetBuffer(data, gamma=GAMMA, next_actions=True, returns_to_go=True)
    batch = both.gather(torch.arange(5).unsqueeze(0))
    expected = DatasetBuffer(data, gamma=GAMMA, next_actions=True)
    only = expected.gather(torch.arange(5).unsqueeze(0))
    assert batch.next_action is not None
    assert only.next_action is not None
    assert torch.equal(batch.next_action, only.next_action)
    assert batch.return_to_go is not None
    torch.testing.assert_close(batch.return_to_go[0, 3:], torch.tensor([8.5, 5.0]))


# Of episodes as they end


class Task:
    """Steps with random rewards and ends, and what a slow version makes of them."""

    def __init__(self, seeds: int, envs: int, steps: int) -> None:
        rng = np.random.default_rng(0)
        shape = (steps, seeds, envs)
        self.rewards = rng.normal(size=shape).astype(np.float32)
        ends = rng.random(shape)
        self.terminated, self.truncated = ends < 0.1, (ends >= 0.1) & (ends < 0.2)

    def add_to(self, replay: Any, steps: range) -> None:
        _, seeds, envs = self.rewards.shape
        obs = np.zeros((seeds, envs, 3), np.float32)
        action = np.zeros((seeds, envs, 2), np.float32)
        for step in steps:
            ends = self.terminated[step], self.truncated[step]
            replay.add(obs, action, self.rewards[step], obs, *ends)

    def expected(self, seed: int, env: int, count: int) -> list[float]:
        """Of the first `count` steps; rows of the last episode are not known where it goes on."""
        terminated = self.terminated[:count, seed, env]
        truncated = self.truncated[:count, seed, env]
        found = slow_returns(self.rewards[:count, seed, env], terminated, truncated, GAMMA)
        ends = np.flatnonzero(terminated | truncated)
        known = ends[-1] + 1 if len(ends) else 0
        return [*found[:known], *[UNKNOWN] * (count - known)]


def make_replay(
    kind: Any = MixedReplayBuffer, *, capacity: int = 400, seeds: int = 2, envs: int = 3
) -> Any:
    numbers = tuple(range(seeds))
    prior = DatasetBuffer(learner_data(), seeds=numbers, gamma=GAMMA, returns_to_go=True)
    ratio = {"prior_ratio": 0.5} if kind is MixedReplayBuffer else {}
    options: dict[str, Any] = {"num_envs": envs, "seeds": numbers, "gamma": GAMMA, **ratio}
    return kind(capacity, (3,), (2,), prior=prior, **options)


def test_returns_become_known_when_an_episode_ends() -> None:
    task, replay = Task(2, 3, 60), make_replay()
    for start in range(0, 60, 7):
        steps = range(start, min(start + 7, 60))
        task.add_to(replay, steps)
        values = replay.episode_returns.values.numpy()
        for seed in range(2):
            for env in range(3):
                expected = task.expected(seed, env, steps.stop)
                ours = values[seed, env : 3 * steps.stop : 3]
                np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    assert (values[:, 180:] == UNKNOWN).all()


def test_an_overwritten_row_has_the_return_of_its_new_step() -> None:
    task, replay = Task(1, 1, 57), make_replay(capacity=20, seeds=1, envs=1)
    task.add_to(replay, range(57))
    expected = task.expected(0, 0, 57)[-20:]
    ours = [replay.episode_returns.values[0, row % 20].item() for row in range(37, 57)]
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [MixedReplayBuffer, UnionReplayBuffer])
def test_batches_hold_both_kinds(kind: Any) -> None:
    task, replay = Task(2, 3, 60), make_replay(kind)
    task.add_to(replay, range(60))
    batch = replay.sample(64)
    own = (batch.obs == 0).all(-1)
    assert 0.2 < own.float().mean() < 0.8
    rows = replay.episode_returns.values.gather(1, batch.index.clamp(max=179))
    assert torch.equal(batch.return_to_go[own], rows[own])
    of_data = torch.tensor(slow_returns(*column(learner_data()), GAMMA))[batch.index]
    torch.testing.assert_close(
        batch.return_to_go[~own], of_data[~own].float(), rtol=1e-4, atol=1e-4
    )


def test_a_restored_replay_goes_on_in_the_middle_of_episodes() -> None:
    task, whole, cut = Task(2, 3, 60), make_replay(), make_replay()
    task.add_to(whole, range(60))
    task.add_to(cut, range(31))
    restored = make_replay()
    restored.load_state_dict(cut.state_dict())
    restored.load_rows(0, cut.read_rows(0, cut.inserted.value))
    task.add_to(restored, range(31, 60))
    assert torch.equal(restored.episode_returns.values, whole.episode_returns.values)
    assert torch.equal(restored.sample(32).return_to_go, whole.sample(32).return_to_go)


def test_a_replay_of_data_without_returns_has_none() -> None:
    prior = DatasetBuffer(learner_data(), gamma=GAMMA)
    replay = MixedReplayBuffer(50, (3,), (2,), gamma=GAMMA, prior=prior, prior_ratio=0.5)
    Task(1, 1, 9).add_to(replay, range(9))
    assert replay.sample(4).return_to_go is None
    assert "episode_returns" not in replay.state_dict()

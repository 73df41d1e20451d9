"""Replay of sequences, against lists of everything that was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rl_training.data import RecurrentReplayBuffer
from rl_training.data.batch import SequenceBatch
from rl_training.errors import DataError

Array = NDArray[Any]
SHAPE = {torch.uint8: (2, 3), torch.float32: (4,)}


@dataclass(frozen=True)
class Seen:
    """One observation of a lane and what led to it."""

    obs: Array
    action: int
    reward: float
    starts: bool
    terminated: bool


class Stream:
    """Random episodes in S x n environments, and a list per lane of the steps in them."""

    def __init__(self, seeds: int, envs: int, dtype: torch.dtype, end: float = 0.15) -> None:
        self.rng = np.random.default_rng(0)
        self.lead, self.dtype, self.end = (seeds, envs), dtype, end
        self.steps: dict[tuple[int, ...], list[list[Seen]]] = {}
        self.fresh = {lane: self.draw() for lane in np.ndindex(self.lead)}
        self.obs = np.array([[self.fresh[s, e] for e in range(envs)] for s in range(seeds)])
        self.begins = np.ones(self.lead, bool)

    def draw(self) -> Array:
        if self.dtype == torch.uint8:
            return self.rng.integers(0, 256, SHAPE[self.dtype]).astype(np.uint8)
        return self.rng.normal(size=SHAPE[self.dtype]).astype(np.float32)

    def step(self) -> tuple[Array, ...]:
        """Take a step; each is a list of what a sequence shows: a first observation, an arrival."""
        obs, action = self.obs, self.rng.integers(0, 4, self.lead)
        reward = self.rng.normal(size=self.lead).astype(np.float32)
        terminated = self.rng.random(self.lead) < self.end
        truncated = self.rng.random(self.lead) < self.end
        next_obs, fresh = obs.copy(), obs.copy()
        for lane in np.ndindex(self.lead):
            next_obs[lane] = self.draw()
            ended = terminated[lane] or truncated[lane]
            fresh[lane] = self.draw() if ended else next_obs[lane]
            arrival = Seen(
                next_obs[lane].copy(),
                int(action[lane]),
                float(reward[lane]),
                False,
                bool(terminated[lane]),
            )
            first = [Seen(obs[lane].copy(), -1, 0.0, True, False)] if self.begins[lane] else []
            self.steps.setdefault(lane, []).append([*first, arrival])
        self.begins = terminated | truncated
        self.obs = fresh
        return obs, action, reward, next_obs, terminated, truncated


def filled(
    steps: int,
    *,
    capacity: int = 40,
    length: int = 6,
    seeds: int = 1,
    envs: int = 1,
    dtype: torch.dtype = torch.uint8,
    end: float = 0.15,
    **options: Any,
) -> tuple[RecurrentReplayBuffer, Stream]:
    replay = RecurrentReplayBuffer(
        capacity,
        SHAPE[dtype],
        sequence_length=length,
        obs_dtype=dtype,
        action_dtype=torch.int64,
        num_envs=envs,
        seeds=tuple(range(seeds)),
        **options,
    )
    stream = Stream(seeds, envs, dtype, end)
    for _ in range(steps):
        replay.add(*stream.step())
    return replay, stream


def check_all(replay: RecurrentReplayBuffer, stream: Stream) -> None:
    """Compare the sequence from every row with the lists."""
    batch = every_sequence(replay)
    envs, length = replay.num_envs, replay.sequence_length
    kept = len(replay) // envs
    for seed in range(replay.num_seeds):
        for row in range(len(replay)):
            lane = stream.steps[seed, row % envs][-kept:]
            shown = [(s, entry) for s, step in enumerate(lane) for entry in step]
            begin = next(i for i, (s, _) in enumerate(shown) if s == row // envs)
            rest = shown[begin:] + shown * length
            for place in range(length):
                number, entry = rest[place]
                wraps = number == 0 and len(lane[0]) == 1
                assert np.array_equal(batch.obs[seed, row, place], entry.obs)
                assert bool(batch.is_first[seed, row, place]) == (
                    entry.starts or place == 0 or wraps
                )
                assert bool(batch.terminated[seed, row, place]) == entry.terminated
                assert float(batch.reward[seed, row, place]) == pytest.approx(entry.reward)
                if not entry.starts:
                    assert int(batch.action[seed, row, place]) == entry.action


def every_sequence(replay: RecurrentReplayBuffer) -> SequenceBatch:
    return replay.gather(torch.arange(len(replay)).expand(replay.num_seeds, -1))


@pytest.mark.parametrize("steps", [1, 4, 30, 40, 57, 203])
def test_sequences_show_every_observation_of_an_episode_once_and_in_order(steps: int) -> None:
    check_all(*filled(steps, num_starts=40))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_several_environments_and_seeds_are_followed_apart(dtype: torch.dtype) -> None:
    for steps in (5, 19, 45):
        check_all(*filled(steps, seeds=2, envs=3, dtype=dtype, num_starts=40))


def test_a_cut_off_episode_keeps_its_last_observation_and_is_not_terminal() -> None:
    replay, _ = filled(0, length=4)
    one, two, three = (np.full((1, 1, 2, 3), value, np.uint8) for value in (1, 2, 3))
    yes, no = np.ones((1, 1), bool), np.zeros((1, 1), bool)
    action, reward = np.full((1, 1), 2), np.full((1, 1), 0.5, np.float32)
    replay.add(one, action, reward, two, no, yes)
    replay.add(three, action, reward, one, yes, no)
    batch = replay.gather(torch.zeros(1, 1, dtype=torch.int64))
    assert batch.obs[0, 0, :, 0, 0].tolist() == [1, 2, 3, 1]
    assert batch.is_first[0, 0].tolist() == [True, False, True, False]
    assert batch.terminated[0, 0].tolist() == [False, False, False, True]
    assert batch.reward[0, 0].tolist() == [0.0, 0.5, 0.0, 0.5]


def test_a_group_draws_what_each_seed_draws_alone() -> None:
    group = filled(30, seeds=2, envs=2)[0]
    alone = RecurrentReplayBuffer(
        40, (2, 3), sequence_length=6, obs_dtype=torch.uint8, num_envs=2, seeds=(1,)
    )
    alone.set_inserted(len(group))
    assert torch.equal(group.draw_rows(group.rng, 9)[1], alone.draw_rows(alone.rng, 9)[0])


def test_every_row_is_equally_likely_at_the_beginning_and_at_the_end_of_a_sequence() -> None:
    replay, _ = filled(60, capacity=20, length=5, end=0.0)
    seen = replay.sample(20_000)
    for place in (0, 4):
        pixels = seen.obs[0, :, place].flatten(1).to(torch.int64)
        codes = (pixels * 257 ** torch.arange(pixels.shape[1])).sum(1)
        _, counts = torch.unique(codes, return_counts=True)
        assert len(counts) == 20
        assert int(counts.min()) > 800
        assert int(counts.max()) < 1_200


def test_when_slots_run_out_the_oldest_episodes_begin_with_their_second_observation() -> None:
    replay, stream = filled(40, num_starts=3, end=0.3)
    batch = every_sequence(replay)
    steps = stream.steps[0, 0]
    starting = [s for s, step in enumerate(steps) if len(step) == 2]
    assert len(starting) > 6
    for number in starting:
        first, *_ = batch.obs[0, number]
        shown = steps[number][0 if number in starting[-3:] else 1]
        assert np.array_equal(first, shown.obs)
        # Seen from the step before, which may show two observations.
        place = 2 if number - 1 in starting[-3:] else 1
        assert batch.is_first[0, number - 1, place]


def test_a_restored_buffer_goes_on_to_the_bit() -> None:
    whole, stream = filled(53, seeds=2, envs=2)
    other = filled(0, seeds=2, envs=2)[0]
    other.load_state_dict(whole.state_dict())
    start, stop = whole.segment_range()
    other.load_rows(start, whole.read_rows(start, stop))
    for _ in range(9):
        step = stream.step()
        whole.add(*step)
        other.add(*step)
    ours, theirs = whole.sample(16), other.sample(16)
    for name in ("obs", "action", "reward", "is_first", "terminated"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_an_environment_that_begins_anew_after_a_restart_begins_an_episode() -> None:
    whole, stream = filled(10, envs=2, end=0.0)
    other = filled(0, envs=2, end=0.0)[0]
    other.load_state_dict(whole.state_dict())
    other.load_rows(0, whole.read_rows(*whole.segment_range()))
    step = list(stream.step())
    step[0] = step[0].copy()
    step[0][0, 1] += 1  # the second environment was reset
    other.add(*step)
    batch = every_sequence(other)
    assert batch.is_first[0, -4, 1:].tolist()[:1] == [False]
    assert batch.is_first[0, -3, 1:3].tolist() == [True, False]
    assert np.array_equal(batch.obs[0, -3, 1], step[0][0, 1])


def test_a_capacity_below_one_sequence_is_refused() -> None:
    with pytest.raises(DataError, match="buffer_capacity must be >= sequence_length"):
        RecurrentReplayBuffer(31, (3,), sequence_length=16, num_envs=2)
    with pytest.raises(DataError, match="empty"):
        filled(0)[0].sample(1)


def test_a_mapping_becomes_a_batch_of_sequences() -> None:
    values = {
        "obs": torch.zeros(3, 5, 2),
        "actions": torch.zeros(3, 5, dtype=torch.int64),
        "rewards": torch.ones(3, 5),
        "dones": torch.zeros(3, 5),
    }
    batch = SequenceBatch.from_mapping(values, num_seeds=1)
    assert batch.obs.shape == (1, 3, 5, 2)
    assert batch.is_first[0, 0].tolist() == [True, False, False, False, False]
    wrong = {("next_obs" if name == "dones" else name): value for name, value in values.items()}
    with pytest.raises(DataError, match=r"lacks \['dones'\] and has unknown \['next_obs'\]"):
        SequenceBatch.from_mapping(wrong, num_seeds=1)
    with pytest.raises(DataError, match=r"allowed are \[B, T\]"):
        SequenceBatch.from_mapping({k: v[0] for k, v in values.items()}, num_seeds=1)


def noted(replay: RecurrentReplayBuffer, factor: float = 1.0) -> SequenceBatch:
    """Believe about every row its number times a factor, and return all sequences after that."""
    batch = every_sequence(replay)
    assert batch.index is not None
    replay.keep_beliefs(
        batch.index, factor * batch.index.unsqueeze(-1).float().expand(-1, -1, -1, 3)
    )
    return every_sequence(replay)


@pytest.mark.parametrize("steps", [7, 40, 57])
def test_a_sequence_begins_with_what_was_believed_after_the_row_before(steps: int) -> None:
    replay, stream = filled(steps, seeds=2, envs=2, belief_size=3)
    before = every_sequence(replay)
    assert before.is_first[:, :, 0].all()
    assert before.start is not None
    assert not before.start.any()
    batch = noted(replay)
    assert batch.start is not None
    kept, ring = len(replay) // 2, replay.capacity // 2
    oldest = steps - kept
    for seed in range(2):
        for row in range(len(replay)):
            number, env = divmod(row, 2)
            follows = number > 0 and len(stream.steps[seed, env][-kept:][number]) == 1
            assert bool(batch.is_first[seed, row, 0]) == (not follows)
            expected = (oldest + number - 1) % ring * 2 + env if follows else 0
            assert batch.start[seed, row].tolist() == [expected] * 3
    # Everything after the first place is as it was.
    assert torch.equal(batch.is_first[:, :, 1:], before.is_first[:, :, 1:])
    assert torch.equal(batch.obs, before.obs)


def test_a_belief_does_not_outlive_its_row() -> None:
    replay, stream = filled(40, end=0.0, belief_size=3)
    noted(replay)
    replay.add(*stream.step())  # over the oldest row, after which a sequence may begin later
    batch = every_sequence(replay)
    for _ in range(replay.capacity - 1):
        replay.add(*stream.step())
    assert not batch.is_first[0, 1:, 0].any()
    assert every_sequence(replay).is_first[0, :, 0].all()


def test_of_two_beliefs_about_a_row_the_later_counts_and_first_observations_have_none() -> None:
    replay, _ = filled(10, end=0.0, belief_size=1)
    index = torch.tensor([[[3, 4, -1, 3]]])
    replay.keep_beliefs(index, torch.tensor([[[[1.0], [2.0], [9.0], [5.0]]]]))
    batch = every_sequence(replay)
    assert batch.start is not None
    assert batch.start[0, :, 0].tolist() == [0, 0, 0, 0, 5.0, 2.0, 0, 0, 0, 0]
    assert (~batch.is_first[0, :, 0]).nonzero().flatten().tolist() == [4, 5]


def test_beliefs_and_the_queue_are_restored() -> None:
    options: dict[str, Any] = {"seeds": 2, "envs": 2, "belief_size": 3, "newest_first": True}
    whole, _ = filled(53, **options)
    whole.sample(3)
    noted(whole)
    other = filled(0, **options)[0]
    other.load_state_dict(whole.state_dict())
    start, stop = whole.segment_range()
    other.load_rows(start, whole.read_rows(start, stop))
    for _ in range(2):
        ours, theirs = whole.sample(4), other.sample(4)
        for name in ("obs", "is_first", "start", "index"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_new_stretches_are_handed_out_once_and_first() -> None:
    replay, stream = filled(14, length=6, envs=2, end=0.0, newest_first=True)

    def new_ones(count: int) -> list[tuple[int, int]]:
        """Environment and number of the step that each sequence arrives at first."""
        batch = replay.sample(count)
        found: list[tuple[int, int]] = []
        for sequence in batch.obs[0]:
            # The first place of a run shows the first observation, which arrives nowhere.
            places = [
                (env, step)
                for env in range(2)
                for step, entries in enumerate(stream.steps[0, env])
                if np.array_equal(entries[-1].obs, sequence[1 if len(found) < 2 else 0])
            ]
            found.append(places[0])
        return found

    # Of 14 steps two stretches of 6 are complete in each environment.
    assert new_ones(3) == [(0, 0), (1, 0), (0, 6)]
    assert replay._handed_out.tolist() == [[3]]
    replay.sample(2)
    assert replay._handed_out.tolist() == [[4]]
    replay.sample(5)
    assert replay._handed_out.tolist() == [[4]]
    for _ in range(4):
        replay.add(*stream.step())
    replay.sample(1)
    assert replay._handed_out.tolist() == [[5]]


def test_stretches_that_were_overwritten_are_not_handed_out() -> None:
    replay, stream = filled(100, capacity=20, length=6, end=0.0, newest_first=True)
    batch = replay.sample(2)
    # Steps 80 to 99 are there: the first whole stretch begins with 84.
    assert np.array_equal(batch.obs[0, 0, 0], stream.steps[0, 0][84][-1].obs)
    assert np.array_equal(batch.obs[0, 1, 0], stream.steps[0, 0][90][-1].obs)

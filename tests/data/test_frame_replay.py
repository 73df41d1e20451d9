"""Replay that keeps frames once, against a naive one that keeps whole stacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rl_training.data.replay.frames import FrameReplayBuffer, PrioritizedFrameReplayBuffer
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.errors import DataError

Array = NDArray[Any]
SIDE = 3


class Stream:
    """Episodes of random frames in S x n environments, stacked as the wrappers do."""

    def __init__(self, seeds: int, envs: int, stack: int, channels: int, key: int = 0) -> None:
        self.rng = np.random.default_rng(key)
        self.lead, self.stack, self.channels = (seeds, envs), stack, channels
        self.obs = np.stack([[self.first() for _ in range(envs)] for _ in range(seeds)])

    def frame(self) -> Array:
        return self.rng.integers(0, 256, (self.channels, SIDE, SIDE)).astype(np.uint8)

    def first(self) -> Array:
        return np.tile(self.frame(), (self.stack, 1, 1))

    def step(self) -> tuple[Array, ...]:
        obs = self.obs
        next_obs, fresh = obs.copy(), obs.copy()
        terminated = self.rng.random(self.lead) < 0.15
        truncated = self.rng.random(self.lead) < 0.15
        for lane in np.ndindex(self.lead):
            next_obs[lane] = np.concatenate([obs[lane][self.channels :], self.frame()])
            ended = terminated[lane] or truncated[lane]
            fresh[lane] = self.first() if ended else next_obs[lane]
        self.obs = fresh
        action = self.rng.integers(0, 4, self.lead)
        reward = self.rng.normal(size=self.lead).astype(np.float32)
        return obs, action, reward, next_obs, terminated, truncated


def pair(
    capacity: int, stack: int, *, seeds: int = 1, envs: int = 1, channels: int = 1, **options: Any
) -> tuple[FrameReplayBuffer, ReplayBuffer]:
    shape = (stack * channels, SIDE, SIDE)
    common: dict[str, Any] = {
        "num_envs": envs,
        "seeds": tuple(range(seeds)),
        "obs_dtype": torch.uint8,
        "action_dtype": torch.int64,
        **options,
    }
    frames = FrameReplayBuffer(capacity, shape, frame_stack=stack, max_episode_steps=1, **common)
    # As many rows as the other has, so that rows have the same numbers.
    return frames, ReplayBuffer(frames.capacity, shape, **common)


def drawable_rows(frames: FrameReplayBuffer) -> torch.Tensor:
    newest = frames.inserted.value - 1
    rows = torch.arange(newest, newest - len(frames), -1) % frames.capacity
    return rows.expand(frames.num_seeds, -1)


CASES = [(12, 4, 1, 1, 1), (12, 4, 2, 3, 1), (20, 3, 1, 2, 2), (8, 1, 2, 2, 3)]


@pytest.mark.parametrize(("capacity", "stack", "seeds", "envs", "channels"), CASES)
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("steps", [2, 50])
def test_every_row_comes_back_as_a_naive_buffer_has_it(
    capacity: int, stack: int, seeds: int, envs: int, channels: int, n_step: int, steps: int
) -> None:
    frames, naive = pair(capacity, stack, seeds=seeds, envs=envs, channels=channels, n_step=n_step)
    stream = Stream(seeds, envs, stack, channels)
    for _ in range(steps):
        step = stream.step()
        frames.add(*step)
        naive.add(*step)
    assert len(frames) == min(steps * envs, capacity - capacity % envs)
    rows = drawable_rows(frames)
    ours, theirs = frames.gather(rows), naive.gather(rows)
    assert torch.equal(ours.obs, theirs.obs)
    assert torch.equal(ours.action, theirs.action)
    assert torch.equal(ours.reward, theirs.reward)
    assert torch.equal(ours.discount, theirs.discount)
    alive = theirs.discount > 0
    assert alive.any() or steps == 2
    assert torch.equal(ours.next_obs[alive], theirs.next_obs[alive])


def test_a_terminated_row_shows_nothing_of_the_next_episode() -> None:
    frames, _ = pair(12, 2)
    stream = Stream(1, 1, 2, 1)
    while True:
        step = stream.step()
        frames.add(*step)
        if step[4].any():
            break
    frames.add(*stream.step())
    row = torch.tensor([[frames.inserted.value - 2]])
    batch = frames.gather(row)
    newest = batch.obs[0, 0, -1]
    assert torch.equal(batch.next_obs[0, 0], torch.stack([newest, newest]))


def test_drawn_rows_are_those_that_have_their_stacks() -> None:
    frames, _ = pair(12, 4)
    stream = Stream(1, 1, 4, 1)
    for _ in range(40):
        frames.add(*stream.step())
    drawn = set(frames.draw_rows(frames.rng, 500).flatten().tolist())
    assert drawn == set(drawable_rows(frames).flatten().tolist())
    assert len(drawn) == 12 < frames.capacity


def test_a_million_frames_take_less_than_eight_gigabytes() -> None:
    frames = FrameReplayBuffer(
        1_000_000,
        (4, 84, 84),
        frame_stack=4,
        num_envs=8,
        obs_dtype=torch.uint8,
        action_dtype=torch.int64,
    )
    assert 7.0e9 < frames.num_bytes < 8.0e9


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_restored_buffer_draws_and_goes_on_the_same(prioritized: bool) -> None:
    def make() -> FrameReplayBuffer:
        kind = PrioritizedFrameReplayBuffer if prioritized else FrameReplayBuffer
        return kind(
            14,
            (3, SIDE, SIDE),
            frame_stack=3,
            max_episode_steps=1,
            num_envs=2,
            seeds=(0, 1),
            n_step=2,
            obs_dtype=torch.uint8,
            action_dtype=torch.int64,
        )

    first, second = make(), make()
    stream = Stream(2, 2, 3, 1)
    for _ in range(25):
        first.add(*stream.step())
    start, stop = first.segment_range()
    second.load_state_dict(first.state_dict())
    second.load_rows(start, first.read_rows(start, stop))
    for _ in range(6):
        ours, theirs = first.sample(9), second.sample(9)
        for name, value in vars(ours).items():
            if value is not None:
                assert torch.equal(value, getattr(theirs, name)), name
        step = stream.step()
        for buffer in (first, second):
            buffer.update_priorities(ours.index, ours.reward.abs())  # type: ignore[arg-type]
            buffer.add(*step)


def test_priorities_reach_only_rows_that_may_be_drawn() -> None:
    frames = PrioritizedFrameReplayBuffer(
        10, (4, SIDE, SIDE), frame_stack=4, obs_dtype=torch.uint8, action_dtype=torch.int64
    )
    stream = Stream(1, 1, 4, 1)
    for _ in range(37):
        frames.add(*stream.step())
    batch = frames.sample(400)
    assert batch.index is not None
    assert batch.weight is not None
    assert set(batch.index.flatten().tolist()) == set(drawable_rows(frames).flatten().tolist())
    torch.testing.assert_close(batch.weight, torch.ones(1, 400))


def test_more_cut_off_episodes_than_there_is_room_for_are_refused() -> None:
    frames = FrameReplayBuffer(
        64, (2, SIDE, SIDE), frame_stack=2, obs_dtype=torch.uint8, action_dtype=torch.int64
    )
    stream = Stream(1, 1, 2, 1)
    obs, action, reward, next_obs, ended, _ = stream.step()
    step = (obs, action, reward, next_obs, np.zeros_like(ended), np.ones_like(ended))
    for _ in range(frames.num_slots):
        frames.add(*step)
    with pytest.raises(DataError, match=r"env_kwargs\.max_episode_steps"):
        frames.add(*step)

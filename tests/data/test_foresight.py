"""A batch that is foreseen to do without the next step is the same before that step as after it."""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import rl_training.data.replay
from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.foresight import Foresight
from rl_training.data.replay.frames import FrameReplayBuffer
from rl_training.data.replay.storage import ReplayBuffer, StepArrays
from rl_training.rng import Rng

SEEDS = (3, 4)
BATCH = 2


class TrackedRows(ReplayBuffer):
    """As on an accelerator, where the newest row is always known."""

    _tracks_newest = True


def rows_of(num_envs: int, n_step: int) -> ReplayBuffer:
    return TrackedRows(90, (3,), (2,), num_envs=num_envs, seeds=SEEDS, n_step=n_step)


def frames_of(num_envs: int, n_step: int) -> ReplayBuffer:
    return FrameReplayBuffer(
        90,
        (2, 4, 4),
        (),
        frame_stack=2,
        max_episode_steps=3,
        obs_dtype=torch.uint8,
        action_dtype=torch.int64,
        num_envs=num_envs,
        seeds=SEEDS,
        n_step=n_step,
    )


def episodes(replay: ReplayBuffer, num_steps: int) -> Iterator[StepArrays]:
    """Steps of episodes that end in both ways; frames follow each other as a stack's do."""
    rng = np.random.default_rng(0)
    lead = (len(SEEDS), replay.num_envs)
    images = isinstance(replay, FrameReplayBuffer)

    def observed(before: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        if not images:
            return rng.normal(size=(*lead, 3)).astype(np.float32)
        frame = rng.integers(0, 256, (*lead, 1, 4, 4)).astype(np.uint8)
        last = frame if before is None else before[:, :, 1:]
        return np.concatenate([last, frame], 2)

    obs = observed(None)
    for _ in range(num_steps):
        after = observed(obs)
        action = rng.integers(0, 3, lead) if images else rng.normal(size=(*lead, 2))
        terminated = rng.random(lead) < 0.1
        truncated = (rng.random(lead) < 0.1) & ~terminated
        reward = rng.normal(size=lead).astype(np.float32)
        yield StepArrays(obs, action, reward, after, terminated, truncated)
        ended = (terminated | truncated).reshape(*lead, *[1] * (after.ndim - 2))
        obs = np.where(ended, observed(None), after)


def assert_same(left: TransitionBatch, right: TransitionBatch) -> None:
    for field in fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other), field.name


@pytest.mark.parametrize("make", [rows_of, frames_of])
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_batches_apart_from_the_next_step_do_not_change_with_it(
    make: Any, num_envs: int, n_step: int, count: int
) -> None:
    replay = make(num_envs, n_step)
    foresight = Foresight(replay, BATCH)
    apart = 0
    for number, step in enumerate(episodes(replay, 200)):
        if number < 10:
            replay.add_step(step)
            foresight.forget()
            continue
        is_apart = foresight.is_apart(count)
        early = copy.deepcopy(replay)
        early.count_ahead()
        before = [early.sample(BATCH) for _ in range(count)]
        replay.add_step(step)
        after = [replay.sample(BATCH) for _ in range(count)]
        foresight.drawn(count)
        if is_apart:
            apart += 1
            for one, other in zip(before, after, strict=True):
                assert_same(one, other)
        else:
            back = torch.cat([replay._back_from_newest(b.index) for b in after], 1)
            assert int(back.min()) < (n_step + 1) * num_envs
    assert 10 < apart < 185


def test_words_foreseen_are_those_of_the_draws() -> None:
    rng = Rng(SEEDS, "replay")
    words = rng.foresee(0, 70, BATCH)  # more than the host hashes at once
    for word in words:
        drawn = rng.integers(1000, BATCH)
        assert torch.equal(drawn, torch.from_numpy((word.astype(np.int64) * 1000) >> 32))


def test_draws_by_others_are_noticed() -> None:
    replay = rows_of(1, 1)
    steps = episodes(replay, 300)
    for _ in range(25):
        replay.add_step(next(steps))
    foresight = Foresight(replay, BATCH)
    for step in steps:
        foresight.is_apart(1)
        replay.sample(BATCH)  # not told
        foresight.forget()
        expected = (replay.inserted.value) % replay.capacity
        is_apart = foresight.is_apart(1)
        replay.add_step(step)
        index = replay.sample(BATCH).index
        assert index is not None
        assert is_apart == (not bool((index == expected).any()))
        foresight.drawn(1)


def test_only_plain_draws_are_foreseen() -> None:
    """Whoever draws in another way must say that it cannot be foreseen."""
    for module in pkgutil.iter_modules(rl_training.data.replay.__path__):
        importlib.import_module(f"{rl_training.data.replay.__name__}.{module.name}")
    kinds, open_kinds = [], [ReplayBuffer]
    while open_kinds:
        kinds.append(kind := open_kinds.pop())
        open_kinds += kind.__subclasses__()
    assert len(kinds) > 8
    for kind in kinds:
        own_draws = kind.draw_rows is not ReplayBuffer.draw_rows
        told = kind.draws_of_newest is not ReplayBuffer.draws_of_newest
        if kind.sample is not ReplayBuffer.sample or (own_draws and not told):
            assert not kind.foreseeable, kind.__name__

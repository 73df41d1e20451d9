"""A replay on an accelerator stores what one on the host stores, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.data.replay.frames import FrameReplayBuffer, PrioritizedFrameReplayBuffer
from rl_training.data.replay.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay.sequences import RecurrentReplayBuffer
from rl_training.data.replay.storage import Array, ReplayBuffer
from rl_training.transfer import Captured, HostCopy, Staging

SEEDS, ENVS, CAPACITY = (3, 4), 2, 24
IMAGES: dict[str, Any] = {"obs_dtype": torch.uint8, "action_dtype": torch.int64}


def vectors(kind: type[ReplayBuffer], **options: Any) -> Callable[[str], ReplayBuffer]:
    return lambda device: kind(
        CAPACITY, (3,), (2,), num_envs=ENVS, seeds=SEEDS, device=device, **options
    )


def images(kind: type[ReplayBuffer], **options: Any) -> Callable[[str], ReplayBuffer]:
    return lambda device: kind(
        CAPACITY, (2, 4, 4), (), num_envs=ENVS, seeds=SEEDS, device=device, **IMAGES, **options
    )


KINDS = {
    "uniform": vectors(ReplayBuffer),
    "n_step": vectors(ReplayBuffer, n_step=3),
    "scaled": vectors(ReplayBuffer, reward_scale=0.5, reward_shift=1.0),
    "prioritized": vectors(PrioritizedReplayBuffer),
    "discrete": images(ReplayBuffer),
    "frames": images(FrameReplayBuffer, frame_stack=2, max_episode_steps=5),
    "prioritized_frames": images(PrioritizedFrameReplayBuffer, frame_stack=2, max_episode_steps=5),
    "sequences": images(RecurrentReplayBuffer, sequence_length=4),
}


def random_step(rng: np.random.Generator, buffer: ReplayBuffer) -> tuple[Array, ...]:
    lead = (len(SEEDS), ENVS)
    if buffer.rows["action"].dtype == torch.int64:
        obs = rng.integers(256, size=(2, *lead, 2, 4, 4)).astype(np.uint8)
        action: Array = rng.integers(3, size=lead)
    else:
        obs = rng.normal(size=(2, *lead, 3)).astype(np.float32)
        action = rng.normal(size=(*lead, 2)).astype(np.float32)
    flags = rng.random((2, *lead)) < 0.2
    return obs[0], action, rng.normal(size=lead).astype(np.float32), obs[1], flags[0], flags[1]


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_staged_steps_are_stored_like_direct_ones(kind: str, device: str) -> None:
    direct, staged = KINDS[kind]("cpu"), KINDS[kind](device)
    staged._arrays = None  # on a CPU too, go the way of an accelerator
    rng = np.random.default_rng(0)
    for step in range(31):  # past the capacity, so that the ring is written over
        arrays = random_step(rng, direct)
        direct.add(*arrays)
        staged.add(*arrays)
        assert len(staged) == len(direct)
        assert int(staged._size.tensor) == len(direct) == staged._size.value
        if step % 10 == 0:
            for name, rows in direct.rows.items():
                assert torch.equal(staged.rows[name].cpu(), rows), (name, step)
    if isinstance(direct, FrameReplayBuffer):
        assert isinstance(staged, FrameReplayBuffer)
        assert torch.equal(staged.store.cpu(), direct.store)
    index = torch.arange(8).expand(len(SEEDS), 8)
    ours, theirs = staged.gather(index.to(device)), direct.gather(index)
    for name, value in vars(theirs).items():
        if value is not None:  # sums of n rewards are rounded by each device in its own way
            torch.testing.assert_close(getattr(ours, name).cpu(), value, msg=name)


@pytest.mark.parametrize("kind", ["uniform", "n_step", "prioritized", "frames"])
def test_a_staged_replay_goes_on_from_its_state(kind: str, device: str) -> None:
    first, second = KINDS[kind](device), KINDS[kind](device)
    first._arrays = second._arrays = None
    rng = np.random.default_rng(1)
    for _ in range(7):
        first.add(*random_step(rng, first))
    for _ in range(3):  # rows and counts that loading must replace
        second.add(*random_step(rng, second))
    start, stop = first.segment_range()
    second.load_rows(start, first.read_rows(start, stop))
    second.load_state_dict(first.state_dict())
    for _ in range(9):
        arrays = random_step(rng, first)
        first.add(*arrays)
        second.add(*arrays)
    assert int(second._size.tensor) == len(first)
    for name, rows in first.rows.items():
        assert torch.equal(second.rows[name], rows), name


def test_staging_sends_all_fields_at_once(device: str) -> None:
    fields = {"a": ((2, 3), torch.float32), "b": ((5,), torch.uint8), "c": ((1,), torch.int64)}
    staging = Staging(fields, torch.device(device))
    written = staging.writable()
    written["a"][...], written["b"][...], written["c"][...] = 1.5, 7, -(2**40)
    assert not any(tensor.any() for tensor in staging.device.values())
    staging.send()
    staging.mark_sent()
    for name, (shape, dtype) in fields.items():
        sent = staging.device[name]
        assert (tuple(sent.shape), sent.dtype) == (shape, dtype)
        assert np.array_equal(sent.cpu().numpy(), staging.writable()[name])


def test_what_is_captured_reads_its_tensors_at_every_call(device: str) -> None:
    total, step = torch.zeros((), device=device), torch.ones((), device=device)

    def add_step() -> None:
        total.add_(step)

    add = Captured(add_step, torch.device(device))
    add()
    step.fill_(5.0)
    add()
    assert float(total) == 6.0
    copy = HostCopy.of(total)
    assert float(copy.array()) == 6.0

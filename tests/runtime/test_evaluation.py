"""Evaluation: all episodes of all seeds in one batch, and the same episodes in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from rl_training.algorithms.base import AnyLearner
from rl_training.envs.backends.kinds import Mode
from rl_training.rng import Rng
from rl_training.runtime import evaluator as evaluation
from rl_training.runtime.evaluator import Evaluator


class Leaning:
    """A policy without weights, whose actions depend on nothing but the observation."""

    device = torch.device("cpu")

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions
        self.batches: list[tuple[int, ...]] = []

    def initial_acting_state(self, count: int) -> None:
        return None

    @contextmanager
    def drawing_from(self, rng: Rng) -> Iterator[None]:
        yield

    def act_from(self, state: None, obs: torch.Tensor) -> torch.Tensor:
        self.batches.append(tuple(obs.shape[:2]))
        return torch.tanh(obs[..., : self.num_actions] + 0.1)


def returns(
    task: str,
    seeds: tuple[int, ...],
    episodes: int,
    mode: Mode = "auto",
    **env_kwargs: Any,
) -> tuple[list[list[float]], list[tuple[int, ...]]]:
    policy = Leaning(6 if task.startswith("HalfCheetah") else 1)
    judge = Evaluator(task, env_kwargs, seeds, threads=1)
    judge._mode = mode
    try:
        return judge.evaluate(cast(AnyLearner, policy), episodes, 7), policy.batches
    finally:
        judge.close()


@pytest.mark.parametrize("task", ["Pendulum-v1", "HalfCheetah-v5"])
def test_episodes_do_not_depend_on_the_batch(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if task.startswith("HalfCheetah"):
        pytest.importorskip("mujoco.batch")
    limit: dict[str, Any] = {"max_episode_steps": 30}
    together, batches = returns(task, (3, 4, 5), 6, **limit)
    assert batches == [(3, 6)] * 30  # one batch, stepped to the end
    assert len({value for row in together for value in row}) == 18
    for seed, expected in zip((3, 4, 5), together, strict=True):
        assert returns(task, (seed,), 4, **limit)[0] == [expected[:4]]
    assert returns(task, (3, 4, 5), 6, "sync", **limit)[0] == together
    monkeypatch.setattr(evaluation, "MAX_PARALLEL", 2)
    in_turns, batches = returns(task, (3,), 5, **limit)
    assert batches == [(1, 2)] * 60 + [(1, 1)] * 30
    assert in_turns[0][:2] == together[0][:2]

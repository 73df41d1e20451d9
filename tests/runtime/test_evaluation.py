"""Evaluation: all episodes of all seeds in one batch, and the same episodes in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from rl_training.algorithms.base import AnyLearner
from rl_training.envs.backends.kinds import Mode
from rl_training.experiment.checkpoint.codec import digest_state
from rl_training.rng import Rng
from rl_training.runtime import evaluator as evaluation
from rl_training.runtime.compile import cuda_graph
from rl_training.runtime.evaluator import Evaluator
from rl_training.testing.contract import PIXEL_TASK, build


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


class Replayed:
    """What stands for a captured graph on the CPU; as for one, the function runs here first."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function
        function()


@pytest.mark.parametrize(
    ("algo", "deterministic"), [("dqn", True), ("dreamer", True), ("dreamer", False)]
)
def test_a_captured_policy_plays_the_same_episodes_again_and_again(
    algo: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, _ = build(algo, (3, 4), PIXEL_TASK)

    def judged(*, captured: bool) -> list[list[list[float]]]:
        judge = Evaluator(PIXEL_TASK, {}, (3, 4), deterministic=deterministic)
        with monkeypatch.context() as patch:
            patch.setattr(cuda_graph, "capture", Replayed)
            patch.setattr(Evaluator, "_captures", lambda *_: captured)
            found = [judge.evaluate(learner, 3, step) for step in (7, 8, 7)]
        policy = None if judge._captured is None else judge._captured.policy
        assert (policy is not None) == captured
        judge.close()
        return found

    before = digest_state(learner.state_dict())
    plain = judged(captured=False)
    assert plain[0] == plain[2]
    assert judged(captured=True) == plain
    assert digest_state(learner.state_dict()) == before

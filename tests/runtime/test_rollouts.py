"""Rollouts as an accelerator gathers them: successors from what is there, parts in turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.envs import seeds
from rl_training.envs.backends.kinds import SyncEnvs
from rl_training.envs.backends.lanes import Transition
from rl_training.envs.spec import Array
from rl_training.envs.step import Step
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.runtime import loops
from rl_training.runtime.compile import cuda_graph
from rl_training.runtime.compile.cuda_graph import CapturedPolicy
from rl_training.runtime.compile.runner import RolloutRunner
from rl_training.runtime.loops import successors
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import PIXEL_TASK, small_config


@pytest.mark.parametrize("share_of_ends", [0.0, 0.3, 1.0])
def test_successors_are_the_true_ones_also_where_episodes_ended(share_of_ends: float) -> None:
    rng = np.random.default_rng(0)
    num_seeds, num_steps, num_envs = 2, 6, 3
    obs = rng.normal(size=(num_seeds, num_envs, 4)).astype(np.float32)
    shown, steps = [], []
    for _ in range(num_steps):
        shown.append(obs)
        final = rng.normal(size=obs.shape).astype(np.float32)
        terminated, truncated = rng.random((2, num_seeds, num_envs)) < share_of_ends
        ended = (terminated | truncated)[..., None]
        obs = np.where(ended, rng.normal(size=obs.shape).astype(np.float32), final)
        reward = np.zeros((num_seeds, num_envs), np.float32)
        steps.append(Step(obs, reward, terminated, truncated, final, reward))
    found = successors(torch.from_numpy(np.stack(shown, 1)), steps)
    wanted = np.stack([step.final_obs for step in steps], 1)
    assert np.array_equal(found.numpy(), wanted)


class InTurns(SyncEnvs):
    """Five environments per seed, of which two and three can be stepped in turns."""

    parts = (slice(0, 2), slice(2, 5))
    under_way: dict[int, Array]
    order: list[str]
    """What was begun and ended."""

    def begin(self, actions: Array, index: int) -> None:
        self.under_way[index] = actions
        self.order.append(f"begin {index}")

    def end(self, index: int) -> Transition:
        self.order.append(f"end {index}")
        actions = self.under_way.pop(index)
        envs = np.array(self.envs, object).reshape(self._shape)[:, self.parts[index]]
        lanes = zip(envs.ravel(), actions.ravel(), strict=True)
        obs, *rest, _ = zip(*(env.step(action) for env, action in lanes), strict=True)
        reward = np.array(rest[0], np.float32).reshape(envs.shape)
        terminated, truncated = (np.array(ends, np.bool_).reshape(envs.shape) for ends in rest[1:])
        return np.stack(obs).reshape(*envs.shape, *obs[0].shape), reward, terminated, truncated

    def renew_part(self, ended: Array, index: int) -> Array:
        envs = np.array(self.envs, object).reshape(self._shape)[:, self.parts[index]]
        for env in envs[ended]:
            env.reset()
        obs = np.stack([env.last_obs for env in envs.ravel()])
        return obs.reshape(*envs.shape, *obs.shape[1:])


class Replayed:
    """What stands for a captured graph on the CPU."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function
        function()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[InTurns]:
    """Let runs on the CPU gather rollouts as on an accelerator; returns their environments."""
    found: list[InTurns] = []

    def make(task: Any, *_: Any) -> Any:
        if task.num_envs != 5:
            return SyncEnvs(task)
        backend = InTurns(task)
        backend.under_way, backend.order = {}, []
        found.append(backend)
        return backend

    def before(runner: RolloutRunner) -> None:
        if runner._policy is None:
            runner._policy = CapturedPolicy(runner.learner.sample, runner.learner.device)

    monkeypatch.setattr(seeds, "make_backend", make)
    monkeypatch.setattr(RolloutRunner, "before_rollout", before)
    monkeypatch.setattr(cuda_graph, "capture", Replayed)
    return found


def rollout_run(folder: Path, stop_at: int | None = None, **changes: Any) -> Any:
    return train(
        small_config(
            "ppo",
            folder,
            env_id=PIXEL_TASK,
            num_envs=5,
            seeds=[1, 2],
            total_timesteps=120,
            threads=1,  # how many a run would choose depends on what else the machine does
            **changes,
        ),
        stop_at=stop_at,
    )


def state_of(result: Any) -> list[Any]:
    return [load_checkpoint(one.checkpoint_path).states for one in result.per_seed]


def test_a_rollout_gathered_in_turns_is_the_one_gathered_at_once(
    tmp_path: Path, backends: list[InTurns], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = rollout_run(tmp_path / "turns")
    order = backends[0].order
    assert order[:6] == ["begin 0", "begin 1", "end 0", "begin 0", "end 1", "begin 1"]
    assert order[-2:] == ["end 0", "end 1"]
    cut = rollout_run(tmp_path / "cut", stop_at=60)
    resumed = resume_training(cut.run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(RolloutRunner, "before_rollout", lambda _: None)  # stays eager
        at_once = rollout_run(tmp_path / "at_once")
    assert backends[-1].order == []
    parts = ("learner", "collector", "clock", "recorder")
    for one, other, third in zip(
        state_of(turns), state_of(at_once), state_of(resumed), strict=True
    ):
        for part in parts:
            assert compare_states(one[part], other[part]) == [], part
            assert compare_states(one[part], third[part]) == [], part


def test_steps_of_which_statistics_are_kept_are_taken_at_once(
    tmp_path: Path, backends: list[InTurns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "gather_in_turns", None)
    rollout_run(tmp_path, algo_kwargs={"normalize_rewards": True})
    assert backends[0].order == []

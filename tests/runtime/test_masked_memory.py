"""A task that needs a memory and masks at once: recurrent PPO solves it, and PPO does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_training.envs.tasks.memory import EAST, GOAL_REWARD, NORTH, SOUTH, TMaze
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.train import train
from rl_training.runtime.workflows import LoadedAgent, load_agent

pytestmark = pytest.mark.matrix
LENGTH, STEPS = 3, 6144
OF_MEMORY = {"memory": "gru", "memory_size": 32, "sequence_length": 8}


class MaskedTMaze(gym.ObservationWrapper[dict[str, Any], Any, Any]):
    """A short T-maze in which one may walk on or, at the junction, turn, and nothing else."""

    def __init__(self) -> None:
        super().__init__(TMaze(LENGTH))
        cell = self.env.observation_space
        self.observation_space = spaces.Dict({"cell": cell, "action_mask": spaces.MultiBinary(4)})

    def _allowed(self) -> list[int]:
        maze: Any = self.env.unwrapped
        return [NORTH, SOUTH] if maze.place == LENGTH else [EAST]

    def observation(self, observation: Any) -> dict[str, Any]:
        mask = np.zeros(4, np.int8)
        mask[self._allowed()] = 1
        return {"cell": observation, "action_mask": mask}

    def step(self, action: Any) -> Any:
        assert action in self._allowed(), f"{action} is none of {self._allowed()}"
        return super().step(action)


def maze(algo: str, folder: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "hidden_sizes": [32],
        "num_steps": 32,
        "minibatch_size": 64,
        "learning_rate": 0.003,
        "ent_coef": 0.01,
        "eval_interval": 0,
    }
    base: dict[str, Any] = {
        "algo": algo,
        "env_id": f"{__name__}:MaskedTMaze",
        "total_timesteps": STEPS,
        "num_envs": 8,
        "eval_episodes": 40,
        "checkpoint_interval": 0,
        "tensorboard": False,
        "accelerate": "off",
        "device": "cpu",
        "output_dir": str(folder),
        "algo_kwargs": settings | (OF_MEMORY if algo.startswith("recurrent") else {}),
    }
    return TrainConfig(**base | changes)


def walk(agent: LoadedAgent, seed: int, *, remembers: bool) -> float:
    """The return of an episode by `predict`, with its state handed back or not."""
    env, total = MaskedTMaze(), 0.0
    obs, _ = env.reset(seed=seed)
    state, ended = agent.learner.initial_acting_state(1) if remembers else None, False
    while not ended:
        obs, reward, ended, _, _ = env.step(agent.predict(obs, state))
        total += float(reward)
    return total


def test_recurrent_ppo_solves_a_masked_maze_and_ppo_does_not(tmp_path: Path) -> None:
    run = train(maze("recurrent_ppo", tmp_path / "recurrent"))
    assert run.metrics["eval_return_mean"] == GOAL_REWARD
    other = train(maze("ppo", tmp_path / "plain"))
    assert other.metrics["eval_return_mean"] < 3, "right every second time is 1.95"
    agent = load_agent(run.run_dir, device="cpu")
    assert [walk(agent, seed, remembers=True) for seed in range(8)] == [GOAL_REWARD] * 8
    assert min(walk(agent, seed, remembers=False) for seed in range(8)) < GOAL_REWARD


def test_a_masked_run_resumes_exactly_in_the_middle_of_episodes(tmp_path: Path) -> None:
    changes = {"total_timesteps": 1024, "eval_episodes": 1}
    report = verify_resume(maze("recurrent_ppo", tmp_path, **changes), 512)
    assert report.identical, report.lines()

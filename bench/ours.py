"""Our side: each function prepares the work and returns a function that does one timed chunk."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.sizes import CHUNK, DQN, PPO, SAC
from rl_training.algorithms.sac import SAC as SACLearner
from rl_training.data import ReplayBuffer
from rl_training.experiment.config import TrainConfig
from rl_training.models import MLPSACModel
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.train import train


class _Stopwatch(Callback):
    """Times a run from its first step on, so that start-up is not counted."""

    def on_start(self, state: TrainerState) -> None:
        self.start = time.perf_counter()

    def on_end(self, state: TrainerState) -> None:
        self.seconds = time.perf_counter() - self.start


def _run(algo: str, num_envs: int, settings: dict[str, Any]) -> Callable[[], float]:
    def chunk() -> float:
        watch = _Stopwatch()
        with tempfile.TemporaryDirectory() as folder:
            config = TrainConfig(
                algo=algo,
                env_id="CartPole-v1",
                num_envs=num_envs,
                total_timesteps=CHUNK[algo],
                eval_episodes=0,
                checkpoint_interval=0,
                log_interval=10_000,
                tensorboard=False,
                threads=torch.get_num_threads(),
                output_dir=folder,
                algo_kwargs=settings,
            )
            train(config, callbacks=[watch])
        return CHUNK[algo] / watch.seconds

    return chunk


def ppo() -> Callable[[], float]:
    settings = {
        "num_steps": PPO["num_steps"],
        "minibatch_size": PPO["minibatch"],
        "update_epochs": PPO["epochs"],
        "hidden_sizes": PPO["hidden"],
        "eval_interval": 0,
    }
    return _run("ppo", PPO["num_envs"], settings)


def dqn() -> Callable[[], float]:
    settings = {
        "batch_size": DQN["batch"],
        "hidden_sizes": DQN["hidden"],
        "learning_starts": DQN["learning_starts"],
        "buffer_capacity": DQN["buffer"],
        "target_update_interval": DQN["target"],
        "double": False,
        "eval_interval": 0,
    }
    return _run("dqn", 1, settings)


def sac() -> Callable[[], float]:
    replay = ReplayBuffer(SAC["buffer"], (SAC["obs"],), (SAC["action"],))
    for rows in replay.rows.values():
        rows.copy_(torch.randn(rows.shape).mul(0.3).to(rows.dtype))
    replay.set_inserted(SAC["buffer"])
    learner = SACLearner(model=MLPSACModel(SAC["obs"], SAC["action"], SAC["hidden"]))

    def chunk() -> float:
        start = time.perf_counter()
        for _ in range(CHUNK["sac"]):
            learner.update(replay.sample(SAC["batch"]))
        return CHUNK["sac"] / (time.perf_counter() - start)

    return chunk

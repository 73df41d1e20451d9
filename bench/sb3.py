"""Stable-Baselines3's side of each row, with its own defaults where a size is not fixed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from bench.sizes import CHUNK, DQN, PPO, SAC


def _learn(model: Any, algo: str) -> Callable[[], float]:
    model.learn(2_048)

    def chunk() -> float:
        start, before = time.perf_counter(), model.num_timesteps
        model.learn(CHUNK[algo], reset_num_timesteps=False)
        return (model.num_timesteps - before) / (time.perf_counter() - start)

    return chunk


def ppo() -> Callable[[], float]:
    from stable_baselines3 import PPO as Peer
    from stable_baselines3.common.env_util import make_vec_env

    model = Peer(
        "MlpPolicy",
        make_vec_env("CartPole-v1", PPO["num_envs"]),
        n_steps=PPO["num_steps"],
        batch_size=PPO["minibatch"],
        n_epochs=PPO["epochs"],
        policy_kwargs={"net_arch": PPO["hidden"]},
        device="cpu",
    )
    return _learn(model, "ppo")


def dqn() -> Callable[[], float]:
    from stable_baselines3 import DQN as Peer

    model = Peer(
        "MlpPolicy",
        "CartPole-v1",
        batch_size=DQN["batch"],
        train_freq=1,
        gradient_steps=1,
        learning_starts=DQN["learning_starts"],
        buffer_size=DQN["buffer"],
        target_update_interval=DQN["target"],
        policy_kwargs={"net_arch": DQN["hidden"]},
        device="cpu",
    )
    return _learn(model, "dqn")


class _Box(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1, 1, (SAC["obs"],), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (SAC["action"],), np.float32)


def sac() -> Callable[[], float]:
    from stable_baselines3 import SAC as Peer
    from stable_baselines3.common.logger import configure

    model = Peer(
        "MlpPolicy",
        _Box(),
        buffer_size=SAC["buffer"],
        batch_size=SAC["batch"],
        policy_kwargs={"net_arch": SAC["hidden"]},
        device="cpu",
    )
    model.set_logger(configure(None, []))
    buffer = model.replay_buffer
    for name in ("observations", "next_observations", "actions", "rewards"):
        array = getattr(buffer, name)
        array[:] = 0.3 * np.random.default_rng(0).standard_normal(array.shape)
    buffer.full = True

    def chunk() -> float:
        start = time.perf_counter()
        model.train(CHUNK["sac"], SAC["batch"])
        return CHUNK["sac"] / (time.perf_counter() - start)

    return chunk

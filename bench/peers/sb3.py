"""Stable-Baselines3 and sb3-contrib, with their own defaults where a size is not fixed."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger

from bench.speed.pace import Pace
from bench.speed.sizes import DQN, PPO, QUANTILES, SAC
from bench.speed.task import Task

WARM_UP = 2_048


def _learn(pace: Pace, model: Any) -> None:
    model.set_logger(Logger(None, []))
    pace.tell(version=stable_baselines3.__version__)
    model.learn(WARM_UP)
    while pace.begin():
        before = model.num_timesteps
        model.learn(pace.settings.chunk, reset_num_timesteps=False)
        pace.end(model.num_timesteps - before)


def ppo(pace: Pace) -> None:
    _ppo(pace, "CartPole-v1")


def ppo_halfcheetah(pace: Pace) -> None:
    _ppo(pace, "HalfCheetah-v5")


def _ppo(pace: Pace, env_id: str) -> None:
    model = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env(env_id, PPO.num_envs),
        n_steps=PPO.num_steps,
        batch_size=PPO.minibatch,
        n_epochs=PPO.epochs,
        policy_kwargs={"net_arch": PPO.hidden},
        device="cpu",
    )
    _learn(pace, model)


def dqn(pace: Pace) -> None:
    _learn(pace, _value_based(stable_baselines3.DQN))


def qr_dqn(pace: Pace) -> None:
    # Looked up here: it is a package of its own, which the other rows do not need.
    contrib: Any = importlib.import_module("sb3_contrib")
    _learn(pace, _value_based(contrib.QRDQN, n_quantiles=QUANTILES.fixed))


def _value_based(algorithm: Any, **network: int) -> Any:
    return algorithm(
        "MlpPolicy",
        "CartPole-v1",
        batch_size=DQN.batch,
        train_freq=1,
        gradient_steps=1,
        learning_starts=DQN.learning_starts,
        buffer_size=DQN.buffer,
        target_update_interval=DQN.target_interval,
        exploration_initial_eps=DQN.epsilon,
        exploration_final_eps=DQN.epsilon,
        policy_kwargs={"net_arch": DQN.hidden} | network,
        device="cpu",
    )


def sac(pace: Pace) -> None:
    env: gymnasium.Env[Any, Any] = Task()
    model = stable_baselines3.SAC(
        "MlpPolicy",
        env,
        buffer_size=SAC.buffer,
        batch_size=SAC.batch,
        policy_kwargs={"net_arch": SAC.hidden},
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    buffer: Any = model.replay_buffer
    for name in ("observations", "next_observations", "actions", "rewards"):
        array = getattr(buffer, name)
        array[:] = 0.3 * np.random.default_rng(0).standard_normal(array.shape)
    buffer.full = True
    pace.tell(version=stable_baselines3.__version__)
    while pace.begin():
        model.train(pace.settings.chunk, SAC.batch)
        pace.end(pace.settings.chunk)

"""The imitation package: its GAIL over Stable-Baselines3's PPO, with its own defaults elsewhere."""

from __future__ import annotations

import importlib
import tempfile
from importlib import metadata
from typing import Any

import numpy as np
from stable_baselines3 import PPO as BaselinesPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger

from bench.speed.pace import Pace
from bench.speed.sizes import GAIL, PPO


def _demonstrations() -> Any:
    types: Any = importlib.import_module("imitation.data.types")
    rng = np.random.default_rng(0)
    count = GAIL.demonstrations
    obs = 0.1 * rng.standard_normal((count, 4)).astype(np.float32)
    return types.Transitions(
        obs=obs,
        acts=rng.integers(0, 2, count),
        infos=np.array([{}] * count),
        next_obs=obs,
        dones=np.zeros(count, np.bool_),
    )


def gail(pace: Pace) -> None:
    # Looked up by name: inside this folder the package has the name of this module.
    adversarial: Any = importlib.import_module("imitation.algorithms.adversarial.gail")
    rewards: Any = importlib.import_module("imitation.rewards.reward_nets")
    networks: Any = importlib.import_module("imitation.util.networks")
    logging: Any = importlib.import_module("imitation.util.logger")
    venv = make_vec_env("CartPole-v1", PPO.num_envs)
    learner = BaselinesPPO(
        "MlpPolicy",
        venv,
        n_steps=PPO.num_steps,
        batch_size=PPO.minibatch,
        n_epochs=PPO.epochs,
        policy_kwargs={"net_arch": PPO.hidden},
        device="cpu",
    )
    net = rewards.BasicRewardNet(
        venv.observation_space,
        venv.action_space,
        hid_sizes=GAIL.hidden,
        normalize_input_layer=networks.RunningNorm,
    )
    trainer = adversarial.GAIL(
        demonstrations=_demonstrations(),
        demo_batch_size=GAIL.batch,
        n_disc_updates_per_round=GAIL.updates,
        venv=venv,
        gen_algo=learner,
        reward_net=net,
        allow_variable_horizon=True,
        custom_logger=logging.HierarchicalLogger(Logger(tempfile.gettempdir(), []), []),
    )
    pace.tell(version=metadata.version("imitation"))
    trainer.train(2 * PPO.num_envs * PPO.num_steps)
    while pace.begin():
        before = learner.num_timesteps
        trainer.train(pace.settings.chunk)
        pace.end(learner.num_timesteps - before)

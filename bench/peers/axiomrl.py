"""AxiomRL; its temperature is fixed and its actor has a layer more, so the step differs."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import torch

from bench.pace import Pace
from bench.sizes import SAC


def sac(pace: Pace) -> None:
    models: Any = importlib.import_module("axiomrl.models.mlp_sac")
    algorithms: Any = importlib.import_module("axiomrl.algorithms.sac")
    data: Any = importlib.import_module("axiomrl.data.replay_buffer")
    replay = data.ReplayBuffer(
        capacity=SAC.buffer, obs_shape=(SAC.obs,), action_shape=(SAC.action,)
    )
    for rows in (replay.obs, replay.actions, replay.rewards, replay.next_obs):
        rows.copy_(0.3 * torch.randn(rows.shape))
    replay.size = SAC.buffer
    learner = algorithms.SAC(
        model=models.MLPSACModel(obs_dim=SAC.obs, action_dim=SAC.action, hidden_sizes=SAC.hidden),
        learning_rate=3e-4,
        gamma=0.99,
        alpha=0.2,
        tau=0.005,
    )
    pace.tell(version=metadata.version("axiomrl"))
    while pace.begin():
        for step in range(pace.settings.chunk):
            learner.update(replay.sample(SAC.batch), global_step=step)
        pace.end(pace.settings.chunk)

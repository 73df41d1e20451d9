"""AxiomRL.

The temperature of its SAC is fixed and the actor has a layer more, so the step differs.  Its IQN
chooses the next action by as many fractions as it learns, at their midpoints; its FQF moves the
fractions first and evaluates the network again for the quantiles, and has Adam for both.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import torch

from bench.speed.pace import Pace
from bench.speed.sizes import DQN, QUANTILES, SAC


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


def iqn(pace: Pace) -> None:
    _quantiles(pace, "IQN", QUANTILES.drawn, images=False)


def iqn_cnn(pace: Pace) -> None:
    _quantiles(pace, "IQN", QUANTILES.drawn, images=True)


def fqf(pace: Pace) -> None:
    _quantiles(pace, "FQF", QUANTILES.proposed, images=False, fraction_learning_rate=2.5e-9)


def fqf_cnn(pace: Pace) -> None:
    _quantiles(pace, "FQF", QUANTILES.proposed, images=True, fraction_learning_rate=2.5e-9)


def _quantiles(pace: Pace, name: str, count: int, *, images: bool, **settings: float) -> None:
    algorithms: Any = importlib.import_module(f"axiomrl.algorithms.{name.lower()}")
    network = _quantile_network(name, count, images=images)
    learner = getattr(algorithms, name)(
        q_network=network,
        learning_rate=1e-3,
        gamma=0.99,
        target_update_interval=DQN.target_interval,
        num_quantiles=count,
        **settings,
    )
    replay = _discrete_replay(images=images)
    batch = QUANTILES.image_batch if images else QUANTILES.batch
    fractions = network.fraction_parameters() if name == "FQF" else []
    sizes = {
        "parameters": sum(p.numel() for p in network.parameters()),
        "parameters of fractions": sum(p.numel() for p in fractions),
        "quantiles": learner.num_quantiles,
        "rows": len(replay),
        "batch": batch,
    }
    pace.tell(version=metadata.version("axiomrl"), sizes=sizes)
    step = 0
    while pace.begin():
        for _ in range(pace.settings.chunk):
            step += 1
            learner.update(replay.sample(batch), global_step=step)
        pace.end(pace.settings.chunk)


def _quantile_network(name: str, count: int, *, images: bool) -> Any:
    module = f"cnn.{name.lower()}_network" if images else f"mlp_{name.lower()}_network"
    models: Any = importlib.import_module(f"axiomrl.models.{module}")
    kind = {"IQN": "IQNetwork", "FQF": "FQFNetwork"}[name]
    shared = {"num_quantiles": count, "embedding_dim": QUANTILES.cosines}
    if not images:
        return getattr(models, f"MLP{kind}")(
            obs_dim=QUANTILES.obs,
            action_dim=QUANTILES.actions,
            hidden_sizes=QUANTILES.hidden,
            **shared,
        )
    return getattr(models, f"CNN{kind}")(
        obs_shape=(QUANTILES.stack, QUANTILES.image, QUANTILES.image),
        action_dim=QUANTILES.image_actions,
        hidden_sizes=(),
        features_dim=QUANTILES.image_features,
        **shared,
    )


def _discrete_replay(*, images: bool) -> Any:
    data: Any = importlib.import_module("axiomrl.data.replay_buffer")
    shape = (QUANTILES.stack, QUANTILES.image, QUANTILES.image) if images else (QUANTILES.obs,)
    replay = data.ReplayBuffer(
        capacity=QUANTILES.image_buffer if images else QUANTILES.buffer,
        obs_shape=shape,
        action_shape=(),
        obs_dtype=torch.uint8 if images else torch.float32,
    )
    for rows in (replay.obs, replay.next_obs):
        if images:
            rows.random_(256)
        else:
            rows.normal_(std=0.3)
    replay.rewards.normal_(std=0.3)
    replay.actions.random_(QUANTILES.actions)
    replay.size = replay.capacity
    return replay

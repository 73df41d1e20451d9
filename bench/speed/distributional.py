"""Our side of the rows about updates of return distributions: IQN and FQF."""

from __future__ import annotations

from typing import Any

import torch

from bench.speed.pace import Pace, WorkSettings
from bench.speed.sizes import DQN, QUANTILES
from bench.speed.updates import PLANNED, Updates, prepare_updates, update_at_pace
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.config import TrainConfig

_SETTINGS: dict[str, dict[str, Any]] = {
    "iqn": {
        "num_quantiles": QUANTILES.drawn,
        "num_target_quantiles": QUANTILES.drawn,
        "num_action_quantiles": QUANTILES.choosing,
    },
    "fqf": {"num_quantiles": QUANTILES.proposed},
}
_VECTORS: dict[str, Any] = {
    "batch_size": QUANTILES.batch,
    "hidden_sizes": QUANTILES.hidden,
    "buffer_capacity": QUANTILES.buffer,
}
_IMAGES: dict[str, Any] = {
    "batch_size": QUANTILES.image_batch,
    "encoder": "nature",
    "features_dim": QUANTILES.image_features,
    "buffer_capacity": QUANTILES.image_buffer,
}


def quantile_config(algo: str, settings: WorkSettings, *, images: bool) -> TrainConfig:
    """Return a run with the sizes of the comparison; as in the peers, gradients are not clipped."""
    shared = {
        "embedding_dim": QUANTILES.cosines,
        "target_update_interval": DQN.target_interval,
        "max_grad_norm": None,
        "eval_interval": 0,
    }
    return TrainConfig(
        algo=algo,
        env_id="bench.speed.task:Task",
        total_timesteps=PLANNED,
        eval_episodes=0,
        checkpoint_interval=0,
        tensorboard=False,
        accelerate=settings.accelerate,
        precision=settings.precision,
        threads=settings.threads,
        algo_kwargs=shared | _SETTINGS[algo] | (_IMAGES if images else _VECTORS),
    )


def quantile_task(*, images: bool) -> EnvSpec:
    """Return a task of the size of CartPole, or one that shows Atari's images."""
    size = QUANTILES
    return EnvSpec(
        env_id="bench.speed.task:Task",
        obs_shape=(size.stack, size.image, size.image) if images else (size.obs,),
        obs_dtype="uint8" if images else "float32",
        action_kind="discrete",
        action_shape=(),
        action_dtype="int64",
        num_actions=size.image_actions if images else size.actions,
        frame_stack=size.stack if images else 1,
    )


def prepare_quantiles(algo: str, settings: WorkSettings, *, images: bool) -> Updates:
    """Build everything that updates need."""
    config = quantile_config(algo, settings, images=images)
    return prepare_updates(config, torch.device("cpu"), quantile_task(images=images))


def sizes_of(updates: Updates) -> dict[str, int]:
    """Return what must be equal on all sides."""
    learner: Any = updates.learner
    whole = sum(p.numel() for p in learner.q_network.parameters())
    regressed = sum(p.numel() for p in learner.value_network.parameters())
    return {
        "parameters": whole,
        "parameters of fractions": whole - regressed,
        "quantiles": learner.config.num_quantiles,
        "rows": len(updates.runner.replay),
        "batch": learner.config.batch_size,
    }


def _update(pace: Pace, algo: str, *, images: bool) -> None:
    updates = prepare_quantiles(algo, pace.settings, images=images)
    update_at_pace(pace, updates, sizes_of(updates))


def iqn(pace: Pace) -> None:
    """Update IQN on a full replay of vectors."""
    _update(pace, "iqn", images=False)


def iqn_cnn(pace: Pace) -> None:
    """Update IQN on a full replay of images."""
    _update(pace, "iqn", images=True)


def fqf(pace: Pace) -> None:
    """Update FQF on a full replay of vectors."""
    _update(pace, "fqf", images=False)


def fqf_cnn(pace: Pace) -> None:
    """Update FQF on a full replay of images."""
    _update(pace, "fqf", images=True)

"""Builds the replay buffer that settings ask for."""

from __future__ import annotations

import math
from collections.abc import Callable

import psutil
import torch

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.offline_config import OfflineConfig
from rl_training.algorithms.replay_config import ReplayConfig
from rl_training.data.dataset_buffer import DatasetBuffer
from rl_training.data.dataset_config import load_configured
from rl_training.data.prioritized_replay import PrioritizedReplayBuffer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError


def make_replay(
    config: ReplayConfig,
    spec: EnvSpec,
    num_envs: int,
    seeds: tuple[int, ...],
    device: torch.device,
) -> ReplayBuffer:
    """Build the replay buffer that the settings ask for."""
    discrete = spec.action_kind == "discrete"
    kind: Callable[..., ReplayBuffer] = ReplayBuffer
    extra: dict[str, float] = {}
    if config.prioritized:
        kind = PrioritizedReplayBuffer
        extra = {
            "priority_exponent": config.priority_exponent,
            "importance_exponent": config.importance_exponent,
        }
    columns = 2 * math.prod(spec.obs_shape) + spec.action_dim + 3
    needed = 4 * columns * config.buffer_capacity * len(seeds)
    _require_free(needed, f"algo_kwargs.buffer_capacity {config.buffer_capacity}", device)
    return kind(
        config.buffer_capacity,
        spec.obs_shape,
        () if discrete else spec.action_shape,
        action_dtype=torch.int64 if discrete else torch.float32,
        num_envs=num_envs,
        seeds=seeds,
        gamma=config.gamma,
        n_step=config.n_step,
        device=device,
        **extra,
    )


def _require_free(needed: int, what: str, device: torch.device) -> None:
    """Refuse what cannot fit, before the machine finds out."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"{what} needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of {device.type} "
            "memory are free; make it smaller"
        )


def load_buffer(
    learner: AnyLearner, spec: EnvSpec, seeds: tuple[int, ...]
) -> tuple[DatasetBuffer, tuple[str, ...]]:
    """Load the dataset that the settings name; also returns what there is to say about it."""
    settings = learner.config
    assert isinstance(settings, OfflineConfig)
    dataset = load_configured(settings, spec)
    _require_free(dataset.nbytes, f"the dataset {dataset.name}", learner.device)
    buffer = DatasetBuffer(
        dataset,
        seeds=seeds,
        gamma=settings.gamma,
        n_step=settings.n_step,
        device=learner.device,
    )
    return buffer, dataset.notes

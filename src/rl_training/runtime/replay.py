"""Builds the replay buffer that settings ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.dynamics.imagination import imagination_of
from rl_training.algorithms.sources import (
    OfflineSettings,
    PriorSettings,
    ReplaySettings,
    SequenceReplay,
    TransitionReplay,
)
from rl_training.data.datasets.blocks import COLUMNS, RowSource
from rl_training.data.datasets.config import DatasetStorage, open_configured
from rl_training.data.datasets.expert_config import ExpertSettings, load_expert
from rl_training.data.datasets.sources import CONVERT
from rl_training.data.datasets.view import DatasetView
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.frames import FrameReplayBuffer, PrioritizedFrameReplayBuffer
from rl_training.data.replay.hindsight import (
    HindsightReplayBuffer,
    PrioritizedHindsightReplayBuffer,
)
from rl_training.data.replay.mapped import MappedBuffer
from rl_training.data.replay.mixed import (
    MixedPrioritizedReplayBuffer,
    MixedReplayBuffer,
    UnionReplayBuffer,
)
from rl_training.data.replay.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay.sequences import SHARE_OF_STARTS, RecurrentReplayBuffer
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.goal_rewards import goal_rewards
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError

DEVICE_SHARE = 0.8
"""Share of the free memory that `dataset_storage: auto` fills with rows."""


def make_replay(
    config: ReplaySettings,
    spec: EnvSpec,
    num_envs: int,
    learner: AnyLearner,
    prior: RowSource | None = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    try_task: bool = True,
) -> ReplayBuffer:
    """Build the replay buffer that the settings ask for.

    Args:
        config: The settings.
        spec: The task.
        num_envs: Environments per seed.
        learner: Whose seeds, device and discount it has.
        prior: Rows in place of the prior data that the settings name.
        env_kwargs: How the task is made, which is asked what it pays for other goals.
        try_task: Make it now; without that such a replay can be traced, but not drawn from.
    """
    if isinstance(config, SequenceReplay):
        kind: Callable[..., ReplayBuffer] = RecurrentReplayBuffer
        extra: dict[str, Any] = {
            "sequence_length": config.batch_length,
            "belief_size": learner.belief_size if config.stored_latents else 0,
            "newest_first": config.newest_first,
        }
    else:
        kind, extra = _of_transitions(config, spec)
    if isinstance(config, PriorSettings):
        # Rows that are added one by one have no next action when they are stored.
        assert not learner.needs_next_action, "needs_next_action is for offline methods alone"
        kind = MixedPrioritizedReplayBuffer if config.prioritized else MixedReplayBuffer
        rows = open_prior(config, spec, learner) if prior is None else prior
        extra["prior"] = dataset_buffer(rows, learner, n_step=config.n_step)
        if config.offline_batch_ratio == "union":
            kind = UnionReplayBuffer
        else:
            extra["prior_ratio"] = config.offline_batch_ratio
    elif isinstance(config, TransitionReplay) and config.hindsight is not None:
        kind, goals = _with_hindsight(kind, config, learner)
        extra |= goals | {"goals": goal_rewards(spec, env_kwargs or {}, try_task=try_task)}
    return _replay(kind, extra, config, spec, num_envs=num_envs, learner=learner)


def _with_hindsight(
    kind: Callable[..., ReplayBuffer], config: TransitionReplay, learner: AnyLearner
) -> tuple[Callable[..., ReplayBuffer], dict[str, Any]]:
    """Return the buffer that draws like `kind` but with other goals, and how it does.

    Raises:
        ConfigError: Nothing does.
    """
    if imagination_of(learner) is not None:
        raise ConfigError(
            f"algo_kwargs.hindsight is {config.hindsight}, but {type(learner).__name__} learns "
            "from imagined transitions, whose goals are part of the model's state; set it to null, "
            "or use sac"
        )
    kinds: dict[Callable[..., ReplayBuffer], Callable[..., ReplayBuffer]] = {
        ReplayBuffer: HindsightReplayBuffer,
        PrioritizedReplayBuffer: PrioritizedHindsightReplayBuffer,
        # Images alone have no goals; `goal_rewards` says so.
        FrameReplayBuffer: HindsightReplayBuffer,
        PrioritizedFrameReplayBuffer: PrioritizedHindsightReplayBuffer,
    }
    share = config.hindsight_goals / (config.hindsight_goals + 1)
    return kinds[kind], {"strategy": config.hindsight, "share": share}


def _of_transitions(
    config: ReplaySettings, spec: EnvSpec
) -> tuple[Callable[..., ReplayBuffer], dict[str, Any]]:
    """Return the buffer that keeps single steps of a task, and what it is made with."""
    kinds: dict[tuple[bool, bool], Callable[..., ReplayBuffer]] = {
        (False, False): ReplayBuffer,
        (False, True): PrioritizedReplayBuffer,
        (True, False): FrameReplayBuffer,
        (True, True): PrioritizedFrameReplayBuffer,
    }
    images, extra = _keeps_frames(config, spec), _drawing(config)
    kind = kinds[images, "priority_exponent" in extra]
    if images:
        extra |= {
            "frame_stack": spec.frame_stack,
            "max_episode_steps": spec.max_episode_steps,
        }
    return kind, extra


def _drawing(config: ReplaySettings) -> dict[str, Any]:
    """Return how a learner of values draws; others take single steps as they are, uniformly."""
    if not isinstance(config, TransitionReplay):
        return {}
    names = ["n_step", "reward_scale", "reward_shift"]
    if config.prioritized:
        names += ["priority_exponent", "importance_exponent"]
    return {name: getattr(config, name) for name in names}


def _keeps_frames(config: ReplaySettings, spec: EnvSpec) -> bool:
    """Tell whether frames are kept once: of images alone, with no prior data beside them."""
    images = spec.obs_in_bytes and spec.observation is None
    return images and not isinstance(config, PriorSettings)


def _replay(
    kind: Callable[..., ReplayBuffer],
    extra: dict[str, Any],
    config: ReplaySettings,
    spec: EnvSpec,
    *,
    num_envs: int,
    learner: AnyLearner,
) -> ReplayBuffer:
    row = _row_bytes(config, spec, learner)
    needed = row * config.buffer_capacity * learner.num_seeds
    require_free(needed, f"algo_kwargs.buffer_capacity {config.buffer_capacity}", learner.device)
    return kind(
        config.buffer_capacity,
        spec.obs_shape,
        spec.action_entries,
        action_dtype=torch.int64 if spec.actions_are_counted else torch.float32,
        obs_dtype=torch.uint8 if spec.obs_in_bytes else torch.float32,
        num_envs=num_envs,
        seeds=learner.seeds,
        gamma=learner.config.gamma,
        device=learner.device,
        **extra,
    )


def _row_bytes(config: ReplaySettings, spec: EnvSpec, learner: AnyLearner) -> int:
    """Return the memory of one transition; the extra frames of a frame replay are few."""
    size = math.prod(spec.obs_shape)
    entry = 1 if spec.obs_in_bytes else 4
    if isinstance(config, SequenceReplay):
        size += size // SHARE_OF_STARTS
        belief = 2 * learner.belief_size + 8 if config.stored_latents else 0
        return size * entry + 4 * (spec.action_dim + 4) + belief
    if _keeps_frames(config, spec):
        return size // spec.frame_stack + 4 * 5 + 8
    return 2 * size * entry + 4 * (spec.action_dim + 3)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def require_free(
    needed: int, what: str, device: torch.device, advice: str = "make it smaller"
) -> None:
    """Refuse what cannot fit, before the machine finds out."""
    free = _free_bytes(device)
    if needed > free:
        raise ConfigError(
            f"{what} needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of {device.type} "
            f"memory are free; {advice}"
        )


def open_prior(config: PriorSettings, spec: EnvSpec, learner: AnyLearner) -> DatasetView:
    """Open the prior data that the settings name, which must fit onto the learner's device.

    Raises:
        ConfigError: When it does not.
    """
    view = open_configured(config, spec, room=_free_bytes(torch.device("cpu")))
    _require_order(view, learner)
    needed = _device_bytes(view, _more_columns(learner))
    require_free(needed, f"the dataset {view.name}", learner.device)
    return view


def _require_order(view: DatasetView, learner: AnyLearner) -> None:
    """Refuse rows out of time order where a learner looks beyond single ones."""
    if learner.needs_next_action:
        view.require_episodes("the next action of each transition")
    if learner.needs_return_to_go:
        view.require_episodes("the return-to-go of each transition")


def load_buffer(learner: AnyLearner, spec: EnvSpec) -> tuple[DatasetBuffer, tuple[str, ...]]:
    """Load the dataset that the settings name; also returns what there is to say about it."""
    if isinstance(learner.config, ExpertSettings):
        return _expert_buffer(learner.config, learner, spec)
    settings = learner.part(OfflineSettings)
    view = open_configured(settings, spec, room=_free_bytes(torch.device("cpu")))
    _require_order(view, learner)
    more = _more_columns(learner)
    mapped = stays_on_disk(settings.dataset_storage, view, learner.device, more)
    buffer = dataset_buffer(view, learner, n_step=settings.n_step, mapped=mapped)
    said = f"the dataset stays on disk: {view.name} is read batch by batch"
    return buffer, (*view.notes, said) if mapped else view.notes


def _expert_buffer(
    settings: ExpertSettings, learner: AnyLearner, spec: EnvSpec
) -> tuple[DatasetBuffer, tuple[str, ...]]:
    """Load demonstrations, which are small: they always lie on the device."""
    expert = load_expert(settings, spec)
    require_free(_device_bytes(expert), f"the dataset {expert.name}", learner.device)
    gamma = learner.config.gamma
    buffer = DatasetBuffer(expert, seeds=learner.seeds, gamma=gamma, device=learner.device)
    return buffer, expert.notes


def stays_on_disk(
    storage: DatasetStorage, view: DatasetView, device: torch.device, more: Sequence[str] = ()
) -> bool:
    """Decide whether the rows of a dataset stay on disk, where batches hold `more` columns.

    Raises:
        ConfigError: When they fit nowhere, or are to be mapped and cannot be.
    """
    if storage == "mapped" and not view.is_mapped:
        raise ConfigError(
            f"algo_kwargs.dataset_storage is mapped, but {view.name} has no columns that can be "
            f"(observations, next observations and actions in .npy files, as float32 or uint8); "
            f"{CONVERT}"
        )
    needed = _device_bytes(view, more)
    if storage == "auto" and view.is_mapped:
        return needed > DEVICE_SHARE * _free_bytes(device)
    if storage != "mapped":
        advice = "set algo_kwargs.dataset_storage to mapped" if view.is_mapped else CONVERT
        require_free(needed, f"the dataset {view.name}", device, advice)
    return storage == "mapped"


def _more_columns(learner: AnyLearner) -> list[str]:
    """Return the columns that what a learner asks for beside single rows is as large as."""
    return ["actions"] * learner.needs_next_action + ["rewards"] * learner.needs_return_to_go


def _device_bytes(rows: RowSource, more: Sequence[str] = ()) -> int:
    """Return the memory that rows take on a device, where flags are float32."""
    row_bytes = [max(rows.kind(name).row_bytes, 4) for name in (*COLUMNS, *more)]
    return len(rows) * sum(row_bytes)


def dataset_buffer(
    rows: RowSource, learner: AnyLearner, *, n_step: int, mapped: bool = False
) -> DatasetBuffer:
    """Build the buffer of recorded rows."""
    kind = MappedBuffer if mapped else DatasetBuffer
    seeds, gamma, device = learner.seeds, learner.config.gamma, learner.device
    return kind(
        rows,
        seeds=seeds,
        gamma=gamma,
        n_step=n_step,
        next_actions=learner.needs_next_action,
        returns_to_go=learner.needs_return_to_go,
        device=device,
    )

"""Our side of the row about Dreamer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.speed.pace import Pace
from bench.speed.sizes import DREAMER
from bench.speed.updates import PLANNED, build_learner
from rl_training.algorithms.sources import SequenceReplay
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.compile.runner import Accelerator, ReplayRunner
from rl_training.runtime.recorder import MetricRecorder
from rl_training.runtime.replay import make_replay


def dreamer_config(size: str | None = None, **changes: Any) -> TrainConfig:
    """Return a run of Dreamer with the sizes of the comparison, or with a size of its own."""
    widths: dict[str, Any] = {
        "size": "tiny",
        "deter_size": DREAMER.deter,
        "model_hidden_size": DREAMER.hidden,
        "units": DREAMER.units,
        "mlp_layers": DREAMER.layers,
        "cnn_depth": DREAMER.depth,
        "latent_groups": DREAMER.groups,
        "latent_classes": DREAMER.classes,
    }
    return TrainConfig(
        algo="dreamer",
        env_id="bench.speed.task:Task",
        total_timesteps=PLANNED,
        eval_episodes=0,
        checkpoint_interval=0,
        tensorboard=False,
        algo_kwargs={
            "eval_interval": 0,
            "buffer_capacity": DREAMER.rows,
            "batch_size": DREAMER.batch,
            "batch_length": DREAMER.length,
            "imagination_horizon": DREAMER.horizon,
        }
        | (widths if size is None else {"size": size}),
        **changes,
    )


def pixel_spec() -> EnvSpec:
    """Return a task with images of 64 x 64 pixels."""
    return EnvSpec(
        env_id="bench.speed.task:Task",
        obs_shape=(3, 64, 64),
        obs_dtype="uint8",
        action_kind="discrete",
        action_shape=(),
        num_actions=DREAMER.actions,
        action_dtype="int64",
    )


def fill(replay: ReplayBuffer) -> None:
    """Insert noise, in as many episodes as the peer has."""
    rng = np.random.default_rng(0)
    lead, length = (1, 1), DREAMER.rows // DREAMER.episodes
    obs = rng.integers(0, 256, (*lead, 3, 64, 64), dtype=np.uint8)
    for step in range(DREAMER.rows):
        after = rng.integers(0, 256, (*lead, 3, 64, 64), dtype=np.uint8)
        action = rng.integers(0, DREAMER.actions, lead)
        reward = rng.normal(size=lead).astype(np.float32)
        cut = np.full(lead, (step + 1) % length == 0)
        replay.add(obs, action, reward, after, np.zeros(lead, bool), cut)
        obs = after


def prepare_dreamer(config: TrainConfig, device: torch.device) -> tuple[ReplayRunner, list[str]]:
    """Build what the loop builds, and take one update; also what was said."""
    env = pixel_spec()
    learner = build_learner(config, env, device)
    replay = make_replay(learner.part(SequenceReplay), env, 1, learner)
    fill(replay)
    recorder = MetricRecorder(list(get_algorithm_spec("dreamer").metrics), 1, device)
    messages: list[str] = []
    accelerator = Accelerator(config, env, learner, messages.append)
    acting = learner.initial_acting_state(1)
    runner = ReplayRunner(accelerator, learner, replay, recorder, PLANNED, acting)
    runner.update(1)
    return runner, messages


def dreamer(pace: Pace) -> None:
    """Update Dreamer on a full replay."""
    settings = pace.settings
    config = dreamer_config(
        accelerate=settings.accelerate, precision=settings.precision, threads=settings.threads
    )
    runner, messages = prepare_dreamer(config, torch.device("cpu"))
    pace.tell(messages=messages, sizes=DREAMER.told())
    while pace.begin():
        runner.update(settings.chunk)
        pace.end(settings.chunk)
    runner.accelerator.close()

"""Our side of the rows about dynamics ensembles and planning in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.speed.pace import Pace
from bench.speed.sizes import ENSEMBLE, PETS, SAC
from bench.speed.updates import PLANNED, build_learner, full_replay, task_spec
from rl_training.algorithms.base import ActingState
from rl_training.algorithms.dynamics.imagination import ModelEnv
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.layers import set_layers
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.rng import Rng
from rl_training.runtime.compile.runner import Accelerator, ReplayRunner
from rl_training.runtime.recorder import MetricRecorder

CPU = torch.device("cpu")


def planning_config(accelerate: Any, precision: Any, threads: int, **settings: Any) -> TrainConfig:
    """Return settings of a run of PETS that nothing but its model and planner is measured of."""
    return TrainConfig(
        algo="pets",
        env_id="bench.speed.task:Task",
        total_timesteps=PLANNED,
        eval_episodes=0,
        checkpoint_interval=0,
        tensorboard=False,
        accelerate=accelerate,
        precision=precision,
        threads=threads,
        algo_kwargs={"eval_interval": 0, "initial_random_steps": 0} | settings,
    )


def _config(pace: Pace, **settings: Any) -> TrainConfig:
    given = pace.settings
    return planning_config(given.accelerate, given.precision, given.threads, **settings)


def prepare_planner(
    config: TrainConfig, env: EnvSpec, device: torch.device
) -> tuple[ReplayRunner, MLPMOPOEnsembleModel, list[str]]:
    """Build what the loop builds, and compile it where that is asked for; also what was said."""
    learner: Any = build_learner(config, env, device)
    acting: ActingState | None = learner.initial_acting_state(1)
    replay = full_replay(config, env, learner)
    learner.begin_round(replay)
    recorder = MetricRecorder(list(get_algorithm_spec("pets").metrics), 1, device)
    messages: list[str] = []
    accelerator = Accelerator(config, env, learner, messages.append)
    runner = ReplayRunner(accelerator, learner, replay, recorder, PLANNED, acting)
    runner.update(1)
    return runner, learner.dynamics_model, messages


def _runner(
    pace: Pace, config: TrainConfig, env: EnvSpec
) -> tuple[ReplayRunner, MLPMOPOEnsembleModel]:
    runner, model, messages = prepare_planner(config, env, CPU)
    pace.tell(messages=messages, sizes=sizes_of(model, config.algo_kwargs["batch_size"]))
    return runner, model


def sizes_of(model: MLPMOPOEnsembleModel, batch: int) -> dict[str, int]:
    """Return what must be equal on both sides."""
    parameters = sum(p.numel() for p in model.layers.parameters())
    return {"parameters of layers": parameters, "members": model.num_ensembles, "batch": batch}


def ensemble(pace: Pace) -> None:
    """Update an ensemble on a full replay."""
    config = _config(
        pace,
        num_ensembles=ENSEMBLE.members,
        model_hidden_sizes=ENSEMBLE.hidden,
        batch_size=ENSEMBLE.batch,
        buffer_capacity=SAC.buffer,
        # Acting is not measured here, so that its program may be small.
        planning_particles=ENSEMBLE.members,
        planning_candidates=2,
        planning_topk=1,
        planning_iterations=1,
        planning_horizon=1,
    )
    runner, _ = _runner(pace, config, task_spec())
    while pace.begin():
        runner.update(pace.settings.chunk)
        pace.end(pace.settings.chunk)
    runner.accelerator.close()


def ensemble_rollout(pace: Pace) -> None:
    """Roll random actions out in an ensemble."""
    rng = Rng((0,), "bench")
    model = MLPMOPOEnsembleModel(
        SAC.obs, SAC.action, ENSEMBLE.hidden, ENSEMBLE.members, num_elites=ENSEMBLE.elites
    )
    set_layers(model, pace.settings.precision)
    env = ModelEnv(model, rng)
    start = 0.3 * torch.randn(1, ENSEMBLE.starts, SAC.obs)
    pace.tell(sizes=sizes_of(model, ENSEMBLE.starts))
    while pace.begin():
        done = 0
        while done < pace.settings.chunk:
            env.rollout(
                start, lambda obs: torch.rand(*obs.shape[:2], SAC.action) * 2 - 1, ENSEMBLE.horizon
            )
            done += ENSEMBLE.starts * ENSEMBLE.horizon
        pace.end(done)


PLANNING = {
    "num_ensembles": PETS.members,
    "model_hidden_sizes": PETS.hidden,
    "batch_size": 32,
    "buffer_capacity": 1_000,
    "planning_horizon": PETS.horizon,
    "planning_candidates": PETS.candidates,
    "planning_topk": PETS.elites,
    "planning_iterations": PETS.iterations,
    "planning_particles": PETS.particles,
}


def planning_task() -> EnvSpec:
    """Return the task that actions are planned for."""
    return task_spec().model_copy(
        update={
            "obs_shape": (PETS.obs,),
            "action_shape": (PETS.action,),
            "action_low": (-1.0,) * PETS.action,
            "action_high": (1.0,) * PETS.action,
        }
    )


def pets_action(pace: Pace) -> None:
    """Plan one action after another, each from what is left of the plan before."""
    runner, _ = _runner(pace, _config(pace, **PLANNING), planning_task())
    obs = np.zeros((1, 1, PETS.obs), np.float32)
    with torch.inference_mode():
        runner.act(obs)
        while pace.begin():
            for _ in range(pace.settings.chunk):
                runner.act(obs)
            pace.end(pace.settings.chunk)
    runner.accelerator.close()

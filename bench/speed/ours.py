"""Our side of the compared rows: each function prepares its work and does chunks at the pace."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch

from bench.speed.distributional import fqf as fqf
from bench.speed.distributional import fqf_cnn as fqf_cnn
from bench.speed.distributional import iqn as iqn
from bench.speed.distributional import iqn_cnn as iqn_cnn
from bench.speed.model_based import ensemble as ensemble
from bench.speed.model_based import ensemble_rollout as ensemble_rollout
from bench.speed.model_based import pets_action as pets_action
from bench.speed.pace import Pace
from bench.speed.sizes import CHECKPOINT_INTERVAL, DQN, FULL_REPLAY, GAIL, PPO, QUANTILES
from bench.speed.timers import Timers
from bench.speed.updates import (
    PLANNED,
    build_learner,
    full_replay,
    insert_noise,
    prepare_updates,
    timing_compiler,
    update_at_pace,
    update_config,
)
from bench.speed.world_model import dreamer as dreamer
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.experiment.runs import new_run
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.collector import Collector
from rl_training.runtime.compile.runner import Accelerator, ReplayRunner
from rl_training.runtime.session import Session
from rl_training.runtime.train import train

CPU = torch.device("cpu")


def sac(pace: Pace) -> None:
    """Update SAC on a full replay."""
    _update(pace, "sac")


def cql(pace: Pace) -> None:
    """Update CQL on a dataset."""
    _update(pace, "cql")


def iql(pace: Pace) -> None:
    """Update IQL on a dataset."""
    _update(pace, "iql")


def td3_bc(pace: Pace) -> None:
    """Update TD3+BC on a dataset."""
    _update(pace, "td3_bc")


def _update(pace: Pace, algo: str) -> None:
    settings = pace.settings
    config = update_config(
        algo,
        accelerate=settings.accelerate,
        precision=settings.precision,
        threads=settings.threads,
    )
    updates = prepare_updates(config, CPU)
    update_at_pace(pace, updates, updates.sizes())


class _Paced(Callback):
    """Lets an endless run go on for one chunk at a time."""

    def __init__(self, pace: Pace, timers: Timers, warm_up: int) -> None:
        self.pace, self.timers = pace, timers
        self.messages: list[str] = []
        self._until, self._from = warm_up, -1

    def on_message(self, state: TrainerState, text: str) -> None:
        """Keep what the run says."""
        self.messages.append(text)

    def on_step(self, state: TrainerState) -> None:
        """Report a chunk that is done, and wait until the next one is wanted."""
        if state.step < self._until:
            return
        if self._from < 0:
            compiled = self.timers.seconds["compile"]
            self.pace.tell(compile_seconds=compiled, messages=self.messages)
        else:
            self.pace.end(state.step - self._from)
        self._from, self._until = state.step, state.step + self.pace.settings.chunk
        if not self.pace.begin():
            state.request_stop("the benchmark is over")


def _train(
    pace: Pace, num_envs: int, algo: str, algo_kwargs: dict[str, Any], env_id: str = "CartPole-v1"
) -> None:
    settings = pace.settings
    with tempfile.TemporaryDirectory() as folder, timing_compiler() as timers:
        config = TrainConfig(
            algo=algo,
            env_id=env_id,
            num_envs=num_envs,
            total_timesteps=PLANNED,
            eval_episodes=0,
            checkpoint_interval=0,
            log_interval=10_000,
            tensorboard=False,
            device="cpu",
            threads=settings.threads,
            accelerate=settings.accelerate,
            precision=settings.precision,
            vector_mode=settings.vector_mode,
            output_dir=folder,
            algo_kwargs=algo_kwargs | {"eval_interval": 0},
        )
        # By then every kind of update has been done once, so all compilation is over.
        warm_up = algo_kwargs.get("learning_starts", 0) + algo_kwargs.get("num_steps", 8) * num_envs
        train(config, callbacks=[_Paced(pace, timers, warm_up)])


_DQN_SETTINGS: dict[str, Any] = {
    "batch_size": DQN.batch,
    "hidden_sizes": DQN.hidden,
    "learning_starts": DQN.learning_starts,
    "buffer_capacity": DQN.buffer,
    "target_update_interval": DQN.target_interval,
    "epsilon_start": DQN.epsilon,
    "epsilon_end": DQN.epsilon,
    "double": False,
}


def dqn(pace: Pace) -> None:
    """Train DQN on CartPole."""
    _train(pace, 1, "dqn", _DQN_SETTINGS)


def qr_dqn(pace: Pace) -> None:
    """Train QR-DQN on CartPole; as in the peer, gradients are not clipped."""
    own = {"num_quantiles": QUANTILES.fixed, "max_grad_norm": None}
    _train(pace, 1, "qr_dqn", _DQN_SETTINGS | own)


_PPO_SETTINGS: dict[str, Any] = {
    "num_steps": PPO.num_steps,
    "minibatch_size": PPO.minibatch,
    "update_epochs": PPO.epochs,
    "hidden_sizes": PPO.hidden,
}


def ppo(pace: Pace) -> None:
    """Train PPO on CartPole."""
    _train(pace, PPO.num_envs, "ppo", _PPO_SETTINGS)


def ppo_halfcheetah(pace: Pace) -> None:
    """Train PPO on HalfCheetah."""
    _train(pace, PPO.num_envs, "ppo", _PPO_SETTINGS, "HalfCheetah-v5")


def gail(pace: Pace) -> None:
    """Train GAIL on CartPole; what the demonstrations hold costs nothing, so they are made up."""
    settings = _PPO_SETTINGS | {
        "expert_dataset_kind": "random",
        "expert_dataset_size": GAIL.demonstrations,
        "discriminator_batch_size": GAIL.batch,
        "discriminator_updates": GAIL.updates,
        "discriminator_hidden_sizes": GAIL.hidden,
    }
    _train(pace, PPO.num_envs, "gail", settings)


def checkpoint(pace: Pace) -> None:
    """Save a run whose replay of 1M rows is full, as its own session would."""
    with tempfile.TemporaryDirectory() as folder:
        config = update_config(
            "sac",
            accelerate=pace.settings.accelerate,
            threads=pace.settings.threads,
            output_dir=folder,
            algo_kwargs={"buffer_capacity": FULL_REPLAY},
        )
        spec = get_algorithm_spec(config.algo)
        envs = SeedVectorEnv.make(config.env_id, seeds=config.all_seeds)
        learner = build_learner(config, envs.spec, CPU)
        replay = full_replay(config, envs.spec, learner)
        collector = Collector(envs, CPU)
        session = Session(
            config,
            spec,
            envs.spec,
            new_run(config),
            resume_level=lambda: envs.resume_level,
        )
        session.accelerator = Accelerator(config, envs.spec, learner, session.say)
        session.register(learner, collector=collector, replay=replay)
        session.begin(collector.start)
        runner = ReplayRunner(session.accelerator, learner, replay, session.recorder, PLANNED)
        _save_at_pace(pace, session, runner)
        session.accelerator.close()
        session.close()
        envs.close()


def _save_at_pace(pace: Pace, session: Session, runner: ReplayRunner) -> None:
    """Report the share of a run's time that its checkpoints cost, in percent.

    Steps of an environment are not counted, so a real run spends a smaller share.
    """
    with timing_compiler() as timers:
        runner.update(1)
    pace.tell(compile_seconds=timers.seconds["compile"])
    session.save()  # the first save writes the whole replay, later ones what is new
    while pace.begin():
        start = time.perf_counter()
        runner.update(pace.settings.chunk)
        rate = pace.settings.chunk / (time.perf_counter() - start)
        insert_noise(runner.replay, CHECKPOINT_INTERVAL)
        session.advance(CHECKPOINT_INTERVAL)
        start = time.perf_counter()
        session.save()
        seconds = time.perf_counter() - start
        share = 100 * seconds / (seconds + CHECKPOINT_INTERVAL / rate)
        pace.report(share, save_seconds=seconds, gradient_steps_per_second=rate)

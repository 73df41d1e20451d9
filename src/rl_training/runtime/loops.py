"""The loops: they decide when, never what.

Glossary.  *Environment step*: one action in one environment.  *Step*: the unit of
`total_timesteps`, environment steps per seed.  *Update*: one call of `learner.update`; *gradient
step*: one move of an optimizer.  *Round*: the updates done between two environment steps.
*Rollout*: consecutive steps gathered by one policy.  *Pass*: one turn of a loop, after which a
checkpoint may be written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rl_training.algorithms.base import AnyLearner, OnPolicyLearner
from rl_training.algorithms.sources import ReplaySettings, replay_settings
from rl_training.algorithms.spec import Loop, Phase
from rl_training.data.batch import RolloutBatch
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.collector import Collector
from rl_training.runtime.compile.runner import ReplayRunner, RolloutRunner
from rl_training.runtime.demonstrations import Demonstrations
from rl_training.runtime.health.world_model import WorldModelHealth
from rl_training.runtime.imagining import ImaginationPhase
from rl_training.runtime.phases import LoopPhase, Phases
from rl_training.runtime.prior import BLOCK, PriorData, pretrain_updates
from rl_training.runtime.replay import load_buffer, make_replay
from rl_training.runtime.results import TrainResult
from rl_training.runtime.session import Session


def run_off_policy(session: Session, learner: AnyLearner, envs: SeedVectorEnv) -> TrainResult:
    """Step the environments, keep what happened, and learn from draws of it."""
    config = replay_settings(learner.config)
    assert config is not None
    replay = make_replay(config, envs.spec, envs.num_envs, learner)
    collector = Collector(envs, learner.device)
    phases = phases_of(session, learner, replay)
    batches = phases.batches(replay)
    acting = learner.initial_acting_state(envs.num_envs)
    parts = phases.parts() | ({} if acting is None else {"acting": acting})
    session.register(learner, collector=collector, replay=replay, **parts)
    session.counts = phases.counts
    session.begin(collector.start, phases.first, [*replay.notes, *phases.notes()])
    planned = pretrain_updates(learner) + updates_due(config, 0, session.clock.planned.value)
    runner = ReplayRunner(session.accelerator, learner, batches, session.recorder, planned, acting)
    phases.before_loop(runner)
    while session.running():
        phases.before_pass(runner)
        learner.set_progress(session.progress)
        replay.set_progress(session.progress)
        with torch.inference_mode():
            if acting is not None:
                acting.begin_episodes(collector.starts())
            if session.step < config.random_steps and not session.has_origin:
                action = learner.random_action(envs.num_envs)
            else:
                action = runner.act(collector.observation())
            seen = collector.step(action)
        step = seen.step
        replay.add(
            seen.obs, seen.action, step.reward, step.final_obs, step.terminated, step.truncated
        )
        session.advance(envs.num_envs)
        due = updates_due(config, session.step - envs.num_envs, session.step)
        if due:
            learner.begin_round(replay)
            runner.update(due)
        phases.after_pass()
        session.tick()
    return session.finish()


def updates_due(config: ReplaySettings, before: int, now: int) -> int:
    """Return how many updates belong to the steps from `before` (exclusive) to `now`.

    A round falls on every multiple of `train_frequency`, so nothing is owed from before
    `learning_starts` and nothing depends on how many environments share the steps.
    """
    if now <= config.learning_starts:
        return 0
    return config.updates_by(now) - config.updates_by(max(before, config.learning_starts))


def run_on_policy(session: Session, learner: AnyLearner, envs: SeedVectorEnv) -> TrainResult:
    """Gather a rollout with the current policy, learn from it, throw it away."""
    assert isinstance(learner, OnPolicyLearner)
    num_steps = learner.rollout_steps
    collector = Collector(envs, learner.device)
    phases = phases_of(session, learner, None)
    session.register(learner, collector=collector, **phases.parts())
    session.begin(collector.start, phases.first, phases.notes())
    rows = num_steps * envs.num_envs
    planned = session.clock.planned.value // rows
    runner = RolloutRunner(session.accelerator, learner, planned, rows)
    while session.running():
        runner.before_rollout()
        learner.set_progress(session.progress)
        rollout = gather_rollout(collector, learner, num_steps)
        session.advance(rows)
        session.record(learner.update(rollout, global_step=session.step))
        session.tick()
    return session.finish()


def gather_rollout(collector: Collector, learner: OnPolicyLearner, num_steps: int) -> RolloutBatch:
    """Take `num_steps` steps in every environment; tensors are `[S, T, n, ...]`."""
    with torch.inference_mode():
        noise = learner.draw_noise(num_steps, collector.envs.num_envs)
        steps = [
            collector.step(learner.sample(collector.observation(), noise[:, step]))
            for step in range(num_steps)
        ]

    def stack(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(arrays, 1)).to(learner.device)

    return RolloutBatch(
        obs=stack([s.obs for s in steps]),
        action=stack([s.action for s in steps]),
        reward=stack([s.step.reward for s in steps]),
        next_obs=stack([s.step.final_obs for s in steps]),
        terminated=stack([s.step.terminated for s in steps]),
        truncated=stack([s.step.truncated for s in steps]),
    )


def run_offline(session: Session, learner: AnyLearner) -> TrainResult:
    """Learn from a fixed dataset; steps are gradient steps."""
    buffer, notes = load_buffer(learner, session.env_spec)
    phases = phases_of(session, learner, buffer)
    batches = phases.batches(buffer)
    session.register(learner, replay=buffer, **phases.parts())
    session.begin(lambda: None, lambda: learner.see_data(buffer), notes)
    runner = ReplayRunner(
        session.accelerator, learner, batches, session.recorder, session.clock.planned.value
    )
    while session.running():
        phases.before_pass(runner)
        # Schedules move at fixed steps, so that they do not depend on where a run was cut.
        block_start = session.step - session.step % BLOCK
        learner.set_progress(session.progress_at(block_start))
        steps = min(block_start + BLOCK, session.next_stop(), *phases.stops()) - session.step
        session.advance(steps)
        runner.update(steps)
        session.tick()
    return session.finish()


PHASES: dict[Phase, type[LoopPhase]] = {
    Phase.PRIOR_DATA: PriorData,
    Phase.IMAGINATION: ImaginationPhase,
    Phase.WORLD_MODEL_HEALTH: WorldModelHealth,
    Phase.DEMONSTRATIONS: Demonstrations,
}


def phases_of(session: Session, learner: AnyLearner, replay: ReplayBuffer | None) -> Phases:
    """Return what the method of a run adds to its loop."""
    names = get_algorithm_spec(session.config.algo).loop_phases
    return Phases([PHASES[name](session, learner, replay) for name in names])


OnlineLoop = Callable[[Session, AnyLearner, SeedVectorEnv], TrainResult]
ONLINE: dict[Loop, OnlineLoop] = {
    Loop.OFF_POLICY: run_off_policy,
    Loop.ON_POLICY: run_on_policy,
}

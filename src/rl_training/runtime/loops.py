"""The loops: they decide when, never what.

Glossary.  *Environment step*: one action in one environment.  *Step*: the unit of
`total_timesteps`, environment steps per seed.  *Update*: one call of `learner.update`; *gradient
step*: one move of an optimizer.  *Round*: the updates done between two environment steps.
*Rollout*: consecutive steps gathered by one policy.  *Pass*: one turn of a loop, after which a
checkpoint may be written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import ActingState, AnyLearner, OnPolicyLearner
from rl_training.algorithms.sources import Pacing, pretrain_updates, replay_settings
from rl_training.algorithms.spec import Loop, Phase
from rl_training.data.batch import RolloutBatch
from rl_training.data.replay.storage import ReplayBuffer, StepArrays
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.step import Step
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.rng import Rng, derive_seed
from rl_training.runtime.checkpoints.saver import AHEAD
from rl_training.runtime.collector import ActionAhead, CollectedStep, Collector, RunningStatistics
from rl_training.runtime.compile.runner import ReplayRunner, RolloutRunner
from rl_training.runtime.health.world_model import WorldModelHealth
from rl_training.runtime.phases.base import LoopPhase, Phases
from rl_training.runtime.phases.demonstrations import Demonstrations
from rl_training.runtime.phases.imagination import ImaginationPhase
from rl_training.runtime.phases.prior import BLOCK, PriorData
from rl_training.runtime.replay import load_buffer, make_replay
from rl_training.runtime.results import TrainResult
from rl_training.runtime.session import Session
from rl_training.transfer import HostCopy


def run_off_policy(session: Session, learner: AnyLearner, envs: SeedVectorEnv) -> TrainResult:
    """Step the environments, keep what happened, and learn from draws of it."""
    config = replay_settings(learner.config)
    assert config is not None
    # Numbers of the settings that every pass needs, read once.
    pacing, learning_starts, random_steps = (
        config.pacing,
        config.learning_starts,
        config.random_steps,
    )
    kwargs = session.config.env_kwargs
    replay = make_replay(config, envs.spec, envs.num_envs, learner, env_kwargs=kwargs)
    collector = Collector(envs, learner.device)
    phases = phases_of(session, learner, replay)
    batches = phases.batches(replay)
    acting = learner.exploring_state(envs.num_envs)
    ahead = ActionAhead(envs.num_seeds, envs.num_envs, envs.spec.action_shape)
    statistics = RunningStatistics(learner, envs.num_envs)
    own = statistics.parts() | ({} if acting is None else {"acting": acting})
    parts = phases.parts() | own | {AHEAD: ahead}
    session.register(learner, collector=collector, replay=replay, **parts)
    session.counts = phases.counts
    session.begin(collector.start, phases.first, [*replay.notes, *phases.notes()])
    statistics.begin(collector.starts())
    due = updates_due(pacing, learning_starts, 0, session.clock.planned.value)
    planned = pretrain_updates(learner) + due
    runner = ReplayRunner(
        session.accelerator,
        learner,
        batches,
        session.recorder,
        planned,
        acting,
        stored_in=replay if statistics.idle else None,
    )
    phases.before_loop(runner)

    held = HeldActions(learner, envs.num_envs, config.random_action_hold)
    actor = _Actor(session, learner, collector, replay, runner, acting, random_steps, held)
    while session.running():
        each(phases.before_each, runner)
        progress = session.progress
        learner.set_progress(progress)
        replay.set_progress(progress)
        due = updates_due(pacing, learning_starts, session.step, session.step + envs.num_envs)
        if actions := ahead.take():
            runner.begin(due)  # on the device, while the actions arrive and the step is taken
        seen = collector.step((actions or actor.choose()).array())
        statistics.see(seen)
        session.advance(envs.num_envs)
        ahead.put(actor.take_in(seen.transition, due))
        each(phases.after_each)
        session.tick()
    return session.finish()


class HeldActions:
    """Uniformly random actions, each held for some steps of its environment.

    Which one belongs to a step follows from the step alone, so that a resumed run needs no memory
    of it. Actions that are not held come from the learner's own generator.
    """

    def __init__(self, learner: AnyLearner, num_envs: int, hold: int) -> None:
        self._learner, self._num_envs, self._hold = learner, num_envs, hold
        self._number, self._action = -1, torch.empty(0)

    def at(self, step: int, obs: NDArray[Any]) -> Tensor:
        """Return the actions `[S, n, ...]` of the step that begins after `step` steps per seed.

        Args:
            step: Steps of a seed so far.
            obs: What is seen now, `[S, n, ...]`; it may allow some actions alone.
        """
        learner, allowed = self._learner, None
        if learner.masks_actions:
            allowed = learner.allowed(torch.from_numpy(obs).to(learner.device))
        if self._hold == 1:
            return learner.random_action(self._num_envs, allowed)
        number = step // (self._num_envs * self._hold)
        # Masks change from step to step: the same lots then choose among what is allowed now.
        if number != self._number or allowed is not None:
            seeds = [derive_seed(seed, "random action", number) for seed in learner.seeds]
            with learner.drawing_from(Rng(seeds, "held", learner.device)):
                self._action = learner.random_action(self._num_envs, allowed)
            self._number = number
        return self._action


@dataclass(frozen=True)
class _Actor:
    """Chooses the actions of the off-policy loop, and learns from what came of them."""

    session: Session
    learner: AnyLearner
    collector: Collector
    replay: ReplayBuffer
    runner: ReplayRunner
    acting: ActingState | None
    random_steps: int
    held: HeldActions

    def _acts_randomly(self) -> bool:
        return self.session.step < self.random_steps and not self.session.has_origin

    def choose(self) -> HostCopy:
        """Begin to choose actions for what is seen now."""
        with torch.inference_mode():
            if self.acting is not None:
                forget_ended(self.acting, self.collector)
            if self._acts_randomly():
                return HostCopy.of(self.held.at(self.session.step, self.collector.obs))
            return self.runner.act(self.collector.obs)

    def take_in(self, seen: StepArrays, due: int) -> HostCopy | None:
        """Store a step and do `due` updates; returns the next action if it is chosen already."""
        action: HostCopy | None = None
        if not self._acts_randomly():
            action = self.runner.take_in(seen, self.collector.obs, due)
        if action is not None:
            return action
        self.replay.add_step(seen)
        if self.session.config.overlap:
            # Before the updates: they run on the device while the environments take this step.
            action = self.choose()
        if due:
            self.learner.begin_round(self.replay)
            self.runner.update(due)
        return action


def updates_due(pacing: Pacing, learning_starts: int, before: int, now: int) -> int:
    """Return how many updates belong to the steps from `before` (exclusive) to `now`.

    A round falls on every multiple of `train_frequency`, so nothing is owed from before
    `learning_starts` and nothing depends on how many environments share the steps.
    """
    if now <= learning_starts:
        return 0
    every, times, shared_by = pacing
    done = max(before, learning_starts) // every * times // shared_by
    return now // every * times // shared_by - done


def run_on_policy(session: Session, learner: AnyLearner, envs: SeedVectorEnv) -> TrainResult:
    """Gather a rollout with the current policy, learn from it, throw it away."""
    assert isinstance(learner, OnPolicyLearner)
    num_steps = learner.rollout_steps
    collector = Collector(envs, learner.device)
    phases = phases_of(session, learner, None)
    acting = learner.initial_acting_state(envs.num_envs)
    statistics = RunningStatistics(learner, envs.num_envs)
    parts = phases.parts() | statistics.parts() | ({} if acting is None else {"acting": acting})
    session.register(learner, collector=collector, **parts)
    session.begin(collector.start, phases.first, phases.notes())
    statistics.begin(collector.starts())
    rows = num_steps * envs.num_envs
    planned = session.clock.planned.value // rows
    runner = RolloutRunner(session.accelerator, learner, planned, envs.num_envs, acting)
    while session.running():
        runner.before_rollout()
        learner.set_progress(session.progress)
        rollout = gather_rollout(collector, runner, num_steps, statistics)
        session.advance(rows)
        session.record(learner.update(rollout, global_step=session.step))
        session.tick()
    return session.finish()


def gather_rollout(
    collector: Collector, runner: RolloutRunner, num_steps: int, statistics: RunningStatistics
) -> RolloutBatch:
    """Take `num_steps` steps in every environment; tensors are `[S, T, n, ...]`."""
    if runner.acts_in_turns and statistics.idle and len(collector.envs.parts) > 1:
        return gather_in_turns(collector, runner, num_steps)
    learner, acting = runner.learner, runner.acting
    shares_memory = learner.device.type == "cpu"
    memory: Tensor | None = None
    if acting is not None:
        forget_ended(acting, collector)
        memory = acting.memory.clone()
    steps: list[CollectedStep] = []
    shown: list[Tensor] = []
    with torch.inference_mode():
        for noise in learner.draw_noise(num_steps, collector.envs.num_envs).unbind(1):
            if acting is not None:
                forget_ended(acting, collector)
            action, on_device = runner.sample(collector.obs, noise)
            if not shares_memory:
                shown.append(on_device.clone())  # the next call may write over it
            steps.append(step := collector.step(action.array()))
            if not statistics.idle:
                statistics.see(step)

    given, actions = [s.step for s in steps], [s.action for s in steps]
    if shares_memory:
        obs = _over_time([[s.obs for s in steps]], learner.device)
        next_obs = _over_time([[step.final_obs for step in given]], learner.device)
    else:
        obs = torch.stack(shown, 1)
        next_obs = successors(obs, given)
    return replace(_rollout(obs, next_obs, [actions], [given]), memory=memory)


def forget_ended(acting: ActingState, collector: Collector) -> None:
    """Forget the episode before in environments that are at the start of one."""
    if collector.at_start:
        acting.begin_episodes(collector.starts())


def gather_in_turns(collector: Collector, runner: RolloutRunner, num_steps: int) -> RolloutBatch:
    """Gather a rollout part by part: the device acts for one while another one is stepped.

    The policy is always given all environments, those of the other part as they were seen last,
    and the actions of one part are taken. So each action is what it is when all are stepped at
    once, bit-exactly, and only the order of the work differs.
    """
    learner, parts = runner.learner, collector.envs.parts
    actions: list[list[NDArray[Any]]] = [[] for _ in parts]
    steps: list[list[Step]] = [[] for _ in parts]
    shown: list[Tensor] = []
    with torch.inference_mode():
        noise = learner.draw_noise(num_steps, collector.envs.num_envs)
        for step in range(num_steps):
            for index, part in enumerate(parts):
                if step:
                    steps[index].append(last := collector.end(index))
                    chosen, on_device = runner.sample_part(last.obs, part, noise[:, step])
                else:
                    chosen, on_device = runner.sample(collector.obs, noise[:, step])
                actions[index].append(chosen.array()[:, part].copy())
                collector.begin(actions[index][-1], index)
            shown.append(on_device.clone())  # the next call writes over it
        for index in range(len(parts)):
            steps[index].append(collector.end(index))
    collector.obs = np.concatenate([given[-1].obs for given in steps], 1)
    obs = torch.stack(shown, 1)
    after = [successors(obs[:, :, part], given) for part, given in zip(parts, steps, strict=True)]
    return _rollout(obs, torch.cat(after, 2), actions, steps)


def _rollout(
    obs: Tensor,
    next_obs: Tensor,
    actions: Sequence[Sequence[NDArray[Any]]],
    steps: Sequence[Sequence[Step]],
) -> RolloutBatch:
    """Put together what each part of the environments did and was given, step by step."""

    def of(name: str) -> Tensor:
        return _over_time([[getattr(step, name) for step in part] for part in steps], obs.device)

    return RolloutBatch(
        obs=obs,
        action=_over_time(actions, obs.device),
        reward=of("reward"),
        next_obs=next_obs,
        terminated=of("terminated"),
        truncated=of("truncated"),
    )


def _over_time(parts: Sequence[Sequence[NDArray[Any]]], device: torch.device) -> Tensor:
    """Stack the arrays `[S, n, ...]` of each part over time, and the parts side by side."""
    stacked = [np.stack(arrays, 1) for arrays in parts]
    whole = stacked[0] if len(stacked) == 1 else np.concatenate(stacked, 2)
    return torch.from_numpy(whole).to(device)


def successors(obs: Tensor, steps: Sequence[Step]) -> Tensor:
    """Return what followed each observation `[S, T, n, ...]`.

    Nearly always that is the observation of the next step, which is on the device already; only
    the last observations of episodes, and those of the last step, are sent there.
    """
    after = torch.empty_like(obs)
    after[:, :-1] = obs[:, 1:]
    after[:, -1] = torch.from_numpy(steps[-1].final_obs)
    ended = [(step.terminated | step.truncated).nonzero() for step in steps[:-1]]
    if any(len(seeds) for seeds, _ in ended):
        last = np.concatenate([step.final_obs[at] for step, at in zip(steps, ended, strict=False)])
        time = np.repeat(np.arange(len(ended)), [len(seeds) for seeds, _ in ended])
        seed, env = (np.concatenate(axis) for axis in zip(*ended, strict=True))
        places = (torch.from_numpy(index).to(obs.device) for index in (seed, time, env))
        after.index_put_(tuple(places), torch.from_numpy(last).to(obs.device))
    return after


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
        each(phases.before_each, runner)
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


def each(hooks: Sequence[Callable[..., None]], *arguments: object) -> None:
    """Call every hook of a run's phases; most runs have none."""
    for hook in hooks:
        hook(*arguments)


OnlineLoop = Callable[[Session, AnyLearner, SeedVectorEnv], TrainResult]
ONLINE: dict[Loop, OnlineLoop] = {
    Loop.OFF_POLICY: run_off_policy,
    Loop.ON_POLICY: run_on_policy,
}

"""Gymnasium's MuJoCo tasks for all seeds and environments at once, on all cores.

Bit-identical to the same environments run one by one: the simulator is MuJoCo's own, stepped by a
pool of threads, observations and rewards are those of `rl_training.envs.tasks.mujoco`, and every
environment draws the starts of its episodes from its own generator by Gymnasium's own code. So the
mode in which environments run does not change a result, and snapshots are those of environments run
one by one: a run may be resumed in another mode.

Shapes: S seeds, n environments per seed, L = S * n lanes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

from rl_training.envs.backends.mujoco_simulations import (
    SimulationError,
    Simulations,
    why_unavailable,
)
from rl_training.envs.factory import full_name
from rl_training.envs.plain import State
from rl_training.envs.snapshot import ResumeLevel, SnapshotWrapper
from rl_training.envs.spec import AnyEnv, Array
from rl_training.envs.tasks.mujoco import MUJOCO_TASKS
from rl_training.errors import CheckpointError

_ALL = slice(None)
_NEVER = np.iinfo(np.int64).max  # steps that no episode has
_WORK_PER_THREAD = 30e-6  # seconds; for less, waking another thread costs more than it saves
_HARMLESS = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing)


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _useful_threads(base: Any, count: int) -> int:
    """Threads that pay for so many lanes; results do not depend on them, so it may be measured."""
    import mujoco

    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        mujoco.mj_step(base.model, base.data, nstep=base.frame_skip)
        seconds.append(time.perf_counter() - began)
    return max(1, min(usable_cores(), int(min(seconds) * count / _WORK_PER_THREAD)))


def why_not_native(env_kwargs: Mapping[str, Any]) -> str | None:
    """Why one of `MUJOCO_TASKS` cannot run here with such keywords; None if it can."""
    if env_kwargs.get("render_mode") is not None:
        return f"env_kwargs.render_mode is {env_kwargs['render_mode']!r}"
    if (env_kwargs.get("wrappers") or {}).get("pixels") is not None:
        return "env_kwargs.wrappers.pixels asks for images"
    return why_unavailable()


def why_not_batched(env: AnyEnv) -> str | None:
    """Why an environment cannot run here; None if it can."""
    layer = env
    while isinstance(layer, gym.Wrapper):
        if type(layer) not in (*_HARMLESS, SnapshotWrapper):
            return f"it is wrapped in {type(layer).__name__}"
        layer = layer.env
    if full_name(type(layer)) not in MUJOCO_TASKS:
        return f"what it makes is a {full_name(type(layer))}"
    return None


class _Start:
    """Takes the place of a simulation in Gymnasium's `reset_model`, and notes what is set."""

    def __init__(self, base: Any) -> None:
        self.qpos: Array = np.zeros(0)
        self.qvel: Array = np.zeros(0)
        base.set_state = self.set_state
        base._get_obs = self.observe_nothing

    def set_state(self, qpos: Array, qvel: Array) -> None:
        """Note positions and velocities; they may be the environment's own arrays."""
        self.qpos, self.qvel = qpos, qvel

    def observe_nothing(self) -> None:
        """Observations are made for all lanes at once."""


class MujocoBatch:
    """MuJoCo tasks that never reset by themselves; `renew` takes a mask.

    Args:
        shape: (S, n).
        stand_in: One such environment, for which `why_not_batched` knows no reason. It stands for
            each lane in turn: when an episode begins, and in snapshots.
        threads: So many threads; 0 takes as many of the cores that the process may use as pay.
    """

    kind: ClassVar[str] = "wrapped"

    def __init__(self, shape: tuple[int, int], stand_in: SnapshotWrapper, threads: int = 0) -> None:
        self._shape = shape
        self._stand_in = stand_in
        stand_in.reset(seed=0)
        base: Any = stand_in.unwrapped
        self._base = base
        self._start = _Start(base)
        count = shape[0] * shape[1]
        self.threads = min(count, threads or _useful_threads(base, count))
        self._simulations = Simulations(base.model, base.data, count, self.threads)
        self._task = MUJOCO_TASKS[full_name(type(base))](base, self._simulations.bind)
        self._limit = _time_limit(stand_in)
        self._steps = np.zeros(count, np.int64)
        self._lanes_shape = (count, base.model.nu)
        self._obs_shape = (*shape, *base.observation_space.shape)
        self._generators: list[np.random.Generator] = []
        self._seeds: list[int] = []
        self._episodes: list[dict[str, Any]] = [{} for _ in range(count)]  # own attributes
        self._restored: list[State] | None = None

    @property
    def note(self) -> str:
        """How the environments run."""
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        return f"native: all at once on {threads} of mujoco.batch"

    @property
    def resume_level(self) -> ResumeLevel:
        """All of the state is known."""
        return "exact"

    def observations(self) -> Array:
        """The current observations, [S, n, O]."""
        return self._task.observe(_ALL, np.float32).reshape(self._obs_shape)

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes everywhere, with new generators if there are seeds, S * n of them."""
        if seeds is not None:
            self._generators = [seeding.np_random(seed)[0] for seed in seeds]
            self._seeds = list(seeds)
        self._restored = None
        self._begin(np.arange(len(self._steps), dtype=np.int32))
        return self.observations()

    def renew(self, ended: Array, obs: Array) -> Array:
        """Begin new episodes where `ended`, [S, n]; returns the observations of all."""
        lanes = ended.ravel().nonzero()[0].astype(np.int32)
        self._begin(lanes)
        fresh = obs.copy()
        fresh.reshape(len(self._steps), -1)[lanes] = self._task.observe(lanes, np.float32)
        return fresh

    def _begin(self, lanes: Array) -> None:
        self._simulations.reset(lanes)
        for lane in lanes.tolist():
            self._base._np_random = self._generators[lane]
            self._base.reset_model()
            self._task.qpos[lane] = self._start.qpos
            self._task.qvel[lane] = self._start.qvel
            self._note_episode(lane)
        self._simulations.forward(lanes)
        self._steps[lanes] = 0

    def _note_episode(self, lane: int) -> None:
        names = self._task.episode_attributes
        self._episodes[lane] = {name: np.array(getattr(self._base, name)) for name in names}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """One step of all environments with actions [S, n, A]; ended ones wait for `renew`."""
        task, shape = self._task, self._shape
        lanes = actions.reshape(self._lanes_shape)
        before = task.before()
        task.ctrl[...] = lanes
        self._simulations.step(self._base.frame_skip)
        if task.uses_contact_forces:
            self._simulations.contact_forces()
        self._restored = None
        self._steps += 1
        reward, terminated = task.outcome(before, lanes)
        return (
            self.observations(),
            reward.astype(np.float32).reshape(shape),
            terminated.reshape(shape),
            (self._steps >= self._limit).reshape(shape),
        )

    def snapshot(self) -> list[State]:
        """What every seed's environments would give if run one by one."""
        n = self._shape[1]
        envs = self._restored or [self._lane_state(lane) for lane in range(len(self._steps))]
        obs = self._task.observe(_ALL, np.float64)
        parts = [slice(first, first + n) for first in range(0, len(envs), n)]
        return [
            {"kind": self.kind, "level": "exact", "obs": obs[part].copy(), "envs": envs[part]}
            for part in parts
        ]

    def _lane_state(self, lane: int) -> State:
        import mujoco

        base, steps = self._base, int(self._steps[lane])
        base._np_random, base._np_random_seed = self._generators[lane], self._seeds[lane]
        for name, value in self._episodes[lane].items():
            setattr(base, name, value.copy())
        self._simulations.copy_data(lane, base.data)
        if steps:  # What Gymnasium calls after each step, whether or not the task reads the forces.
            mujoco.mj_rnePostConstraint(base.model, base.data)
        if self._limit < _NEVER:
            self._stand_in.set_wrapper_attr("_elapsed_steps", steps)
        return self._stand_in.snapshot()

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots; no environment has anything to report."""
        envs = [env for state in states for env in state["envs"]]
        # Observations follow from the simulations; a snapshot without its own is damaged.
        if len(np.concatenate([state["obs"] for state in states])) != len(envs):
            raise CheckpointError("environment snapshot: it lacks observations of environments")
        base, generators = self._base, []
        for lane, env in enumerate(envs):
            base._np_random = np.random.default_rng(0)  # A restore writes into the one there is.
            self._stand_in.restore(env)
            self._simulations.set_data(lane, base.model, base.data)
            self._steps[lane] = _elapsed_steps(self._stand_in)
            self._seeds[lane] = base._np_random_seed
            self._note_episode(lane)
            generators.append(base._np_random)
        self._generators = generators
        # The simulator's own derived fields are set by the next step only.
        self._restored = envs
        return [None] * len(envs)

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """Which environment failed, and why."""
        return (error.lane if isinstance(error, SimulationError) else 0), error

    def close(self) -> None:
        """Close the one real environment; the simulations go with the last array that shows one."""
        self._stand_in.close()


def _time_limit(env: AnyEnv) -> int:
    """Steps after which an episode is cut off."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            return int(env._max_episode_steps)
        env = env.env
    return _NEVER


def _elapsed_steps(env: AnyEnv) -> int:
    """Steps of the running episode; at least 1 where nobody counts but a step has been made."""
    return int(env.get_wrapper_attr("_elapsed_steps")) if _time_limit(env) < _NEVER else 1

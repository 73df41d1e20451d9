"""Ways to run S * n environments: one after another, one process each, on a cluster, vectorised.

All take and give arrays [S, n, ...]; what they give belongs to the receiver, float64 observations
as float32. Environment i of seed s is number `s * n + i`, its lane.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from rl_training.envs.backends.atari_vector import AtariVector, why_no_atari_vector
from rl_training.envs.backends.classic import CARTPOLE_IDS, MaskedCartPole, SpreadCartPole
from rl_training.envs.backends.mujoco_batch import MujocoBatch, why_not_batched, why_not_native
from rl_training.envs.backends.processes import WorkerError, WorkerVectorEnv
from rl_training.envs.factory import class_name, close_env, make_env
from rl_training.envs.options import is_atari, wrapper_options
from rl_training.envs.plain import State
from rl_training.envs.snapshot import ResumeLevel, SnapshotWrapper, weakest_level
from rl_training.envs.spec import Array, EnvSpec
from rl_training.envs.tasks.mujoco import MUJOCO_TASKS
from rl_training.errors import ConfigError, EnvError

Mode: TypeAlias = Literal["auto", "native", "sync", "async", "ray"]
Transition: TypeAlias = tuple[Array, Array, Array, Array]
"""Observations, rewards (float32), terminated, truncated."""

_MIN_VECTORIZED = 4  # below this, looping over environments is as fast
_ATARI_DIFFERS = (
    "vector_mode native is faster but its frames may differ by one grey level (see "
    "docs/environments.md), so it is for you to choose"
)


class Backend(Protocol):
    """What `SeedVectorEnv` asks of the way its environments run."""

    kind: ClassVar[str]
    """Which snapshots it takes."""

    @property
    def note(self) -> str | None:
        """The mode that was chosen and how or why, for the user; None if there was no choice."""

    @property
    def resume_level(self) -> ResumeLevel:
        """The weakest level of the environments, see `rl_training.envs.snapshot`."""

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes everywhere, newly seeded if there are seeds, S * n of them."""

    def step(self, actions: Array) -> Transition:
        """One step of all environments; ended ones wait for `renew`."""

    def renew(self, ended: Array, obs: Array) -> Array:
        """Begin new episodes where `ended`; returns current observations, `obs` is kept."""

    def observations(self) -> Array:
        """The current observations."""

    def snapshot(self) -> list[State]:
        """The state of every seed."""

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots; says for every lane why a new episode began, if one did."""

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """The lane that failed and the reason; an EnvError is a complete one."""

    def close(self) -> None:
        """Close the environments; may be called twice."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the environments are, and how many."""

    env_id: str
    env_kwargs: dict[str, Any]
    spec: EnvSpec
    num_envs: int
    seeds: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(S, n)."""
        return len(self.seeds), self.num_envs

    def makers(self) -> list[Callable[[], SnapshotWrapper]]:
        """What makes each environment, lane by lane."""
        return [
            functools.partial(make_wrapped, self.env_id, self.env_kwargs, index, seed)
            for seed in self.seeds
            for index in range(self.num_envs)
        ]


def make_wrapped(env_id: str, env_kwargs: dict[str, Any], index: int, seed: int) -> SnapshotWrapper:
    """Make the environment of a lane."""
    return SnapshotWrapper(make_env(env_id, env_kwargs), env_id, index, seed)


def make_backend(task: Task, mode: Mode, timeout: float, threads: int = 0) -> Backend:
    """Make the environments; `auto` takes the native version where there is one.

    Raises:
        ConfigError: The mode is `native`, and there is no such version of the task.
    """
    note = None
    if mode in ("auto", "native"):
        wrapped = _wrapped(task)
        native = wrapped or _cartpole(task, mode)
        native = native or _atari(task, mode, threads) or _mujoco(task, threads)
        if not isinstance(native, str):
            return native
        if mode == "native":
            raise ConfigError(
                f"vector_mode native cannot run {task.env_id}: {native}; use vector_mode auto, "
                "which takes what there is, or sync, async or ray"
            )
        others = task.env_id in CARTPOLE_IDS or is_atari(task.env_id)
        lost = class_name(task.env_id) in MUJOCO_TASKS or (others and wrapped is not None)
        if lost or native == _ATARI_DIFFERS:
            note = f"sync: one after another, because {native}"
    if mode == "ray":
        from rl_training.envs.backends.ray_actors import RayEnvs

        return RayEnvs(task, timeout)
    return WorkerEnvs(task, timeout) if mode == "async" else SyncEnvs(task, note)


def _wrapped(task: Task) -> str | None:
    """Why no native version runs a task with wrappers around it; None without."""
    chain = wrapper_options(task.env_id, task.env_kwargs.get("wrappers")).chain
    return "env_kwargs.wrappers puts wrappers around single environments" if chain else None


def _cartpole(task: Task, mode: Mode) -> Backend | str | None:
    """CartPole as arrays, why not, or None for other tasks."""
    if task.env_id not in CARTPOLE_IDS:
        return None
    if not set(task.env_kwargs) <= {"max_episode_steps"}:
        return "of its env_kwargs, only max_episode_steps is possible there"
    if mode == "auto" and math.prod(task.shape) < _MIN_VECTORIZED:
        return "one by one, few environments are as fast"
    limit = task.spec.max_episode_steps
    assert limit is not None
    # The number per seed decides about the kind of snapshot: a seed is resumed alone too.
    if task.num_envs >= _MIN_VECTORIZED:
        return MaskedCartPole(task.shape, limit)
    return SpreadCartPole(task.shape, limit, task.makers()[0]())


def _atari(task: Task, mode: Mode, threads: int) -> Backend | str | None:
    """Atari games on ALE's vector interface, why not, or None for other tasks."""
    if not is_atari(task.env_id):
        return None
    reason = why_no_atari_vector(task.env_id, task.env_kwargs)
    if reason is not None:
        return reason
    if mode == "auto":
        return _ATARI_DIFFERS
    return AtariVector(task.env_id, task.env_kwargs, task.seeds, task.num_envs, threads)


def _mujoco(task: Task, threads: int) -> Backend | str:
    """Gymnasium's MuJoCo tasks in a batch, or why not."""
    reason = why_not_native(class_name(task.env_id), task.env_kwargs)
    if reason is not None:
        return reason
    stand_in = task.makers()[0]()
    reason = why_not_batched(stand_in)
    if reason is not None:
        close_env(stand_in, stand_in.label)
        return reason
    return MujocoBatch(task.shape, stand_in, threads)


def _received_dtype(spec: EnvSpec) -> np.dtype[Any]:
    """float64 becomes float32, which learners take."""
    dtype = np.dtype(spec.obs_dtype)
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def wrapped_state(obs: Array, envs: list[State]) -> State:
    """Put the states of one seed's environments together."""
    level = weakest_level(env["level"] for env in envs)
    return {"kind": "wrapped", "level": level, "obs": obs, "envs": envs}


class SyncEnvs:
    """Environments one after another in this process."""

    kind: ClassVar[str] = "wrapped"

    def __init__(self, task: Task, note: str | None = None) -> None:
        self.note = note
        self._shape = task.shape
        self._obs_dtype = np.dtype(task.spec.obs_dtype)
        self._received = _received_dtype(task.spec)
        self._obs_shape = (*task.shape, *task.spec.obs_shape)
        self._obs_ndim = len(self._obs_shape)
        self._lanes_shape = (-1, *task.spec.action_shape)
        self._closed = False
        self.envs: list[SnapshotWrapper] = []
        try:
            for make in task.makers():
                self.envs.append(make())
                self._check_spaces(task)
        except (Exception, SystemExit):
            self.close()
            raise
        self._only = self.envs[0] if len(self.envs) == 1 else None

    def _check_spaces(self, task: Task) -> None:
        first, last = self.envs[0], self.envs[-1]
        if (first.observation_space, first.action_space) != (
            last.observation_space,
            last.action_space,
        ):
            raise EnvError(
                f"environment {task.env_id} has other spaces every time it is made: "
                f"{first.observation_space} and {first.action_space}, then "
                f"{last.observation_space} and {last.action_space}; all environments of a run "
                "must have the same"
            )

    @property
    def resume_level(self) -> ResumeLevel:
        """The weakest level of the environments."""
        return weakest_level(env.resume_level for env in self.envs)

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes everywhere."""
        given: Sequence[int | None] = [None] * len(self.envs) if seeds is None else seeds
        for env, seed in zip(self.envs, given, strict=True):
            env.reset(seed=seed)
        return self.observations()

    def step(self, actions: Array) -> Transition:
        """One step of all environments."""
        if self._only is None:
            return self._step_all(actions)
        obs, reward, terminated, truncated, _ = self._only.step(actions[0, 0])
        # Collecting from a list, as below, would take as long as a cheap environment's step.
        rewards = np.empty((1, 1), np.float32)
        rewards[0, 0] = reward
        return (
            np.array(obs, self._received, order="C", ndmin=self._obs_ndim),
            rewards,
            np.array(terminated, np.bool_, ndmin=2),
            np.array(truncated, np.bool_, ndmin=2),
        )

    def _step_all(self, actions: Array) -> Transition:
        lanes = zip(self.envs, actions.reshape(self._lanes_shape), strict=True)
        steps = [env.step(action) for env, action in lanes]
        obs, reward, terminated, truncated, _ = zip(*steps, strict=True)
        return (
            self._stacked(obs),
            np.array(reward, np.float32).reshape(self._shape),
            np.array(terminated, np.bool_).reshape(self._shape),
            np.array(truncated, np.bool_).reshape(self._shape),
        )

    def _stacked(self, obs: Sequence[Array]) -> Array:
        # Joining what is there and reshaping is faster than np.stack, which makes a view of each.
        if self._obs_ndim == 2:
            return np.array(obs, self._received).reshape(self._obs_shape)
        joined = np.concatenate(obs, dtype=self._received, casting="unsafe")
        return joined.reshape(self._obs_shape)

    def renew(self, ended: Array, obs: Array) -> Array:
        """Begin new episodes where `ended`."""
        fresh = obs.copy()
        for seed, index in zip(*(axis.tolist() for axis in ended.nonzero()), strict=True):
            fresh[seed, index] = self.envs[seed * self._shape[1] + index].reset()[0]
        return fresh

    def observations(self) -> Array:
        """The current observations."""
        return self._stacked([env.last_obs for env in self.envs])

    def snapshot(self) -> list[State]:
        """The state of every seed; observations as the environments gave them."""
        num_seeds, n = self._shape
        parts = [self.envs[seed * n : (seed + 1) * n] for seed in range(num_seeds)]
        return [
            wrapped_state(
                np.array([env.last_obs for env in part], self._obs_dtype),
                [env.snapshot() for env in part],
            )
            for part in parts
        ]

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots."""
        envs = [env for state in states for env in state["envs"]]
        last_obs = [obs for state in states for obs in state["obs"]]
        messages: list[str | None] = []
        for env, state, obs in zip(self.envs, envs, last_obs, strict=True):
            messages.append(env.restore(state))
            if env.family != "replay":  # a replay sees its last observation itself
                env.last_obs = np.array(obs)
        return messages

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """Which environment failed, and why; nearly always it has said so itself."""
        return 0, error

    def close(self) -> None:
        """Close the environments."""
        if not self._closed:
            self._closed = True
            for env in self.envs:
                close_env(env, env.label)


class WorkerEnvs:
    """Environments in processes of their own."""

    kind: ClassVar[str] = "wrapped"
    note = None

    def __init__(self, task: Task, timeout: float) -> None:
        self._shape = task.shape
        self._obs_shape = (*task.shape, *task.spec.obs_shape)
        self._lanes_shape = (-1, *task.spec.action_shape)
        self._received = _received_dtype(task.spec)
        self._timeout = timeout
        self._envs = WorkerVectorEnv(task.makers(), timeout)
        self._buffer: Array = np.zeros(0)  # written to by the workers, [S * n, ...]

    @property
    def processes(self) -> list[Any]:
        """One for each environment."""
        return list(self._envs.processes)

    @property
    def resume_level(self) -> ResumeLevel:
        """The weakest level of the environments."""
        return weakest_level(self._envs.call("resume_level"))

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes everywhere."""
        given: list[int | None] | None = None if seeds is None else list(seeds)
        self._buffer, _ = self._envs.reset(seed=given)
        return self.observations()

    def step(self, actions: Array) -> Transition:
        """One step of all environments."""
        lanes = actions.reshape(self._lanes_shape)
        self._buffer, reward, terminated, truncated, _ = self._envs.step(lanes)
        return (
            self.observations(),
            reward.astype(np.float32).reshape(self._shape),
            terminated.reshape(self._shape),
            truncated.reshape(self._shape),
        )

    def renew(self, ended: Array, obs: Array) -> Array:  # noqa: ARG002
        """Begin new episodes where `ended`."""
        self._buffer, _ = self._envs.reset(options={"reset_mask": ended.ravel()})
        return self.observations()

    def observations(self) -> Array:
        """The current observations."""
        return self._buffer.astype(self._received).reshape(self._obs_shape)

    def snapshot(self) -> list[State]:
        """The state of every seed; observations as the environments gave them."""
        num_seeds, n = self._shape
        envs = list(self._envs.call("snapshot"))
        lanes = [slice(seed * n, (seed + 1) * n) for seed in range(num_seeds)]
        return [wrapped_state(self._buffer[part].copy(), envs[part]) for part in lanes]

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots."""
        self._envs.set_attr("pending_state", [env for state in states for env in state["envs"]])
        messages = list(self._envs.call("restore_pending"))
        np.copyto(self._buffer, np.concatenate([state["obs"] for state in states]))
        restarted = [lane for lane, message in enumerate(messages) if message is not None]
        if restarted:
            last_obs = self._envs.call("last_obs")
            for lane in restarted:
                self._buffer[lane] = last_obs[lane]
        return messages

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """Which environment failed, and why; the workers do not outlive it."""
        lane: int = 0
        reason: object = error
        if isinstance(error, WorkerError):
            lane = error.index
            if isinstance(error.__cause__, EnvError):
                reason = error.__cause__
        elif isinstance(error, multiprocessing.TimeoutError):
            lane, reason = self._envs.slow_worker(), f"gave no answer within {self._timeout:g} s"
        elif (dead := self._envs.dead_worker()) is not None:
            lane, reason = dead[0], f"its worker process died (exit code {dead[1]})"
        self._envs.close(terminate=True)
        return lane, reason

    def close(self) -> None:
        """Close the environments and end their processes."""
        if not self._envs.closed:
            self._envs.close()

"""Ways to run S * n environments: one after another, in processes, on a cluster, vectorised.

All take and give arrays [S, n, ...]; what they give belongs to the receiver, float64 observations
as float32. Environment i of seed s is number `s * n + i`, its lane.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rl_training.envs.backends.atari_vector import AtariVector, why_no_atari_vector
from rl_training.envs.backends.classic import CARTPOLE_IDS, MaskedCartPole, SpreadCartPole
from rl_training.envs.backends.lanes import (
    Task,
    Transition,
    make_lanes,
    received_dtype,
    restore_lane,
    unwrapped_states,
    wrapped_states,
)
from rl_training.envs.backends.mujoco_batch import (
    MujocoBatch,
    usable_cores,
    why_not_batched,
    why_not_native,
)
from rl_training.envs.backends.processes import WorkerEnvs
from rl_training.envs.factory import class_name, close_env
from rl_training.envs.ogbench import is_slow
from rl_training.envs.options import is_atari, wrapper_options
from rl_training.envs.plain import State
from rl_training.envs.snapshot import ResumeLevel, weakest_level
from rl_training.envs.spec import Array
from rl_training.envs.tasks.mujoco import MUJOCO_TASKS
from rl_training.errors import ConfigError

Mode: TypeAlias = Literal["auto", "native", "sync", "async", "ray"]

_MIN_VECTORIZED = 4  # below this, looping over environments is as fast
_MIN_CORES = 4  # with fewer, processes for games gain little beside an update that needs a core
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


@runtime_checkable
class InParts(Protocol):
    """A backend that can step its environments in turns: a part works while another is waited for.

    A part is a share of each seed's environments; arrays of a part are [S, its n, ...].
    """

    parts: tuple[slice, ...]

    def begin(self, actions: Array, index: int) -> None:
        """Begin a step of the part of that number."""

    def end(self, index: int) -> Transition:
        """Finish the step of a part; ended episodes wait for `renew_part`."""

    def renew_part(self, ended: Array, index: int) -> Array:
        """Begin new episodes where `ended`; returns the part's current observations."""


@runtime_checkable
class TellsSuccess(Protocol):
    """A backend whose environments may say whether an episode succeeded."""

    def successes(self) -> Array:
        """What each environment's last ended episode said, [S, n] float64; NaN for nothing."""


def make_backend(task: Task, mode: Mode, timeout: float, threads: int = 0) -> Backend:
    """Make the environments; `auto` takes the native version where there is one.

    For games without one it takes processes where there are cores for them; results do not depend
    on that, so the machine may decide it.

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
        if _processes_pay(task, threads):
            return WorkerEnvs(task, timeout, threads, f"; {native}")
        others = task.env_id in CARTPOLE_IDS or is_atari(task.env_id)
        lost = class_name(task.env_id) in MUJOCO_TASKS or (others and wrapped is not None)
        if lost or native == _ATARI_DIFFERS:
            note = f"sync: one after another, because {native}"
    if mode == "ray":
        from rl_training.envs.backends.ray_actors import RayEnvs

        return RayEnvs(task, timeout)
    return WorkerEnvs(task, timeout, threads) if mode == "async" else SyncEnvs(task, note)


def _processes_pay(task: Task, threads: int) -> bool:
    """Whether `auto` takes processes: where steps cost more than a message."""
    return (
        (is_atari(task.env_id) or is_slow(task.env_id))
        and task.env_kwargs.get("render_mode") is None
        and math.prod(task.shape) >= _MIN_VECTORIZED
        and min(usable_cores(), threads or _MIN_CORES) >= _MIN_CORES
        # Others start a program over in each process, which its author must have foreseen.
        and multiprocessing.get_context().get_start_method() == "fork"
        and not multiprocessing.current_process().daemon
    )


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
    name = class_name(task.env_id)
    if name not in MUJOCO_TASKS:
        return (
            "only CartPole, Atari games and Gymnasium's own MuJoCo classes have a native version, "
            f"and its class is {name or 'unknown'}"
        )
    reason = why_not_native(task.env_kwargs)
    if reason is not None:
        return reason
    stand_in = task.makers()[0]()
    reason = why_not_batched(stand_in)
    if reason is not None:
        close_env(stand_in, stand_in.label)
        return reason
    return MujocoBatch(task.shape, stand_in, threads)


class SyncEnvs:
    """Environments one after another in this process."""

    kind: ClassVar[str] = "wrapped"

    def __init__(self, task: Task, note: str | None = None) -> None:
        self.note = note
        self._shape = task.shape
        self._obs_dtype = np.dtype(task.spec.obs_dtype)
        self._received = received_dtype(task.spec)
        self._obs_shape = (*task.shape, *task.spec.obs_shape)
        self._obs_ndim = len(self._obs_shape)
        self._lanes_shape = (-1, *task.spec.action_shape)
        self._closed = False
        self.envs = make_lanes(task)
        self._only = self.envs[0] if len(self.envs) == 1 else None

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

    def successes(self) -> Array:
        """What each environment's last ended episode said about success; NaN for nothing."""
        return np.array([env.success for env in self.envs]).reshape(self._shape)

    def observations(self) -> Array:
        """The current observations."""
        return self._stacked([env.last_obs for env in self.envs])

    def snapshot(self) -> list[State]:
        """The state of every seed; observations as the environments gave them."""
        obs = np.array([env.last_obs for env in self.envs], self._obs_dtype)
        return wrapped_states(self._shape, obs, [env.snapshot() for env in self.envs])

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots."""
        lanes = zip(self.envs, *unwrapped_states(states), strict=True)
        return [restore_lane(env, state, obs) for env, obs, state in lanes]

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """Which environment failed, and why; nearly always it has said so itself."""
        return 0, error

    def close(self) -> None:
        """Close the environments."""
        if not self._closed:
            self._closed = True
            for env in self.envs:
                close_env(env, env.label)

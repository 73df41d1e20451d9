"""Environments lane by lane: what is made, restored and shared out, wherever that happens.

Environment i of seed s is number `s * n + i`, its lane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rl_training.envs.factory import close_env, make_env
from rl_training.envs.plain import State
from rl_training.envs.snapshot import SnapshotWrapper, weakest_level
from rl_training.envs.spec import Array, EnvSpec
from rl_training.errors import EnvError

Transition: TypeAlias = tuple[Array, Array, Array, Array]
"""Observations, rewards (float32), terminated, truncated."""


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


@dataclass(frozen=True, kw_only=True)
class LaneTask(Task):
    """Some lanes of a task, as a task of one seed."""

    lanes: tuple[tuple[int, int], ...]
    """(seed, index) of each."""

    def makers(self) -> list[Callable[[], SnapshotWrapper]]:
        """What makes each environment."""
        return [
            functools.partial(make_wrapped, self.env_id, self.env_kwargs, index, seed)
            for seed, index in self.lanes
        ]


def split(task: Task, count: int) -> list[LaneTask]:
    """Cut a task into parts of as equal size as can be, lanes in order."""
    lanes = [(seed, index) for seed in task.seeds for index in range(task.num_envs)]
    parts = np.array_split(np.arange(len(lanes)), count)
    return [
        LaneTask(
            env_id=task.env_id,
            env_kwargs=task.env_kwargs,
            spec=task.spec,
            num_envs=len(part),
            seeds=(task.seeds[0],),
            lanes=tuple(lanes[i] for i in part),
        )
        for part in parts
    ]


def make_wrapped(env_id: str, env_kwargs: dict[str, Any], index: int, seed: int) -> SnapshotWrapper:
    """Make the environment of a lane."""
    return SnapshotWrapper(make_env(env_id, env_kwargs), env_id, index, seed)


def make_lanes(task: Task, begin: Callable[[int], None] | None = None) -> list[SnapshotWrapper]:
    """Make all environments of a task, or none; `begin` is told the number of each before it.

    Raises:
        EnvError: One cannot be made, or has other spaces than the first.
    """
    envs: list[SnapshotWrapper] = []
    try:
        for lane, make in enumerate(task.makers()):
            if begin is not None:
                begin(lane)
            envs.append(make())
            require_same_spaces(task.env_id, spaces_of(envs[0]), spaces_of(envs[-1]))
    except BaseException:
        for env in envs:
            close_env(env, env.label)
        raise
    return envs


def spaces_of(env: SnapshotWrapper) -> tuple[object, object]:
    """Observation space and action space."""
    return env.observation_space, env.action_space


def require_same_spaces(
    env_id: str, first: tuple[object, object], other: tuple[object, object]
) -> None:
    """Refuse environments of one run that do not fit together.

    Raises:
        EnvError: Naming the spaces.
    """
    if first != other:
        raise EnvError(
            f"environment {env_id} has other spaces every time it is made: {first[0]} and "
            f"{first[1]}, then {other[0]} and {other[1]}; all environments of a run must have the "
            "same"
        )


def restore_lane(env: SnapshotWrapper, state: State, obs: Array) -> str | None:
    """Continue an environment from its snapshot and last observation; says why not, if not."""
    message = env.restore(state)
    if env.family != "replay":  # a replay sees its last observation itself
        env.last_obs = np.array(obs)
    return message


def received_dtype(spec: EnvSpec) -> np.dtype[Any]:
    """float64 becomes float32, which learners take."""
    dtype = np.dtype(spec.obs_dtype)
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def wrapped_state(obs: Array, envs: list[State]) -> State:
    """Put the states of one seed's environments together."""
    level = weakest_level(env["level"] for env in envs)
    return {"kind": "wrapped", "level": level, "obs": obs, "envs": envs}


def wrapped_states(shape: tuple[int, int], obs: Array, envs: Sequence[State]) -> list[State]:
    """The state of every seed, from all lanes' observations and environments."""
    num_seeds, n = shape
    lanes = [slice(seed * n, (seed + 1) * n) for seed in range(num_seeds)]
    return [wrapped_state(obs[part].copy(), list(envs[part])) for part in lanes]


def unwrapped_states(states: Sequence[State]) -> tuple[Array, list[State]]:
    """All lanes' last observations and environments, from the states of all seeds."""
    envs = [env for state in states for env in state["envs"]]
    return np.concatenate([state["obs"] for state in states]), envs

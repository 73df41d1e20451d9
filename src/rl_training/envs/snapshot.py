"""Exact resume of environments: the state of one environment as plain data, and back.

`SnapshotWrapper` is the outermost wrapper of every environment. It picks one of five families:

- `own`: the environment has `get_state() -> dict` and `set_state(dict)`; the dict holds everything
  but `np_random` (which is kept here) as nested dicts with string keys, lists, numbers, strings,
  None and arrays;
- `attributes`: classic control and toy text, whose whole state is in plain attributes;
- `mujoco`: Gymnasium's MuJoCo tasks, by the simulator's integration state and the derived fields
  that lag behind it;
- `atari`: the Arcade Learning Environment, by the emulator's own state;
- `replay`: all others, by the generator at the start of the episode and the actions since. A hash
  of the last observation says whether the replay arrived; if not, a new episode begins and the
  restore says so.

Levels: `exact` (the first four), `replay` (exact if the environment is deterministic under its own
generator, checked on restore), `restart` (a new episode begins on restore).
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Literal, SupportsFloat, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as RegisteredSpec

from rl_training.envs.atari_state import atari_state, set_atari_state
from rl_training.envs.mujoco_state import mujoco_state, set_mujoco_state
from rl_training.envs.plain import (
    State,
    decode,
    encode,
    generator_from,
    is_plain,
    plain_attributes,
    set_attributes,
    without_reward_transform,
)
from rl_training.envs.spec import AnyEnv, Array, check_flags, check_reward
from rl_training.errors import CheckpointError, EnvError, described
from rl_training.observations import ObservationSpec

ResumeLevel: TypeAlias = Literal["exact", "replay", "restart"]
Family: TypeAlias = Literal["own", "attributes", "mujoco", "atari", "replay"]

LEVELS: tuple[ResumeLevel, ...] = ("exact", "replay", "restart")
MAX_REPLAY_ACTIONS = 20_000
"""Actions of one episode after which its log is given up; the level is then `restart`."""
_MAX_REPLAY_ATTRIBUTE_BYTES = 2**20

# What belongs to how an environment was made or is shown, not to its state.
_SKIP = frozenset(
    {
        "env",
        "spec",
        "metadata",
        "model",
        "data",
        "mujoco_renderer",
        "render_mode",
        "fullpath",
        "isopen",
        "screen",
        "screens",
        "clock",
        "surf",
        "window_surface",
        "action_space",
        "observation_space",
        "_cached_spec",
        "_action_space",
        "_observation_space",
        "_metadata",
        "_saved_kwargs",
        "_ezpickle_args",
        "_ezpickle_kwargs",
        "_previous_data",
    }
)
# Transition tables that the class fixes: large, and the same in every instance.
_CONSTANT_TABLES = {"TaxiEnv": {"P"}, "CliffWalkingEnv": {"P"}}
# Tasks that keep one Box2D world over all episodes.
_WORLD_OUTLIVES_EPISODE = {
    ("gymnasium.envs.box2d.bipedal_walker", "BipedalWalker"),
    ("gymnasium.envs.box2d.car_racing", "CarRacing"),
}


def weakest_level(levels: Iterable[ResumeLevel]) -> ResumeLevel:
    """The level that holds for all of several environments."""
    return LEVELS[max((LEVELS.index(level) for level in levels), default=0)]


def _wrappers(env: AnyEnv) -> Iterator[gym.Wrapper[Any, Any, Any, Any]]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env


def _wrapper_states(env: AnyEnv, max_bytes: int | None = None) -> State:
    """Plain attributes of every wrapper, keyed by position and class."""
    return {
        f"{position}:{type(layer).__name__}": plain_attributes(layer, _SKIP, max_bytes)
        for position, layer in enumerate(_wrappers(env))
    }


def _set_wrapper_states(env: AnyEnv, state: State, *, complete: bool) -> None:
    state = without_reward_transform(state)
    layers = {f"{i}:{type(layer).__name__}": layer for i, layer in enumerate(_wrappers(env))}
    if set(layers) != set(state):
        raise CheckpointError(
            f"the environment's wrappers are {sorted(layers)}, but the snapshot was taken with "
            f"{sorted(state)}; "
            f"resume with the env_kwargs of the run"
        )
    for key, layer in layers.items():
        set_attributes(layer, state[key], complete=complete, skip=_SKIP)


def _is_configuration(value: object) -> bool:
    """Whether a value describes how an object was made, so that a fresh instance has the same."""
    made = (spaces.Space, gym.Env, RegisteredSpec, ModuleType, type, ObservationSpec)
    return isinstance(value, made) or callable(value)


def _wrappers_are_plain(env: AnyEnv) -> bool:
    return all(
        name in _SKIP or _is_configuration(value) or is_plain(value)
        for layer in _wrappers(env)
        for name, value in vars(layer).items()
    )


def _has_own_state(base: AnyEnv) -> bool:
    get_state, set_state = getattr(base, "get_state", None), getattr(base, "set_state", None)
    if not callable(get_state) or not callable(set_state):
        return False
    # MuJoCo environments have an unrelated set_state(qpos, qvel).
    empty = inspect.Parameter.empty
    required = [p for p in inspect.signature(set_state).parameters.values() if p.default is empty]
    return len(required) == 1


def choose_family(env: AnyEnv) -> Family:
    """The way this environment's state can be kept."""
    base = env.unwrapped
    module = type(base).__module__
    if not _wrappers_are_plain(env):
        return "replay"
    if _has_own_state(base):
        return "own"
    if module.startswith(("gymnasium.envs.classic_control", "gymnasium.envs.toy_text")):
        return "attributes"
    simulator = type(getattr(base, "data", None)).__module__
    # Own MuJoCo tasks may change the model itself, which this family does not keep: they are
    # replayed.
    if module.startswith("gymnasium.envs.mujoco") and simulator.startswith("mujoco"):
        return "mujoco"
    return "atari" if module.startswith("ale_py") else "replay"


def _own_state(base: Any) -> State:
    state = base.get_state()
    if not isinstance(state, dict) or not is_plain(state):
        raise EnvError(
            f"{type(base).__name__}.get_state() must return a dict of numbers, strings, None, "
            "lists, dicts and "
            f"NumPy arrays, got {state!r}"
        )
    return {"own": encode(state), "generator": encode(base.np_random)}


def _skipped(base: AnyEnv) -> frozenset[str]:
    return _SKIP | _CONSTANT_TABLES.get(type(base).__name__, set())


def _digest(obs: Array) -> str:
    array = np.ascontiguousarray(obs)
    head = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()


def _renew_world(base: Any) -> None:
    """Give a Box2D task an empty world for its next episode, as LunarLander does by itself.

    A used world keeps traces of its past after its bodies are destroyed, so an episode in it may
    differ from the same one in a new world (Gymnasium issue 728). Subclasses are left alone: they
    may have a world of their own making.
    """
    if (type(base).__module__, type(base).__name__) not in _WORLD_OUTLIVES_EPISODE:
        return
    base._destroy()
    base.world = type(base.world)(gravity=base.world.gravity)


class ReplayLog:
    """The start of the running episode and the actions since."""

    def __init__(self, env: AnyEnv) -> None:
        self._env = env
        self._start: State = {}
        self._actions: list[Array] = []
        self.overflowed = False

    def begin(self, seed: int | None) -> None:
        """Note the state before a reset, with what outlives an episode (counters, curricula)."""
        _renew_world(self._env.unwrapped)
        limit = _MAX_REPLAY_ATTRIBUTE_BYTES
        self._start = {
            "seed": seed,
            "base": plain_attributes(self._env.unwrapped, _SKIP, limit),
            "wrappers": _wrapper_states(self._env, limit),
        }
        self._actions = []
        self.overflowed = False

    def record(self, action: Any) -> None:
        """Note one action, until there are too many."""
        if len(self._actions) < MAX_REPLAY_ACTIONS:
            self._actions.append(np.array(action))
        elif not self.overflowed:
            self.overflowed = True

    def snapshot(self, last_obs: Array) -> State:
        """What a replay needs, and how to tell that it arrived."""
        actions = [] if self.overflowed else self._actions
        return {
            "start": self._start,
            "actions": np.stack(actions) if actions else None,
            "obs_digest": _digest(last_obs),
            "generator": encode(self._env.unwrapped.np_random),
        }

    def replay(self, state: State) -> Array | None:
        """Replay from the start of the episode; None if another place was reached."""
        start = state["start"]
        set_attributes(self._env.unwrapped, start["base"])
        _set_wrapper_states(self._env, start["wrappers"], complete=False)
        self.begin(start["seed"])
        obs, _ = self._env.reset(seed=start["seed"])
        for action in () if state["actions"] is None else state["actions"]:
            self.record(action)
            obs = self._env.step(action)[0]
        generator = self._env.unwrapped.np_random.bit_generator.state
        arrived = _digest(obs) == state["obs_digest"]
        same_stream = _same(generator, generator_from(state["generator"]).bit_generator.state)
        return obs if arrived and same_stream else None


def _same(left: Any, right: Any) -> bool:
    """Equality of bit generator states, which may hold arrays."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(np.array_equal(left, right))


def success_in(info: object) -> float:
    """Return what an info says about success, 0 to 1; NaN where it says nothing."""
    if not isinstance(info, Mapping):
        return math.nan
    value = info.get("success", info.get("is_success"))
    plain = (
        value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
    )
    return float(plain) if isinstance(plain, bool | int | float) else math.nan


class SnapshotWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """Outermost wrapper: snapshot and restore of one environment, and errors that name it.

    Infos are dropped: merging them costs more than a cheap environment's step.  What the last one
    of an episode says about success is kept.
    """

    def __init__(self, env: AnyEnv, env_id: str = "", index: int = 0, seed: int = 0) -> None:
        super().__init__(env)
        self.label = (
            f"environment {env_id or type(env.unwrapped).__name__} (index {index}, seed {seed})"
        )
        self.family: Family = choose_family(env)
        self.last_obs: Array = np.zeros(0)
        self.success = math.nan
        """What the last step of the last episode that ended said; NaN where it said nothing."""
        self._log = ReplayLog(env) if self.family == "replay" else None
        self._obs_shape = env.observation_space.shape
        self._no_info: dict[str, Any] = {}
        self._started = False

    @property
    def resume_level(self) -> ResumeLevel:
        """How exactly this environment can be continued from a snapshot taken now."""
        if self._log is None:
            return "exact"
        return "restart" if self._log.overflowed else "replay"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if self._log is not None:
            self._log.begin(seed)
        try:
            obs, _ = self.env.reset(seed=seed, options=options or None)
            if obs.shape != self._obs_shape:
                raise ValueError(f"observation of shape {obs.shape}, not {self._obs_shape}")
        except (Exception, SystemExit) as error:
            raise EnvError(f"{self.label}: reset failed with {described(error)}") from error
        self.last_obs = obs
        self._started = True
        return obs, self._no_info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step; the replay log is the only cost of a snapshot here."""
        if self._log is not None:
            self._log.record(action)
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
            # Shared memory would broadcast a smaller observation without a word.
            if obs.shape != self._obs_shape:
                raise ValueError(f"observation of shape {obs.shape}, not {self._obs_shape}")
            check_flags(terminated, truncated)
            check_reward(reward)
        except (Exception, SystemExit) as error:
            raise EnvError(
                f"{self.label}: step failed with {described(error)}; the last action was {action!r}"
            ) from error
        self.last_obs = obs
        if terminated or truncated:
            self.success = success_in(info)
        return obs, reward, terminated, truncated, self._no_info

    def snapshot(self) -> State:
        """The state as plain data; the environment continues undisturbed."""
        base = self.env.unwrapped
        state: State = {"family": self.family, "level": self.resume_level}
        if self._log is not None:
            return state | self._log.snapshot(self.last_obs)
        state["wrappers"] = _wrapper_states(self.env)
        if self.family == "own":
            return state | _own_state(base)
        if self.family == "atari":
            return state | atari_state(base)
        state["attributes"] = plain_attributes(base, _skipped(base))
        if self.family == "mujoco":
            state |= mujoco_state(base)
        return state

    def restore(self, state: State) -> str | None:
        """Continue from a snapshot.

        Returns:
            None if the environment is as it was; otherwise why a new episode began
            (`last_obs` is its first observation).

        Raises:
            CheckpointError: The snapshot is of another kind of environment.
        """
        if state["family"] != self.family:
            raise CheckpointError(
                f"{self.label}: the snapshot is of family {state['family']!r}, but this "
                "environment is of family "
                f"{self.family!r}; resume with the env_id and env_kwargs of the run"
            )
        if self._log is not None:
            return self._restore_by_replay(state, self._log)
        if state["level"] != "exact":
            raise CheckpointError(
                f"{self.label}: the snapshot is of level {state['level']!r}, but this environment "
                "is kept exactly; use another checkpoint"
            )
        if not self._started:
            self.reset()  # Some environments build in reset what set_state needs.
        base: Any = self.env.unwrapped
        _set_wrapper_states(self.env, state["wrappers"], complete=True)
        if self.family == "own":
            base.set_state(decode(state["own"]))
            base._np_random = generator_from(state["generator"])
        elif self.family == "atari":
            set_atari_state(base, state)
        else:
            set_attributes(base, state["attributes"], complete=True, skip=_skipped(base))
        if self.family == "mujoco":
            set_mujoco_state(base, state)
        return None

    def _restore_by_replay(self, state: State, log: ReplayLog) -> str | None:
        if state["level"] == "replay":
            obs = log.replay(state)
            if obs is not None:
                self.last_obs = obs
                self._started = True
                return None
            reason = "replaying its actions gave another observation, so it is not deterministic"
        else:
            reason = f"its episode was longer than {MAX_REPLAY_ACTIONS} actions"
        self.env.unwrapped._np_random = generator_from(state["generator"])
        self.reset()
        return f"{self.label}: {reason}; a new episode was begun"

"""What a task looks like from outside: shapes, dtypes, action bounds and the episode limit.

An `EnvSpec` is plain data. It is stored in every checkpoint, so a policy can be loaded and asked
for actions without making the environment. Learners speak *learner units*: continuous actions are
vectors `[A]` in [-1, 1], whatever axes the task's have, and discrete actions, and each part of a
multi-discrete one, count from 0.
"""

from __future__ import annotations

import copy
import math
from functools import cached_property
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pydantic import BaseModel, ConfigDict, model_validator

from rl_training.errors import SpecMismatch
from rl_training.observations import NumberType, ObservationSpec
from rl_training.spaces import action_sizes, space_text
from rl_training.validation import PositiveInt

Array: TypeAlias = npt.NDArray[Any]
AnyEnv: TypeAlias = gym.Env[Any, Any]
ActionKind: TypeAlias = Literal["discrete", "continuous", "multi_discrete"]
"""One whole number, several real ones, or several whole ones (MultiDiscrete, MultiBinary)."""
_FLAGS = frozenset({bool, np.bool_})


class ActionMap:
    """Turns learner units into what the environment takes, and back.

    Built once per spec, because it runs on every environment step.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._discrete = spec.action_kind != "continuous"
        self._start: int | Array = spec.action_start
        if spec.action_kind == "multi_discrete":
            self._start = np.array(spec.action_starts, dtype=np.int64)
        self._dtype = np.dtype(spec.action_dtype)
        self._shape = spec.action_shape
        self._bounded = spec.action_low is not None and spec.action_high is not None
        if spec.action_low is not None and spec.action_high is not None:
            low = np.array(spec.action_low, dtype=np.float64)  # [A]
            high = np.array(spec.action_high, dtype=np.float64)
            self._set_bounds(low, high)
            self._symmetric = bool((low == -high).all())
            # Clipping is all that is left to do, and what is clipped in float32 stays exact.
            self._unit = self._symmetric and bool((high == 1).all()) and self._dtype == np.float32

    def _set_bounds(self, low: Array, high: Array) -> None:
        self._low, self._high = low, high
        self._low32, self._high32 = low.astype(np.float32), high.astype(np.float32)

    def to_env(self, action: Array) -> Array:
        """Learner units `[..., A]` to environment units `[..., *shape]`."""
        if self._discrete:
            index = np.asarray(action, dtype=np.int64)
            if not self._shape:
                return index + self._start if self._start else index
            counted: Array = (index + self._start).astype(self._dtype)
            return counted.reshape(*counted.shape[:-1], *self._shape)
        scaled = self._scaled(action) if self._bounded else np.asarray(action, dtype=self._dtype)
        if len(self._shape) == 1:
            return scaled
        return scaled.reshape(*scaled.shape[:-1], *self._shape)

    def _scaled(self, action: Array) -> Array:
        action = np.asarray(action)
        if self._unit and action.dtype == np.float32:
            clipped: Array = np.minimum(np.maximum(action, self._low32), self._high32)
            return clipped
        if self._symmetric:
            scaled = action.astype(np.float64) * self._high
        else:
            # The two-sided form gives the bounds exactly at -1 and +1; low + weight * width does
            # not.
            weight = (action.astype(np.float64) + 1.0) * 0.5
            scaled = (1.0 - weight) * self._low + weight * self._high
        return np.minimum(np.maximum(scaled, self._low), self._high).astype(self._dtype)

    def for_batch(self, leading: tuple[int, ...]) -> ActionMap:
        """The same `to_env` for these leading axes only: broadcasting takes half the time."""
        batched = copy.copy(self)
        if self._bounded:
            shape = leading + self._low.shape
            low, high = np.broadcast_to(self._low, shape), np.broadcast_to(self._high, shape)
            batched._set_bounds(np.array(low), np.array(high))
        return batched

    def to_learner(self, action: Array) -> Array:
        """Environment units `[..., *shape]` to learner units, the inverse of `to_env`.

        They are int64 for discrete actions, `[..., K]` for those of K parts, or float32 `[..., A]`.
        """
        if self._discrete and not self._shape:
            return np.asarray(action, dtype=np.int64) - self._start
        value = np.asarray(action)
        lead = value.shape[: value.ndim - len(self._shape)]
        value = value.reshape(*lead, math.prod(self._shape))
        if self._discrete:
            return value.astype(np.int64) - self._start
        if not self._bounded:
            return value.astype(np.float32)
        value = value.astype(np.float64)
        width = self._high - self._low
        # A box may hold single values (low == high): every learner action means the same there, 0
        # is chosen.
        safe = np.where(width > 0, width, 1.0)
        unit = np.where(width > 0, ((value - self._low) - (self._high - value)) / safe, 0.0)
        return np.clip(unit, -1.0, 1.0).astype(np.float32)


class EnvSpec(BaseModel):
    """Shapes, dtypes, bounds and episode limit of one task; holds no Gymnasium object."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env_id: str
    """Registered id, or `module:Class` for an own environment."""
    obs_shape: tuple[PositiveInt, ...]
    obs_dtype: NumberType
    """NumPy name of the dtype the environment gives, for example `float32`, `float64` or "
    "`uint8`."""
    action_kind: ActionKind
    action_shape: tuple[PositiveInt, ...]
    """Empty for discrete actions."""
    num_actions: PositiveInt | None = None
    """Number of discrete actions; None for all others."""
    action_start: int = 0
    """The environment's name for the learner's discrete action 0."""
    action_sizes: tuple[PositiveInt, ...] = ()
    """Numbers of values of the parts of a multi-discrete action, flattened; else empty."""
    action_starts: tuple[int, ...] = ()
    """The environment's names for their values 0."""
    action_dtype: NumberType
    action_low: tuple[float, ...] | None = None
    """Lower bounds, flattened; None in checkpoints of a time when a box without bounds was taken:
    actions then pass unscaled."""
    action_high: tuple[float, ...] | None = None
    """Upper bounds, flattened."""
    max_episode_steps: int | None = None
    """Environment steps after which an episode is truncated; None for no limit."""
    frame_stack: PositiveInt = 1
    """Frames that an image shows along its channels, newest last; 1 where they are not stacked."""
    reward_threshold: float | None = None
    """Return at which the task counts as solved, where its authors say so."""
    observation: ObservationSpec | None = None
    """Parts of an observation, of which `obs_shape` is the row; None where it is a single array."""

    @model_validator(mode="after")
    def _is_consistent(self) -> EnvSpec:
        """Refuse what no environment gives: a spec may come from a stranger's checkpoint."""
        if (self.action_kind == "discrete") != (self.num_actions is not None):
            raise ValueError(f"num_actions {self.num_actions} of {self.action_kind} actions")
        if (self.action_kind == "discrete") != (not self.action_shape):
            raise ValueError(f"{self.action_kind} actions of shape {self.action_shape}")
        parts_of_action = self.action_entries[0] if self.action_kind == "multi_discrete" else 0
        if not len(self.action_sizes) == len(self.action_starts) == parts_of_action:
            raise ValueError(
                f"action_sizes {self.action_sizes} and action_starts {self.action_starts} of "
                f"{self.action_kind} actions of shape {self.action_shape}"
            )
        if self.mask_size and (sizes := self._mask_sizes) != self.choices:
            raise ValueError(f"a mask of {sizes} for actions of {self.choices} values")
        for bound in (self.action_low, self.action_high):
            if bound is not None and len(bound) != math.prod(self.action_shape):
                raise ValueError(f"{len(bound)} bounds for actions of shape {self.action_shape}")
        parts = self.observation
        if parts is not None and (self.obs_shape, self.obs_dtype) != (
            (parts.width,),
            str(parts.dtype),
        ):
            raise ValueError(f"rows of {self.obs_shape} {self.obs_dtype} for {parts.described()}")
        return self

    @property
    def obs_in_bytes(self) -> bool:
        """Whether observations are kept as bytes: images, and rows that hold one."""
        if self.observation is not None:
            return self.observation.in_bytes
        return self.obs_dtype == "uint8" and len(self.obs_shape) == 3

    @property
    def learner_dtype(self) -> np.dtype[Any]:
        """Type in which a learner is given single observations and batches of them."""
        if self.obs_in_bytes:
            return np.dtype(np.uint8)
        return np.dtype(np.float32 if len(self.obs_shape) == 1 else self.obs_dtype)

    def example_observations(self, count: int, seed: int) -> Array:
        """Draw observations `[count, ...]`: normal numbers, or every value of an image or flag."""
        generator = np.random.default_rng(seed)
        if self.observation is not None:
            return self.observation.example_rows(count, generator)
        shape, dtype = (count, *self.obs_shape), self.learner_dtype
        if dtype.kind == "f":
            return (2 * generator.standard_normal(shape)).astype(dtype)
        limits = np.iinfo(dtype) if dtype.kind in "iu" else None
        low, high = (limits.min, limits.max) if limits is not None else (0, 1)
        return generator.integers(low, high, size=shape, endpoint=True).astype(dtype)

    @property
    def mask_size(self) -> int:
        """Entries of the mask of allowed actions at the end of each observation; 0 without one."""
        return 0 if self.observation is None else self.observation.mask_size

    @property
    def _mask_sizes(self) -> tuple[int, ...]:
        """Numbers of values of the parts of an action, as its mask has them."""
        return () if self.observation is None else self.observation.leaves[-1].sizes

    def allowed_action(self, obs: Array, generator: np.random.Generator) -> Array:
        """Draw one of the actions that the mask of an observation `[W]` allows, as the task's."""
        return self.scale_action(self.random_choice(obs, generator))

    def random_choice(self, obs: Array, generator: np.random.Generator) -> Array:
        """Draw a counted action in learner units uniformly, among those that `obs` `[W]` allows."""
        sizes = np.array(self.choices)
        if self.mask_size:
            assert self.observation is not None
            parts = np.split(self.observation.allowed(obs), np.cumsum(sizes)[:-1])
            numbers = np.array([generator.choice(np.flatnonzero(part)) for part in parts])
        else:
            numbers = generator.integers(sizes)
        return numbers if self.action_sizes else np.asarray(numbers[0])

    @property
    def obs_dim(self) -> int:
        """Numbers of one observation, as networks may read them one by one."""
        return (
            math.prod(self.obs_shape) if self.observation is None else self.observation.num_floats
        )

    @property
    def action_dim(self) -> int:
        """Outputs one action needs: flat size (continuous), or the number of values (discrete)."""
        if self.action_sizes:
            return sum(self.action_sizes)
        return math.prod(self.action_shape) if self.num_actions is None else self.num_actions

    @property
    def action_entries(self) -> tuple[int, ...]:
        """Shape of an action in learner units: `()` (discrete), `(K,)` of K parts, or `(A,)`."""
        return () if self.action_kind == "discrete" else (math.prod(self.action_shape),)

    @property
    def actions_are_counted(self) -> bool:
        """Whether actions in learner units are whole numbers, one or several."""
        return self.action_kind != "continuous"

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of values of each part of an action that is counted; else empty."""
        return self.action_sizes if self.num_actions is None else (self.num_actions,)

    @property
    def action_limit(self) -> tuple[float, ...] | None:
        """Largest size of each entry of an action in learner units, flattened; None if discrete.

        It is 1 in a finite box, 0 where the box holds a single value, and infinite without bounds.
        """
        if self.actions_are_counted:
            return None
        if self.action_low is None or self.action_high is None:
            return (math.inf,) * self.action_dim
        pairs = zip(self.action_low, self.action_high, strict=True)
        return tuple(float(low < high) for low, high in pairs)

    @cached_property
    def action_map(self) -> ActionMap:
        """The conversion between learner units and environment units."""
        return ActionMap(self)

    def scale_action(self, action: Array) -> Array:
        """Learner units to environment units.

        Continuous: affine from [-1, 1], exact at both ends, clipped to the box, in `action_shape`
        and `action_dtype`. Discrete: plus `action_start`, int64; of several parts: plus
        `action_starts`, in `action_shape` and `action_dtype`.
        """
        return self.action_map.to_env(action)

    def unscale_action(self, action: Array) -> Array:
        """Environment units to learner units, the inverse of `scale_action`."""
        return self.action_map.to_learner(action)

    @classmethod
    def from_env(cls, env: AnyEnv, env_id: str) -> EnvSpec:
        """Read the spec off an environment.

        Raises:
            SpecMismatch: The observation or action space is of a kind no learner here takes.
        """
        obs_space = _checked_obs_space(env.observation_space, env_id)
        registered = env.spec
        return cls(
            env_id=env_id,
            obs_shape=obs_space.shape,
            obs_dtype=str(obs_space.dtype),
            max_episode_steps=_max_episode_steps(env),
            frame_stack=_frame_stack(env),
            reward_threshold=None if registered is None else registered.reward_threshold,
            observation=_observation(env),
            **_action_fields(env.action_space, env_id),
        )

    def require_same_task(self, trained: EnvSpec, advice: str) -> None:
        """Refuse a policy of a task of other shapes.

        Raises:
            SpecMismatch: Naming both tasks, what differs, and `advice`.
        """
        for name in ("action_kind", "obs_shape", "action_shape", "num_actions", "action_sizes"):
            left, right = getattr(trained, name), getattr(self, name)
            if left != right:
                raise SpecMismatch(
                    f"the checkpoint was trained on {trained.env_id} with {name} {left}, but "
                    f"{self.env_id} has {right}; {advice}"
                )
        theirs, ours = trained.observation, self.observation
        # Checkpoints of a time when rows had no names have none.
        if theirs is not None and ours is not None and theirs != ours:
            raise SpecMismatch(
                f"the checkpoint was trained on {trained.env_id}, whose observations are "
                f"{theirs.described()}, but those of {self.env_id} are {ours.described()}; {advice}"
            )


def check_flags(terminated: object, truncated: object) -> None:
    """Refuse what is neither yes nor no; the text "False" would count as yes.

    Raises:
        ValueError: Saying which.
    """
    if terminated.__class__ in _FLAGS and truncated.__class__ in _FLAGS:
        return
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        value = np.asarray(flag)
        if value.size != 1 or value.dtype.kind not in "biu" or value.item() not in (0, 1):
            raise ValueError(f"{name} must be a bool, not {flag!r}")


_LARGEST_REWARD = float(np.finfo(np.float32).max)


def check_reward(reward: Any) -> None:
    """Refuse a finite reward that float32, in which rewards are kept, can only hold as infinity.

    Raises:
        ValueError: Saying so.
        TypeError: It is not a number.
    """
    if _LARGEST_REWARD < abs(reward) < math.inf:
        raise ValueError(f"reward {reward!r} is larger than float32 can hold; scale it down")


def _checked_obs_space(space: spaces.Space[Any], env_id: str) -> spaces.Box:
    """The space itself if it is a Box of numbers."""
    if isinstance(space, spaces.Box) and space.dtype is not None and space.dtype.kind in "fiub":
        _require_entries(space, "observation", env_id)
        return space
    raise SpecMismatch(
        f"environment {env_id}: observation space {space_text(space)} cannot be used; make the "
        "environment with rl_training.envs.make_env, which takes Box, Discrete, MultiDiscrete, "
        "MultiBinary, and Dict and Tuple of these"
    )


def _action_fields(space: spaces.Space[Any], env_id: str) -> dict[str, Any]:
    """The action_* fields of the spec."""
    if isinstance(space, spaces.Discrete):
        return {
            "action_kind": "discrete",
            "action_shape": (),
            "num_actions": int(space.n),
            "action_start": int(space.start),
            "action_dtype": "int64",
        }
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        _require_entries(space, "action", env_id)
        starts = getattr(space, "start", np.zeros(space.shape, np.int64))
        return {
            "action_kind": "multi_discrete",
            "action_shape": space.shape,
            "action_sizes": action_sizes(space),
            "action_starts": tuple(np.ravel(starts).tolist()),
            "action_dtype": str(space.dtype),
        }
    if isinstance(space, spaces.Box) and space.shape and np.dtype(space.dtype).kind == "f":
        _require_entries(space, "action", env_id)
        _require_bounds(space, env_id)
        return {
            "action_kind": "continuous",
            "action_shape": space.shape,
            "action_dtype": str(space.dtype),
            "action_low": tuple(space.low.ravel().tolist()),
            "action_high": tuple(space.high.ravel().tolist()),
        }
    raise SpecMismatch(
        f"environment {env_id}: action space {space_text(space)} cannot be used, allowed are "
        "Discrete, MultiDiscrete, MultiBinary and a Box of floats with at least one axis; wrap the "
        "environment so that it takes one of these"
    )


def _require_entries(space: spaces.Space[Any], what: str, env_id: str) -> None:
    shape = space.shape or ()
    if 0 in shape:
        raise SpecMismatch(
            f"environment {env_id}: its {what} {type(space).__name__} of shape {shape} holds no "
            "number; every axis must be at least 1 long"
        )


def _require_bounds(space: spaces.Box, env_id: str) -> None:
    """Refuse a box that is open on any side; the largest float is a way to write infinity."""
    endless = 0.5 * float(np.finfo(np.float32).max)
    low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
    is_open = ~((np.abs(low) < endless) & (np.abs(high) < endless))
    if is_open.any():
        entry = int(np.argmax(is_open))
        raise SpecMismatch(
            f"environment {env_id}: the action Box of shape {space.shape} has no finite bounds at "
            f"entry {entry} ({low[entry]:g} to {high[entry]:g}), but policies act in [-1, 1], "
            "which is mapped to the bounds; give it finite ones, for instance in a class of your "
            "own that wraps it in gymnasium.wrappers.TransformAction with a bounded Box"
        )


def _frame_stack(env: AnyEnv) -> int:
    """The number of frames that the outermost wrapper with a stack puts together."""
    layer: AnyEnv = env
    while isinstance(layer, gym.Wrapper):
        if "frame_stack" in vars(layer):
            return int(vars(layer)["frame_stack"])
        layer = layer.env
    return 1


def _observation(env: AnyEnv) -> ObservationSpec | None:
    """The parts of which a wrapper makes rows; None where no wrapper does."""
    layer: AnyEnv = env
    while isinstance(layer, gym.Wrapper):
        parts = vars(layer).get("observation_parts")
        if isinstance(parts, ObservationSpec):
            return parts
        layer = layer.env
    return None


def _max_episode_steps(env: AnyEnv) -> int | None:
    """The limit of the outermost TimeLimit; own environments have no registered spec."""
    layer: AnyEnv = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, gym.wrappers.TimeLimit):
            return int(layer._max_episode_steps)
        layer = layer.env
    return None if env.spec is None else env.spec.max_episode_steps

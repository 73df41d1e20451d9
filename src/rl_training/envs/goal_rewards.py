"""Which part of an observation is a goal, and what a task pays for having reached another one.

Built-in tasks have a rule that is written for tensors.  Of all others the environment itself is
asked, on the host: `compute_reward`, and `compute_terminated` where it has one, take a batch of
goals if they can, and are called pair by pair if not.

Shapes: R pairs of goals, G entries of a goal in a row, S seeds, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl_training.envs.factory import guarded, make_env
from rl_training.envs.options import learning_reward, with_task_reward
from rl_training.envs.spec import AnyEnv, Array, EnvSpec
from rl_training.envs.tasks.goals import POINT_REACH, GoalRule, known_rule
from rl_training.envs.wrappers import RewardMap
from rl_training.errors import ConfigError, EnvError, described
from rl_training.observations import FLOAT_BYTES, LeafSpec

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
TRIAL_STEPS = 12
"""Steps of the trial in which a task must pay what `compute_reward` says."""
Pairs: TypeAlias = tuple[Tensor, Tensor | None]
"""Rewards, and where the goal ends the episode; None where the ends are as they were recorded."""


class Payer(Protocol):
    """Says what is paid where goals `[..., G]` are achieved and desired."""

    def __call__(self, achieved: Tensor, desired: Tensor) -> Pairs:
        """Return float32 rewards `[...]` and terminations `[...]`."""
        ...


@dataclass(frozen=True)
class GoalColumns:
    """Where goals are in the rows of observations."""

    achieved: slice
    desired: slice
    leaf: LeafSpec
    """Kind and shape of a goal."""
    in_bytes: bool
    """Whether these rows are bytes that hold the goals as floats."""

    @classmethod
    def of(cls, spec: EnvSpec) -> GoalColumns:
        """Find the goals of a task.

        Raises:
            ConfigError: It has none, or they cannot be exchanged.
        """
        parts = spec.observation
        leaves = {} if parts is None else {leaf.name: leaf for leaf in parts.leaves}
        goals = [leaves.get(name) for name in (ACHIEVED, DESIRED)]
        first, second = goals
        if parts is None or first is None or second is None:
            seen = f"a single array {list(spec.obs_shape)}" if parts is None else parts.described()
            raise ConfigError(
                f"algo_kwargs.hindsight needs observations with the parts {ACHIEVED} and "
                f"{DESIRED}, but those of {spec.env_id} are {seen}; set it to null, or take such a "
                f"task, for instance {POINT_REACH}"
            )
        if not _alike(first, second) or first.kind not in ("numbers", "flags"):
            raise ConfigError(
                f"algo_kwargs.hindsight needs an {ACHIEVED} and a {DESIRED} of one shape and type, "
                f"Box or MultiBinary, but those of {spec.env_id} are {_told(first)} and "
                f"{_told(second)}; give the task such goals, or set it to null"
            )
        achieved, desired = (
            parts.columns(name, in_bytes=parts.in_bytes) for name in (ACHIEVED, DESIRED)
        )
        return cls(achieved, desired, first, parts.in_bytes and first.is_wide)

    @property
    def size(self) -> int:
        """Entries of a goal in a row."""
        return int(self.achieved.stop - self.achieved.start)

    def numbers(self, goals: Tensor) -> Tensor:
        """Return goals as they are in rows `[..., size]` as float32 `[..., G]`."""
        if not self.in_bytes:
            return goals.to(torch.float32)
        assert self.size % FLOAT_BYTES == 0
        return goals.contiguous().view(torch.float32)

    def as_task(self, goals: Array) -> Array:
        """Return goals `[R, G]` as the task has them, `[R, *shape]`."""
        return goals.reshape(len(goals), *self.leaf.shape).astype(self.leaf.dtype)


def _alike(left: LeafSpec, right: LeafSpec) -> bool:
    return (left.kind, left.shape, left.dtype) == (right.kind, right.shape, right.dtype)


def _told(leaf: LeafSpec) -> str:
    return f"{leaf.kind} {list(leaf.shape)} of {leaf.dtype}"


@dataclass(frozen=True)
class RulePayer:
    """Pays by a rule that is written for tensors."""

    rule: GoalRule

    def __call__(self, achieved: Tensor, desired: Tensor) -> Pairs:
        """Return rewards and terminations, both `[...]`."""
        ends = self.rule.reached(achieved, desired) if self.rule.terminates else None
        return self.rule.reward(achieved, desired), ends


class GoalMethod:
    """A method of an environment that takes an achieved goal, a desired one and an info.

    It is called with batches of goals where it can take them, and with an empty info always.
    """

    def __init__(self, env: AnyEnv, env_id: str, name: str) -> None:
        self._call, self._env_id, self.name = env.get_wrapper_attr(name), env_id, name
        self._takes_batches = False

    def one(self, achieved: Array, desired: Array) -> float:
        """Return what it says of one pair of goals, as a number."""
        try:
            value = float(self._call(achieved, desired, {}))
            if math.isfinite(value):
                return value
            problem = f"must be finite, got {value}"
        except (Exception, SystemExit) as error:
            problem = f"raised {described(error)}"
        raise EnvError(
            f"environment {self._env_id}: {self.name}({achieved}, {desired}, {{}}) {problem}"
        )

    def __call__(self, achieved: Array, desired: Array) -> Array:
        """Return what it says of goals `[R, *shape]`, as numbers `[R]`."""
        if not self._takes_batches:
            return self._one_by_one(achieved, desired)
        what = f"{self.name} of {len(achieved)} goals"
        values: Array = guarded(self._env_id, what, lambda: self._at_once(achieved, desired))
        if values.shape != (len(achieved),) or not np.isfinite(values).all():
            raise EnvError(
                f"environment {self._env_id}: {what} must be as many finite numbers, got {values}"
            )
        return values

    def _one_by_one(self, achieved: Array, desired: Array) -> Array:
        return np.array([self.one(*pair) for pair in zip(achieved, desired, strict=True)])

    def _at_once(self, achieved: Array, desired: Array) -> Array:
        return np.asarray(self._call(achieved, desired, {}), np.float64)

    def try_batches(self, achieved: Array, desired: Array) -> None:
        """See whether it says the same of a batch as of its pairs."""
        expected = self._one_by_one(achieved, desired)
        try:
            values = self._at_once(achieved, desired)
        except Exception:  # whatever it raises: it was not written for batches
            return
        self._takes_batches = values.shape == expected.shape and np.allclose(
            values, expected, rtol=1e-5, atol=1e-5
        )


class TaskPayer:
    """Asks an environment, on the host."""

    def __init__(self, spec: EnvSpec, env_kwargs: Mapping[str, Any], columns: GoalColumns) -> None:
        """Remember the task; `try_task` makes it."""
        self._spec, self._env_kwargs, self._columns = spec, dict(env_kwargs), columns
        self.reward: GoalMethod | None = None
        self.ends: GoalMethod | None = None

    def __call__(self, achieved: Tensor, desired: Tensor) -> Pairs:
        """Return rewards and terminations, both `[...]`."""
        assert self.reward is not None, "try_task comes first"
        goals = [self._columns.as_task(g.flatten(0, -2).cpu().numpy()) for g in (achieved, desired)]
        shape, device = achieved.shape[:-1], achieved.device

        def sent(values: Array, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(device, dtype).view(shape)

        ends = None if self.ends is None else sent(self.ends(*goals), torch.bool)
        return sent(self.reward(*goals), torch.float32), ends

    def try_task(self) -> None:
        """Make the environment and see that it pays what its `compute_reward` says.

        Raises:
            EnvError: It has no such method, or pays something else.
        """
        env_id = self._spec.env_id
        env = make_env(env_id, with_task_reward(self._env_kwargs))
        if not env.has_wrapper_attr("compute_reward"):
            raise EnvError(
                "algo_kwargs.hindsight pays for other goals by the method compute_reward("
                f"{ACHIEVED}, {DESIRED}, info), which environment {env_id} does not have; write "
                "it, or set hindsight to null"
            )
        self.reward = GoalMethod(env, env_id, "compute_reward")
        if env.has_wrapper_attr("compute_terminated"):
            self.ends = GoalMethod(env, env_id, "compute_terminated")
        goals = [self._tried(step) for step in self._steps(env)]
        there, wanted = (np.stack(column) for column in zip(*goals, strict=True))
        # Goals that were missed, those that were reached, and those of other steps.
        examples = np.concatenate([there] * 3), np.concatenate([wanted, there, there[::-1]])
        for method in (self.reward, self.ends):
            if method is not None:
                method.try_batches(*examples)

    def _steps(self, env: AnyEnv) -> Iterator[tuple[Array, float, bool, bool]]:
        """Take a few random steps."""
        env_id, generator = self._spec.env_id, np.random.default_rng(0)
        env.action_space.seed(0)
        row, _ = guarded(env_id, "reset", lambda: env.reset(seed=0))
        for _ in range(TRIAL_STEPS):
            masked = self._spec.mask_size > 0
            action = (
                self._spec.allowed_action(row, generator) if masked else env.action_space.sample()
            )
            step = guarded(env_id, f"step({action})", partial(env.step, action))
            row, paid, terminated, truncated, _ = step
            yield row, float(paid), bool(terminated), bool(truncated)
            if terminated or truncated:
                row, _ = guarded(env_id, "reset", env.reset)

    def _tried(self, step: tuple[Array, float, bool, bool]) -> tuple[Array, Array]:
        """Check one step; returns its goals, achieved and desired."""
        assert self.reward is not None
        row, paid, terminated, _ = step
        achieved, desired = (self._of_row(row, name) for name in (ACHIEVED, DESIRED))
        self._require("reward", paid, self.reward, achieved, desired)
        if self.ends is not None:
            self._require("terminated", terminated, self.ends, achieved, desired)
        return achieved, desired

    def _of_row(self, row: Array, name: str) -> Array:
        parts = self._spec.observation
        assert parts is not None
        goals = np.ascontiguousarray(row[None, parts.columns(name, in_bytes=parts.in_bytes)])
        if self._columns.in_bytes:
            goals = goals.view(np.float32)
        goal: Array = self._columns.as_task(goals)[0]
        return goal

    def _require(
        self, what: str, given: float, method: GoalMethod, achieved: Array, desired: Array
    ) -> None:
        computed = method.one(achieved, desired)
        if abs(given - computed) > 1e-3 * max(1.0, abs(given)):
            raise EnvError(
                f"environment {self._spec.env_id}: a step gave {what} {float(given):g}, but "
                f"{method.name} says {computed:g} for its goals and an empty info; make the two "
                "agree, or set algo_kwargs.hindsight to null"
            )


@dataclass(frozen=True)
class GoalRewards:
    """Where a task's goals are, and what is learned from where other goals are desired."""

    columns: GoalColumns
    payer: Payer
    transform: RewardMap | None
    """What the wrappers make of the task's own reward."""

    @property
    def achieved(self) -> slice:
        """Columns of what has been achieved."""
        return self.columns.achieved

    @property
    def desired(self) -> slice:
        """Columns of what is wanted."""
        return self.columns.desired

    @property
    def on_host(self) -> bool:
        """Whether the environment is asked."""
        return isinstance(self.payer, TaskPayer)

    def __call__(self, achieved: Tensor, desired: Tensor) -> Pairs:
        """Return rewards and terminations `[...]` for goals as they are in rows, `[..., size]`."""
        reward, ends = self.payer(self.columns.numbers(achieved), self.columns.numbers(desired))
        if self.transform is not None:
            reward = _transformed(self.transform, reward)
        return reward, ends


def _transformed(transform: RewardMap, reward: Tensor) -> Tensor:
    """Do to a tensor what a map of rewards does to an array."""
    signed = reward.sign() if transform.to_sign else reward
    return (signed.double() * transform.scale).clamp(transform.low, transform.high).float()


def goal_rewards(
    spec: EnvSpec, env_kwargs: Mapping[str, Any], *, try_task: bool = True
) -> GoalRewards:
    """Return what a task pays for other goals.

    Args:
        spec: The task.
        env_kwargs: How its environment is made.
        try_task: Make one and try it, where there is no rule; without that, nothing can be paid.

    Raises:
        ConfigError: The task has no goals.
        EnvError: Its environment cannot say what it pays.
    """
    columns = GoalColumns.of(spec)
    rule = known_rule(spec.env_id, env_kwargs)
    if rule is not None:
        payer: Payer = RulePayer(rule)
    else:
        payer = asked = TaskPayer(spec, env_kwargs, columns)
        if try_task:
            asked.try_task()
    return GoalRewards(columns, payer, learning_reward(spec.env_id, env_kwargs))

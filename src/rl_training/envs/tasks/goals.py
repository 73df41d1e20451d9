"""Tasks whose reward depends on a goal that each episode draws, without an extra.

Observations are dictionaries as Gymnasium-Robotics has them: `observation`, `achieved_goal` and
`desired_goal`.  `compute_reward` takes any leading axes.  What counts as reaching a goal is written
once, for arrays and for tensors, so that a replay can pay for other goals inside a compiled update.

Shapes: G entries of a goal; any leading axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.options import wrapper_options
from rl_training.envs.spec import Array
from rl_training.errors import ConfigError

BIT_FLIP, POINT_REACH = "rl_training/BitFlip-v0", "rl_training/PointReach-v0"
Observation: TypeAlias = dict[str, Array]
BITS = 20
THRESHOLD = 0.05
EPISODE = 50
"""Steps of an episode of PointReach."""
TIME_STEP = 0.1


@dataclass(frozen=True)
class GoalRule:
    """The reward -1 until a goal is reached, and 0 where it is."""

    reached: Callable[[Any, Any], Any]
    """Of goals `[..., G]`, achieved and desired; arrays or tensors."""
    terminates: bool
    """Whether reaching the goal ends the episode."""

    def reward(self, achieved: Any, desired: Any) -> Any:
        """Return the reward of each pair of goals."""
        return self.reached(achieved, desired) * 1.0 - 1.0


def same(achieved: Any, desired: Any) -> Any:
    """Tell whether all entries agree."""
    return (achieved == desired).all(-1)


def within(threshold: float) -> Callable[[Any, Any], Any]:
    """Return a function that tells whether two places are at most so far from each other."""

    def near(achieved: Any, desired: Any) -> Any:
        way = achieved - desired
        return (way * way).sum(-1) <= threshold**2

    return near


def known_rule(env_id: str, env_kwargs: Mapping[str, Any]) -> GoalRule | None:
    """Return the rule of a built-in task; None for all others, and for one that is wrapped."""
    kwargs = dict(env_kwargs)
    if wrapper_options(env_id, kwargs.pop("wrappers", None)).chain:
        return None
    if env_id == BIT_FLIP:
        return GoalRule(same, terminates=True)
    if env_id == POINT_REACH:
        return GoalRule(within(float(kwargs.get("threshold", THRESHOLD))), terminates=False)
    return None


def _with_goals(seen: spaces.Space[Any], goal: spaces.Space[Any]) -> spaces.Space[Observation]:
    """Return the space of what is seen beside two goals."""
    space: spaces.Space[Any] = spaces.Dict(
        {"observation": seen, "achieved_goal": goal, "desired_goal": goal}
    )
    return space


class _GoalTask(gym.Env[Observation, Any]):
    """What both tasks have in common: the dictionary and the reward."""

    rule: GoalRule
    goal: Array

    def _seen(self) -> Array:
        """What is seen beside the goal."""
        raise NotImplementedError

    def _achieved(self) -> Array:
        raise NotImplementedError

    def _obs(self) -> Observation:
        return {
            "observation": self._seen(),
            "achieved_goal": self._achieved(),
            "desired_goal": self.goal.copy(),
        }

    def _outcome(self) -> tuple[float, bool]:
        """Return the reward of the current state, and whether the goal is reached."""
        reward = float(self.compute_reward(self._achieved(), self.goal, {}))
        return reward, reward == 0.0

    def compute_reward(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Any:  # noqa: ARG002
        """Return 0 where the goal is reached, and -1 elsewhere, for any leading axes."""
        return self.rule.reward(achieved_goal, desired_goal)


class BitFlip(_GoalTask):
    """Turn one row of bits into another by flipping one at a time (Andrychowicz et al., Sec. 3.1).

    Every episode draws the first row and the goal uniformly.  It ends at the goal, or is cut off
    after as many steps as there are bits, which is always enough.
    """

    rule = GoalRule(same, terminates=True)

    def __init__(self, bits: int = BITS) -> None:
        """Set the task up.

        Args:
            bits: Length of the row.
        """
        if not 1 <= bits <= 1_000:
            raise ConfigError(f"env_kwargs.bits must be from 1 to 1000, got {bits}")
        self.bits = bits
        row = spaces.MultiBinary(bits)
        self.observation_space = _with_goals(row, row)
        self.action_space = spaces.Discrete(bits)
        self.state = self.goal = np.zeros(bits, np.int8)
        self.num_steps = 0

    def _seen(self) -> Array:
        return self.state.copy()

    def _achieved(self) -> Array:
        return self.state.copy()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a row and a goal that differ."""
        super().reset(seed=seed, options=options)
        self.state, self.goal = self._drawn(), self._drawn()
        while same(self.state, self.goal):
            self.goal = self._drawn()
        self.num_steps = 0
        return self._obs(), {}

    def _drawn(self) -> Array:
        return self.np_random.integers(0, 2, self.bits, np.int8)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Flip a bit."""
        self.state = self.state.copy()
        self.state[int(action)] ^= 1
        self.num_steps += 1
        reward, reached = self._outcome()
        over = self.num_steps >= self.bits
        return self._obs(), reward, reached, over, {"is_success": reached}

    def compute_terminated(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Any:  # noqa: ARG002
        """Tell where the goal is reached, for any leading axes."""
        return self.rule.reached(achieved_goal, desired_goal)

    def get_state(self) -> dict[str, Any]:
        """Return the row, the goal and the time."""
        return {"state": self.state.copy(), "goal": self.goal.copy(), "num_steps": self.num_steps}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.state, self.goal = (np.array(state[name], np.int8) for name in ("state", "goal"))
        self.num_steps = int(state["num_steps"])


class PointReach(_GoalTask):
    """Push a point on a table to a goal, and hold it there.

    The action is the acceleration, two numbers in [-1, 1]; the table is [-1, 1] x [-1, 1], and the
    point stops at its edges.  Place and goal are drawn uniformly, the point begins at rest.  An
    episode has 50 steps and no other end; it is a success if the point is at the goal at last.
    """

    def __init__(self, threshold: float = THRESHOLD) -> None:
        """Set the task up.

        Args:
            threshold: Distance up to which the goal counts as reached.
        """
        if not threshold > 0:
            raise ConfigError(f"env_kwargs.threshold must be > 0, got {threshold}")
        self.rule = GoalRule(within(float(threshold)), terminates=False)
        place = spaces.Box(-1.0, 1.0, (2,), np.float32)
        seen = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.observation_space = _with_goals(seen, place)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.place, self.velocity = np.zeros(2), np.zeros(2)
        self.goal = np.zeros(2, np.float32)

    def _seen(self) -> Array:
        return np.concatenate([self.place, self.velocity]).astype(np.float32)

    def _achieved(self) -> Array:
        return self.place.astype(np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a place and a goal."""
        super().reset(seed=seed, options=options)
        self.place, self.velocity = self.np_random.uniform(-1.0, 1.0, 2), np.zeros(2)
        self.goal = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        return self._obs(), {}

    def step(self, action: Array) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Push for a tenth of a second."""
        push = np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        self.velocity = self.velocity + TIME_STEP * push
        place = self.place + TIME_STEP * self.velocity
        self.place = np.clip(place, -1.0, 1.0)
        self.velocity = np.where(place == self.place, self.velocity, 0.0)
        reward, reached = self._outcome()
        return self._obs(), reward, False, False, {"is_success": reached}

    def get_state(self) -> dict[str, Any]:
        """Return where the point is, how fast, and the goal."""
        return {name: getattr(self, name).copy() for name in ("place", "velocity", "goal")}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.place, self.velocity = (np.array(state[name]) for name in ("place", "velocity"))
        self.goal = np.array(state["goal"], np.float32)


def register_goal_tasks() -> None:
    """Register the ids, once."""
    if BIT_FLIP not in gym.registry:  # it counts its steps itself: their number is that of the bits
        gym.register(BIT_FLIP, entry_point=f"{__name__}:BitFlip")
    if POINT_REACH not in gym.registry:
        gym.register(POINT_REACH, f"{__name__}:PointReach", max_episode_steps=EPISODE)

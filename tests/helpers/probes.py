"""Probe environments: so small that the value function and the best action are known by hand.

Each checks one thing a learner must get right, and fails alone when that thing is wrong.  With
`continuous` the action is one number in [-1, 1], otherwise one of two.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

Obs = npt.NDArray[np.float32]
StepResult = tuple[Obs, float, bool, bool, dict[str, Any]]


class Probe(gym.Env[Any, Any]):
    """An episode of one step on the observation 0; subclasses say what differs."""

    def __init__(self, continuous: bool = False) -> None:
        self.continuous = continuous
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        if continuous:
            self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.state = 0.0

    def start(self) -> float:
        """Return the state an episode begins in."""
        return 0.0

    def observe(self) -> Obs:
        """Return what is seen of the state."""
        return np.array([self.state], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = self.start()
        return self.observe(), {}

    def move(self, action: Any) -> tuple[float, bool]:
        """Change the state; returns the reward and whether a terminal state was reached."""
        raise NotImplementedError

    def step(self, action: Any) -> StepResult:
        reward, terminated = self.move(action)
        return self.observe(), reward, terminated, False, {}


class ConstantReward(Probe):
    """Reward 1 for anything: the value is 1.  Checks the value's loss."""

    def move(self, action: Any) -> tuple[float, bool]:
        return 1.0, True


class ObservationReward(Probe):
    """The reward is the observation, -1 or 1: so is the value.  Checks that observations get in."""

    def start(self) -> float:
        return float(self.np_random.choice((-1.0, 1.0)))

    def move(self, action: Any) -> tuple[float, bool]:
        return self.state, True


class DelayedReward(Probe):
    """Observations 0 and 1, reward 1 at the second: values gamma and 1.  Checks discounting."""

    def move(self, action: Any) -> tuple[float, bool]:
        at_end = self.state == 1.0
        self.state = 1.0
        return float(at_end), at_end


class ActionReward(Probe):
    """Reward 1 for the best action, which is 1, or 0.5 if continuous.  Checks the policy."""

    def best_action(self) -> float:
        """Return the continuous action with the largest reward."""
        return 0.5

    def move(self, action: Any) -> tuple[float, bool]:
        best = self.best_action()
        if self.continuous:
            return 1.0 - float(action[0] - best) ** 2, True
        return (1.0 if (action == 1) == (best > 0) else -1.0), True


class ActionObservationReward(ActionReward):
    """As above, but the best action depends on the observation, -1 or 1.  Checks both together."""

    def start(self) -> float:
        return float(self.np_random.choice((-1.0, 1.0)))

    def best_action(self) -> float:
        return 0.5 * self.state


class Clock(Probe):
    """Reward 1 at each of four hours, shown one-hot, round and round.

    For ever, its value is 1 / (1 - gamma); a time limit must not change that.  With `terminates`
    the fourth step is the end, and the value is the discounted number of steps left.
    """

    HOURS = 4

    def __init__(self, continuous: bool = False, terminates: bool = False) -> None:
        super().__init__(continuous)
        self.terminates = terminates
        self.observation_space = spaces.Box(0.0, 1.0, (self.HOURS,), np.float32)

    def observe(self) -> Obs:
        obs = np.zeros(self.HOURS, np.float32)
        obs[int(self.state) % self.HOURS] = 1.0
        return obs

    def move(self, action: Any) -> tuple[float, bool]:
        self.state += 1.0
        return 1.0, self.terminates and self.state == self.HOURS


class TwoRooms(Probe):
    """Room 0 leads to room 1 without reward, room 1 to itself with reward 1; starts in either.

    Cut by a time limit of one step, the value of room 0 is right only when it bootstraps from the
    room that was reached, and not from the first observation of the next episode.
    """

    def start(self) -> float:
        return float(self.np_random.integers(2))

    def move(self, action: Any) -> tuple[float, bool]:
        reward = self.state
        self.state = 1.0
        return reward, False

"""Tiny environments whose every number is known, and environments that break the contract."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from rl_training.envs.tasks.goals import BitFlip, PointReach

Obs = npt.NDArray[np.float32]
StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


class CounterEnv(gym.Env[Any, Any]):
    """Observation (episode, step); every episode has `length` steps; the reward is the step."""

    def __init__(
        self, length: int = 3, terminated: bool = True, truncated: bool = False, start: int = 0
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2, start=start)
        self.length = length
        self.flags = (terminated, truncated)
        self.episode = 0
        self.steps = 0
        self.actions_seen: list[int] = []

    def _obs(self) -> Obs:
        return np.array([self.episode, self.steps], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> StepResult:
        assert self.steps < self.length, "stepped past the end"
        self.actions_seen.append(int(action))
        self.steps += 1
        ended = self.steps == self.length
        terminated, truncated = (flag and ended for flag in self.flags)
        return self._obs(), float(self.steps), terminated, truncated, {"object": object()}


class DrivenCounterEnv(CounterEnv):
    """The same, with a continuous action."""

    def __init__(
        self, length: int = 3, terminated: bool = True, truncated: bool = False, start: int = 0
    ) -> None:
        super().__init__(length, terminated, truncated, start)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def step(self, action: Any) -> StepResult:
        return super().step(0)


class GuessingEnv(gym.Env[Any, Any]):
    """Episodes of `length` steps; by its seed, an episode succeeds or not, as its last info says.

    Args:
        length: Steps of an episode.
        key: Name under which infos tell; `none` never do.
        only_when_true: Say nothing about an episode that fails.
    """

    def __init__(self, length: int = 3, key: str = "success", only_when_true: bool = False) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.length, self.key, self.only_when_true = length, key, only_when_true
        self.lucky, self.steps = 0.0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.lucky, self.steps = float(self.np_random.integers(2)), 0
        return np.array([self.lucky], np.float32), {}

    def step(self, action: Any) -> StepResult:
        self.steps += 1
        ended = self.steps == self.length
        # Before its end, every episode says the opposite.
        success = self.lucky if ended else 1.0 - self.lucky
        silent = self.key == "none" or (self.only_when_true and not success)
        info = {} if silent else {self.key: np.bool_(success)}
        return np.array([self.lucky], np.float32), self.lucky, False, ended, info


class NoiseEnv(gym.Env[Any, Any]):
    """Deterministic under its own generator, with a state no adapter knows: the replay family."""

    def __init__(self, length: int = 40) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Box(
            np.array([-2.0, 0.0]), np.array([2.0, 5.0]), dtype=np.float64
        )
        self.length = length
        self.hidden = _Hidden()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.hidden = _Hidden()
        self.hidden.value = self.np_random.normal(size=3)
        return self.hidden.value.copy(), {}

    def step(self, action: Any) -> StepResult:
        hidden = self.hidden
        hidden.value = 0.9 * hidden.value + self.np_random.normal(size=3) + np.sum(action)
        hidden.steps += 1
        reward = float(np.sin(hidden.value[0]))
        return hidden.value.copy(), reward, hidden.steps >= self.length, False, {}


class _Hidden:
    """An object without a plain form."""

    def __init__(self) -> None:
        self.value = np.zeros(3)
        self.steps = 0


class OwnStateEnv(NoiseEnv):
    """The same, with the state protocol."""

    def get_state(self) -> dict[str, Any]:
        return {"value": self.hidden.value, "steps": self.hidden.steps, "nested": {"a": [1, None]}}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["nested"] == {"a": [1, None]}
        self.hidden.value = state["value"]
        self.hidden.steps = state["steps"]


class BadOwnStateEnv(NoiseEnv):
    """Its state is not plain data."""

    def get_state(self) -> dict[str, Any]:
        return {"hidden": self.hidden}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


_CALLS = itertools.count()


class UnseededEnv(NoiseEnv):
    """Depends on something that no seed governs."""

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs + next(_CALLS), reward, terminated, truncated, info


class ReusedBufferEnv(CounterEnv):
    """Hands out the same array every time."""

    def __init__(self) -> None:
        super().__init__()
        self._shared = np.zeros(2, dtype=np.float32)

    def _obs(self) -> Obs:
        self._shared[:] = (self.episode, self.steps)
        return self._shared


class ImageEnv(CounterEnv):
    """8 x 8 images filled with 10 * step."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (8, 8, 1), np.uint8)

    def _obs(self) -> Any:
        return np.full((8, 8, 1), 10 * self.steps, dtype=np.uint8)


class DictEnv(CounterEnv):
    """A Dict of two Boxes."""

    def __init__(self) -> None:
        super().__init__()
        box = spaces.Box(-1, 99, (2,), np.float32)
        self.observation_space = spaces.Dict({"a": box, "b": box})

    def _obs(self) -> Any:
        return {"a": super()._obs(), "b": super()._obs() + 1}


class SpacesEnv(CounterEnv):
    """Any spaces at all."""

    def __init__(
        self, observation: spaces.Space[Any] | None = None, action: spaces.Space[Any] | None = None
    ) -> None:
        super().__init__()
        if observation is not None:
            self.observation_space = observation
        if action is not None:
            self.action_space = action


_MADE = itertools.count()


class GrowingEnv(CounterEnv):
    """Has more actions every time it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(2 + next(_MADE))


class BrokenEnv(CounterEnv):
    """Breaks the contract in the way that `fault` names, from the step `at` on."""

    def __init__(self, fault: str, at: int = 0) -> None:
        super().__init__(length=1000)
        self.fault = fault
        self.at = at
        empty = spaces.Box(-1, 1, (0,), np.float32)
        if fault == "no_number_in_obs":
            self.observation_space = empty
        if fault == "no_number_in_action":
            self.action_space = empty
        if fault == "empty_dict":
            self.observation_space = spaces.Dict({})
        if fault == "no_space":
            del self.observation_space

    def close(self) -> None:
        if self.fault == "close_raises":
            raise RuntimeError("cannot close")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        result: Any = super().reset(seed=seed, options=options)
        if self.fault == "reset_gives_obs_only":
            return result[0]  # type: ignore[no-any-return]  # the fault
        if self.fault == "reset_raises":
            raise RuntimeError("no reset today")
        return result  # type: ignore[no-any-return]

    def step(self, action: Any) -> StepResult:
        result = super().step(action)
        if self.steps < self.at:
            return result
        obs, reward, terminated, truncated, info = result
        broken: dict[str, Any] = {
            "four_values": (obs, reward, terminated, info),
            "wrong_dtype": (obs.astype(np.float64), reward, terminated, truncated, info),
            "wrong_shape": (obs[:1], reward, terminated, truncated, info),
            "nan_obs": (obs * np.float32(np.nan), reward, terminated, truncated, info),
            "nan_reward": (obs, float("nan"), terminated, truncated, info),
            "huge_reward": (obs, 1e39, terminated, truncated, info),
            "reward_is_none": (obs, None, terminated, truncated, info),
            "flag_is_int": (obs, reward, 0, truncated, info),
            "flag_is_text": (obs, reward, terminated, "False", info),
            "flag_is_none": (obs, reward, None, truncated, info),
            "flags_are_two": (obs, reward, np.array([False, False]), truncated, info),
            "flag_is_nan": (obs, reward, float("nan"), truncated, info),
        }
        if self.fault in broken:
            return broken[self.fault]  # type: ignore[no-any-return]
        if self.fault == "raises":
            raise RuntimeError("100% broken")
        if self.fault == "hangs":
            time.sleep(600)
        if self.fault == "dies":
            os._exit(7)
        return result


def make_counter(length: int = 3) -> gym.Env[Any, Any]:
    """A function that returns an environment."""
    return CounterEnv(length)


def make_nothing() -> None:
    """A function that does not."""


if "TestCounter-v0" not in gym.registry:
    gym.register("TestCounter-v0", entry_point=f"{__name__}:CounterEnv", max_episode_steps=2)


class GridActionEnv(gym.Env[Any, Any]):
    """Actions of two axes, checked; the reward counts the entries within 1 of their target."""

    TARGET = np.arange(6, dtype=np.float32).reshape(2, 3)

    def __init__(self, length: int = 10) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Box(
            self.TARGET - 2, self.TARGET + np.array([4.0, 8.0, 3.0], np.float32), dtype=np.float32
        )
        self.length, self.steps = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> StepResult:
        assert self.action_space.contains(action), action
        self.steps += 1
        obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        reward = float((np.abs(action - self.TARGET) < 1).sum())
        return obs, reward, False, self.steps == self.length, {}


class OpenActionEnv(GridActionEnv):
    """The same with an action box that is open above."""

    def __init__(self, length: int = 10) -> None:
        super().__init__(length)
        self.action_space = spaces.Box(-1.0, np.inf, (2, 3), np.float32)


class SteeredImageEnv(gym.Env[Any, Any]):
    """A bright column that a continuous action steers towards the middle; images, [1, 8, 8]."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (1, 8, 8), np.uint8)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.place, self.count = 0.0, 0

    def _image(self) -> Any:
        image = np.zeros((1, 8, 8), np.uint8)
        image[0, :, int(np.clip(self.place + 4, 0, 7))] = 255
        return image

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.count = float(self.np_random.uniform(-4, 4)), 0
        return self._image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = float(np.clip(self.place + float(action[0]), -4, 3.9))
        self.count += 1
        return self._image(), -abs(self.place), False, self.count >= 12, {}


class SingledOutEnv(BrokenEnv):
    """Breaks the contract only where it is seeded with `chosen`, so in one of many."""

    def __init__(self, fault: str, at: int = 0, chosen: int = 0) -> None:
        super().__init__("", at)
        self._fault, self._chosen = fault, chosen

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.fault = self._fault if seed == self._chosen else ""
        return super().reset(seed=seed, options=options)


class SlowEnv(CounterEnv):
    """Takes `seconds` for each step."""

    def __init__(self, seconds: float) -> None:
        super().__init__(length=1000)
        self.seconds = seconds

    def step(self, action: Any) -> StepResult:
        time.sleep(self.seconds)
        return super().step(action)


class HomeEnv(CounterEnv):
    """Works where it was tried, and not in another process."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        if multiprocessing.parent_process() is None:
            return
        if fault == "raises":
            raise RuntimeError("not away from home")
        if fault == "exits":
            raise SystemExit(3)
        if fault == "dies":
            os._exit(7)
        if fault == "hangs":
            time.sleep(600)
        self.observation_space = spaces.Box(-1, 1, (next(_MADE) + 3,), np.float32)


class SecretiveEnv(OwnStateEnv):
    """Fails to give its state, with an error that cannot be sent to another process."""

    def get_state(self) -> dict[str, Any]:
        class OddError(Exception):
            """Known here alone."""

        raise OddError("no state today")


class KeepsActionsEnv(DrivenCounterEnv):
    """Observes the sum of the actions that it has kept."""

    def __init__(self) -> None:
        super().__init__(length=5)
        self.kept: list[Any] = []

    def _obs(self) -> Obs:
        return np.array([self.episode, np.sum(self.kept)], dtype=np.float32)

    def step(self, action: Any) -> StepResult:
        self.kept.append(action)
        return super().step(action)


class AskedReach(PointReach):
    """PointReach under a name whose rule nobody knows: its compute_reward is asked."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.left = 20
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, _, info = super().step(action)
        self.left -= 1
        return obs, reward, terminated, self.left <= 0, info

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"left": self.left}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.left = state["left"]


class AskedFlip(BitFlip):
    """BitFlip under another name, whose methods take one pair of goals each and give numbers."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> float:
        assert np.shape(achieved_goal) == np.shape(desired_goal) == (self.bits,)
        return 0.0 if list(achieved_goal) == list(desired_goal) else -1.0

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return self.compute_reward(achieved_goal, desired_goal, info) == 0.0


class DearFlip(AskedFlip):
    """Each step costs more than compute_reward says."""

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, over, info = super().step(action)
        return obs, reward - 0.5, terminated, over, info


class EndlessFlip(AskedFlip):
    """It goes on where compute_terminated says that it ends: its goal is where it begins."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.goal = self.state.copy()
        self.goal[0] ^= 1
        return self._obs(), {}

    def step(self, action: Any) -> StepResult:
        obs, reward, _, over, info = super().step(action)
        return obs, reward, False, over, info


class LogFlip(AskedFlip):
    """It pays what is no number for a goal that is reached."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> float:
        missed = super().compute_reward(achieved_goal, desired_goal, info)
        return missed if missed else float("nan")


class UnequalGoals(CounterEnv):
    """The goals are of different shapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space = spaces.Dict(
            {
                "observation": self.observation_space,
                "achieved_goal": spaces.Box(-1, 1, (2,)),
                "desired_goal": spaces.Box(-1, 1, (3,)),
            }
        )

    def _obs(self) -> Any:
        goals = {"achieved_goal": np.zeros(2, np.float32), "desired_goal": np.zeros(3, np.float32)}
        return {"observation": super()._obs(), **goals}


class WordlessGoals(CounterEnv):
    """It has goals, and no compute_reward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        goal = spaces.Box(-1, 1, (2,))
        self.observation_space = spaces.Dict(
            {
                "observation": self.observation_space,
                "achieved_goal": goal,
                "desired_goal": goal,
            }
        )

    def _obs(self) -> Any:
        goal = np.zeros(2, np.float32)
        return {"observation": super()._obs(), "achieved_goal": goal, "desired_goal": goal}


class SeenGoals(WordlessGoals):
    """Its observation is an image, so that rows are bytes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        goal = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        image = spaces.Box(0, 255, (6, 5, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {"observation": image, "achieved_goal": goal, "desired_goal": goal}
        )

    def _obs(self) -> Any:
        goals = {"achieved_goal": [0.25, -2.0], "desired_goal": [1e6, 1 / 3]}
        image = np.full((6, 5, 3), 7, np.uint8)
        return {"observation": image} | {name: np.array(goal) for name, goal in goals.items()}

    def step(self, action: Any) -> StepResult:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 0.0, terminated, truncated, info

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return np.zeros(np.shape(achieved_goal)[:-1])


class WordsEnv(SpacesEnv):
    """Observes a text beside its numbers."""

    def __init__(self) -> None:
        super().__init__(spaces.Dict(numbers=spaces.Box(-1, 1, (2,)), words=spaces.Text(5)))


class MaskedEnv(SpacesEnv):
    """Three actions; its method `action_masks` gives `mask`."""

    def __init__(self, mask: Any = (1, 1, 0)) -> None:
        super().__init__(None, spaces.Discrete(3))
        self.mask = mask

    def action_masks(self) -> Any:
        return np.array(self.mask)

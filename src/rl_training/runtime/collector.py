"""Steps the environments with a learner's actions; returns and statistics of what it sees.

Shapes: S seeds, n environments per seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.data.replay.storage import StepArrays
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.step import Step
from rl_training.errors import CheckpointError
from rl_training.runtime.checkpoints.saver import Part
from rl_training.state import StateDict, require_same_keys
from rl_training.transfer import HostCopy

WINDOW = 100
"""Episodes over which training returns are averaged."""


class CollectedStep(NamedTuple):
    """One step of all environments: what was seen, done, and what came of it."""

    obs: NDArray[Any]
    action: NDArray[Any]
    step: Step

    @property
    def transition(self) -> StepArrays:
        """What a replay keeps of it."""
        step = self.step
        ends = (step.terminated, step.truncated)
        return StepArrays(self.obs, self.action, step.reward, step.final_obs, *ends)


class Collector:
    """The environments, their current observations, and running returns."""

    def __init__(self, envs: SeedVectorEnv, device: torch.device) -> None:
        self.envs, self.device = envs, device
        shape = (envs.num_seeds, envs.num_envs)
        self.obs: NDArray[Any] = np.zeros((*shape, *envs.spec.obs_shape), np.float32)
        self.episode_return = np.zeros(shape, np.float64)
        self._clock = 0
        self._began = np.zeros(shape, np.int64)  # the clock at the start of the episode
        self.recent = np.zeros((envs.num_seeds, WINDOW, 2), np.float64)
        self.episodes = np.zeros(envs.num_seeds, np.int64)

    def start(self) -> None:
        """Reset all environments."""
        self.obs = self.envs.reset()

    def step(self, action: NDArray[Any]) -> CollectedStep:
        """Act in every environment with learner-unit actions `[S, n, ...]`."""
        before = self.obs
        step = self.envs.step(action)
        self.obs = step.obs
        self._clock += 1
        # Of one type and not in place: adding mixed types, or one number to itself, takes longer.
        self.episode_return = self.episode_return + step.task_reward.astype(np.float64)
        if step.final_obs is not step.obs:
            self._close_episodes(step.terminated | step.truncated)
        return CollectedStep(before, action, step)

    def begin(self, action: NDArray[Any], index: int) -> None:
        """Begin a step of one of the environments' `parts`, actions `[S, its n, ...]`."""
        self.envs.begin(action, index)

    def end(self, index: int) -> Step:
        """Finish the step of a part; whoever steps the parts sets `obs` when all are done."""
        step, part = self.envs.end(index), self.envs.parts[index]
        self._clock += index == 0  # parts are stepped in order
        self.episode_return[:, part] += step.task_reward.astype(np.float64)
        if step.final_obs is not step.obs:
            ended = np.zeros_like(self._began, np.bool_)
            ended[:, part] = step.terminated | step.truncated
            self._close_episodes(ended)
        return step

    @property
    def episode_length(self) -> NDArray[np.int64]:
        """Steps since each episode began, `[S, n]`."""
        return self._clock - self._began

    @property
    def at_start(self) -> bool:
        """Whether any environment is at the start of an episode."""
        return bool((self._began == self._clock).any())

    def starts(self) -> Tensor:
        """Tell which environments are at the start of an episode, `[S, n]`."""
        return torch.from_numpy(self.episode_length == 0).to(self.device)

    def _close_episodes(self, ended: NDArray[np.bool_]) -> None:
        for seed, env in zip(*(axis.tolist() for axis in ended.nonzero()), strict=True):
            slot = self.episodes[seed] % WINDOW
            self.recent[seed, slot, 0] = self.episode_return[seed, env]
            self.recent[seed, slot, 1] = self._clock - self._began[seed, env]
            self.episodes[seed] += 1
            self._begin_episode(seed, env)

    def _begin_episode(self, seed: int, env: int) -> None:
        self.episode_return[seed, env] = 0.0
        self._began[seed, env] = self._clock

    def summary(self, seed: int) -> dict[str, float]:
        """Return mean return and length of the last episodes of a seed (empty before the first)."""
        count = min(int(self.episodes[seed]), WINDOW)
        if count == 0:
            return {}
        mean_return, mean_length = self.recent[seed, :count].mean(0)
        return {
            "rollout/return_mean": float(mean_return),
            "rollout/length_mean": float(mean_length),
            "rollout/episodes": float(self.episodes[seed]),
        }

    _ARRAYS = ("obs", "episode_return", "episode_length", "recent", "episodes")

    def state_dict(self) -> StateDict:
        """Return observations, running returns and a snapshot of the environments."""
        state: StateDict = {name: np.array(getattr(self, name)) for name in self._ARRAYS}
        return state | {"envs": self.envs.snapshot()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore; returns messages about environments that had to begin a new episode."""
        require_same_keys({**dict.fromkeys(self._ARRAYS), "envs": None}, state, "Collector")
        for name in ("obs", "episode_return", "recent", "episodes"):
            setattr(self, name, np.array(state[name]))
        self._began = self._clock - np.array(state["episode_length"])
        report = self.envs.restore(state["envs"])
        for flat in report.restarted:
            seed, env = divmod(flat, self.envs.num_envs)
            self.obs[seed, env] = report.obs[seed, env]
            self._begin_episode(seed, env)
        return report.messages


class ActionAhead:
    """The action of the next step, where it was chosen at the end of the step before.

    That is so where acting overlaps with the updates, and where a pass is one graph of the device.
    """

    def __init__(self, num_seeds: int, num_envs: int, action_shape: tuple[int, ...]) -> None:
        self._shape = (num_seeds, num_envs, *action_shape)
        self._action: HostCopy | None = None

    def put(self, action: HostCopy | None) -> None:
        """Keep an action for the next step, if there is one; it may still be on its way."""
        self._action = action

    def take(self) -> HostCopy | None:
        """Return it, once; None before the first."""
        action, self._action = self._action, None
        return action

    def state_dict(self) -> StateDict:
        """Return whether there is an action, and which."""
        if self._action is None:
            return {"waits": False, "action": np.zeros((self._shape[0], 0))}
        return {"waits": True, "action": np.array(self._action.array())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the action.

        Raises:
            CheckpointError: When it is not one for these environments.
        """
        require_same_keys(self.state_dict(), state, "ActionAhead")
        action = np.array(state["action"])
        if state["waits"] and action.shape != self._shape:
            raise CheckpointError(
                f"the saved action of the next step has the shape {action.shape}, but this run's "
                f"have {self._shape}; use another checkpoint"
            )
        self._action = HostCopy(torch.from_numpy(action)) if state["waits"] else None


class RunningStatistics:
    """Shows steps to a learner that keeps statistics of them.

    The learner has the statistics, so that they are saved, loaded and exported with its policy;
    here are the returns of the episodes in progress, which belong to the environments.
    """

    def __init__(self, learner: AnyLearner, num_envs: int) -> None:
        self._learner = learner
        self._returns = learner.initial_returns(num_envs)
        self.idle = self._returns is None and not learner.counts_observations
        """Whether there is nothing to show."""

    def parts(self) -> dict[str, Part]:
        """Return what a checkpoint must hold beside the learner, by name."""
        return {} if self._returns is None else {"returns": self._returns}

    def begin(self, starts: Tensor) -> None:
        """Begin the returns of episodes that are at their start `[S, n]`, once a run is restored.

        An environment whose state could not be kept has begun a new episode by then.
        """
        if self._returns is not None:
            self._returns.returns.masked_fill_(starts, 0.0)

    def see(self, seen: CollectedStep) -> None:
        """Take in a step of all environments."""
        if self.idle:
            return
        step, device = seen.step, self._learner.device
        arrays = (seen.obs, step.reward, step.terminated | step.truncated)
        obs, reward, ended = (torch.from_numpy(array).to(device) for array in arrays)
        self._learner.see_step(obs, reward, ended, self._returns)

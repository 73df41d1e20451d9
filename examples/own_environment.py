"""An environment of your own, from the first step to a policy module, as cells of a notebook.

Run it as it is, or cell by cell (`# %%`) in an editor or a notebook.  Everything is in this file:
the environment is a class of `__main__`, which no other process could import.
"""

# %% The task: walk to the right end of a corridor
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training import DQN, Callback, TrainerState

Array = np.ndarray[Any, Any]
LENGTH = 6


class Corridor(gym.Env[Array, Any]):
    """Left or right; 1 for reaching the end, a little less for every step on the way."""

    observation_space = gym.spaces.Box(0, 1, (LENGTH,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def _obs(self) -> Array:
        obs = np.zeros(LENGTH, np.float32)
        obs[self.place] = 1
        return obs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin at the left end."""
        super().reset(seed=seed, options=options)
        self.place = self.steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Walk one place."""
        self.steps += 1
        self.place = min(max(self.place + (1 if action == 1 else -1), 0), LENGTH - 1)
        done = self.place == LENGTH - 1
        return self._obs(), float(done) - 0.01, done, self.steps >= 30, {}


# %% A callback that keeps the learning curve
class Curve(Callback):
    """Steps and mean returns of the evaluations."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        """Note the mean, and log the best episode as a metric of our own."""
        self.points.append((state.step, state.metrics["eval_return_mean"]))
        state.log({"best_episode": max(returns[0])})


# %% Learn
curve = Curve()
agent = DQN(
    Corridor,
    hidden_sizes=(32,),
    learning_starts=200,
    batch_size=32,
    exploration_fraction=0.5,
    eval_interval=1_000,
    eval_episodes=3,
)
result = agent.learn(3_000, callbacks=curve)
print(agent)
print("curve", curve.points)

# %% Evaluate
print("mean return", agent.evaluate(episodes=5).metrics["eval_return_mean"])

# %% Go on with the same run
again = agent.learn(1_000, progress=False, callbacks=curve)
assert again.run_dir == result.run_dir
print("steps", int(again.metrics["global_step"]))

# %% Play an episode by hand
env = Corridor()
obs, _ = env.reset(seed=0)
total, over = 0.0, False
while not over:
    obs, reward, terminated, truncated, _ = env.step(agent.predict(obs))
    total, over = total + reward, terminated or truncated
print(f"played {env.steps} steps, return {total:.2f}")

# %% The policy as a module of PyTorch: a batch of observations to actions
policy = agent.policy
with torch.no_grad():
    actions = policy(torch.eye(LENGTH))
print("actions", actions.tolist())

# %% Another process would load the run so: the environment has to be given again
same = DQN.load(again.run_dir, env=Corridor)
assert np.array_equal(same.predict(np.eye(LENGTH)), actions.numpy())
print(same)

"""Deep Q-learning in one file, to be read from top to bottom.

    python examples/single_file/dqn.py --seed 1

The method is that of Mnih et al., "Human-level control through deep reinforcement learning", 2015
(doi:10.1038/nature14236), with double Q-learning (van Hasselt et al., 2015, arXiv:1509.06461) and
n-step returns (Hessel et al., 2017, arXiv:1710.02298).  A network learns the value of every action
from transitions that are kept and drawn many times; the agent takes the best action, and now and
then a random one.

Shapes in comments: B batch, D entries of an observation, A actions, n steps of a return.
"""

from __future__ import annotations

import argparse
import copy
import random
from dataclasses import dataclass, fields
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Settings:
    """Everything that can be changed from the command line, as `--learning-rate 3e-4`."""

    env: str = "CartPole-v1"
    seed: int = 0
    steps: int = 50_000  # actions in the environment
    random_steps: int = 1_000  # random actions before learning begins
    capacity: int = 50_000  # steps that are kept
    batch_size: int = 128
    width: int = 128  # of each of the two hidden layers
    learning_rate: float = 1e-3  # at the start
    final_learning_rate: float = 1e-4  # at the end; it falls along a line
    gamma: float = 0.99  # discount
    n_step: int = 10  # rewards that are added up before the network's own estimate
    tau: float = 0.005  # share of the network that moves into its target at each update
    epsilon_end: float = 0.1  # share of random actions, after it has fallen from 1
    exploration_fraction: float = 0.2  # share of the run in which it falls
    max_grad_norm: float = 10.0
    eval_interval: int = 5_000
    eval_episodes: int = 10


# -- Network ---------------------------------------------------------------------------------------


class QNetwork(nn.Module):
    """Maps an observation to the value of every action: `[..., D]` to `[..., A]`."""

    def __init__(self, obs_size: int, num_actions: int, width: int) -> None:
        super().__init__()
        hidden = [nn.Linear(obs_size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(width, num_actions))

    def forward(self, obs: Tensor) -> Tensor:
        """Return Q(s, .)."""
        return self.net(obs)


# -- Replay ----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """n-step transitions that were drawn from the replay."""

    obs: Tensor  # [B, D], s_t
    action: Tensor  # [B], a_t
    reward: Tensor  # [B], r_t + gamma r_{t+1} + ... over k <= n steps
    next_obs: Tensor  # [B, D], s_{t+k}
    discount: Tensor  # [B], gamma^k, or 0 where s_{t+k} is terminal


class Replay:
    """The last `capacity` steps in the order in which they happened."""

    def __init__(self, settings: Settings, obs_size: int) -> None:
        self.capacity, self.gamma = settings.capacity, settings.gamma
        self.n_step, self.inserted = settings.n_step, 0
        self.obs = torch.zeros(self.capacity, obs_size)
        self.action = torch.zeros(self.capacity, dtype=torch.int64)
        self.reward = torch.zeros(self.capacity)
        self.next_obs = torch.zeros(self.capacity, obs_size)
        self.terminated = torch.zeros(self.capacity)
        self.truncated = torch.zeros(self.capacity)

    def add(
        self,
        obs: np.ndarray,
        action: int,
        reward: float,
        next_obs: np.ndarray,
        terminated: bool,
        truncated: bool,
    ) -> None:
        """Store one step; `next_obs` is what followed, also where the episode ended there."""
        row = self.inserted % self.capacity
        self.obs[row] = torch.as_tensor(obs)
        self.action[row] = action
        self.reward[row] = reward
        self.next_obs[row] = torch.as_tensor(next_obs)
        self.terminated[row] = float(terminated)
        self.truncated[row] = float(truncated)
        self.inserted += 1

    def sample(self, batch_size: int) -> Batch:
        """Draw steps uniformly, with replacement."""
        stored = min(self.inserted, self.capacity)
        return self.transitions(torch.randint(stored, (batch_size,)))

    def transitions(self, first: Tensor) -> Batch:
        """Return the n-step transitions that begin at the rows `first`, `[B]`.

        A sum of rewards never crosses the end of an episode: it stops at a terminal state, at a
        time limit and at the newest step.  Only a terminal state has no value of its own.
        """
        steps = torch.arange(self.n_step)  # [n]
        rows = (first.unsqueeze(1) + steps) % self.capacity  # [B, n]
        ended = torch.maximum(self.terminated[rows], self.truncated[rows])
        # How many steps have been stored after the first one, `[B]`.
        after = (self.inserted - 1 - first) % self.capacity
        # A step counts if no step before it ended the episode, and if it has been stored.
        counts = (ended.cumsum(1) - ended == 0) & (steps <= after.unsqueeze(1))  # [B, n]
        length = counts.sum(1)  # k, [B]
        last = rows.gather(1, length.unsqueeze(1) - 1).squeeze(1)  # [B]
        return Batch(
            obs=self.obs[first],
            action=self.action[first],
            reward=(self.gamma**steps * self.reward[rows] * counts).sum(1),
            next_obs=self.next_obs[last],
            discount=self.gamma**length * (1 - self.terminated[last]),
        )


# -- Learning --------------------------------------------------------------------------------------


class DQN:
    """Network, target, optimizer and the update."""

    def __init__(self, obs_size: int, num_actions: int, settings: Settings) -> None:
        self.settings, self.num_actions = settings, num_actions
        self.network = QNetwork(obs_size, num_actions, settings.width)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.adam = torch.optim.Adam(self.network.parameters(), settings.learning_rate)

    def loss(self, batch: Batch) -> Tensor:
        """Huber loss of Q(s, a) to r + discount Q-(s', argmax_a' Q(s', a')).

        The network chooses the next action and its slow copy, Q-, rates it (Eq. 4 of
        arXiv:1509.06461): one that does both prefers actions that it overestimates.
        """
        with torch.no_grad():
            best = self.network(batch.next_obs).argmax(-1, keepdim=True)  # [B, 1]
            next_value = self.target(batch.next_obs).gather(-1, best).squeeze(-1)  # [B]
            target = batch.reward + batch.discount * next_value
        value = self.network(batch.obs).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
        # Its gradient is that of the square, clipped to [-1, 1], as in the paper.
        return functional.huber_loss(value, target)

    def update(self, batch: Batch) -> None:
        """Take one gradient step, and move the target a little towards the network."""
        self.adam.zero_grad()
        self.loss(batch).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.max_grad_norm)
        self.adam.step()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.network.parameters(), strict=True)
            for target, source in pairs:
                target.lerp_(source, self.settings.tau)

    def best_action(self, obs: np.ndarray) -> int:
        """Return the action of the largest value."""
        with torch.no_grad():
            return int(self.network(torch.as_tensor(obs)).argmax())

    def explore(self, obs: np.ndarray, epsilon: float) -> int:
        """Return a random action with probability epsilon, else the best one."""
        if random.random() < epsilon:
            return random.randrange(self.num_actions)
        return self.best_action(obs)

    def epsilon(self, progress: float) -> float:
        """Return the share of random actions when so much of the run is done."""
        done = min(progress / self.settings.exploration_fraction, 1.0)
        return 1.0 + done * (self.settings.epsilon_end - 1.0)

    def set_progress(self, progress: float) -> None:
        """Move the learning rate from its first value to its last."""
        first, last = self.settings.learning_rate, self.settings.final_learning_rate
        for group in self.adam.param_groups:
            group["lr"] = first + progress * (last - first)


# -- Running ---------------------------------------------------------------------------------------


def evaluate(agent: DQN, episodes: int) -> list[float]:
    """Return the returns of whole episodes, by the best actions, from fixed start states."""
    env, returns = gym.make(agent.settings.env), []
    for episode in range(episodes):
        obs, _ = env.reset(seed=1_000_000 + episode)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(agent.best_action(obs))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def train(settings: Settings) -> DQN:
    """Act, remember, learn."""
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    env = gym.make(settings.env)
    space, shape = env.action_space, env.observation_space.shape
    assert isinstance(space, gym.spaces.Discrete), "this script is for discrete actions"
    assert shape is not None
    agent = DQN(shape[0], int(space.n), settings)
    replay = Replay(settings, shape[0])
    obs, _ = env.reset(seed=settings.seed)
    for step in range(1, settings.steps + 1):
        learning, progress = step > settings.random_steps, step / settings.steps
        action = agent.explore(obs, agent.epsilon(progress) if learning else 1.0)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        replay.add(obs, action, float(reward), next_obs, terminated, truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs
        if learning:
            agent.set_progress(progress)
            agent.update(replay.sample(settings.batch_size))
        if settings.eval_interval and step % settings.eval_interval == 0:
            report(step, evaluate(agent, settings.eval_episodes))
    env.close()
    return agent


def report(step: int, returns: list[float]) -> None:
    """Print one line about an evaluation."""
    print(f"step {step:7,}  return {np.mean(returns):7.2f} +- {np.std(returns):.2f}", flush=True)


def settings_from_command_line() -> Settings:
    """Read one option for each field of `Settings`."""
    parser = argparse.ArgumentParser(description="Deep Q-learning in one file.")
    for field in fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    trained = train(settings_from_command_line())
    final = evaluate(trained, episodes=100)
    print(f"100 episodes at the end: {np.mean(final):.2f} +- {np.std(final):.2f}")

"""Soft Actor-Critic in one file, to be read from top to bottom.

    python examples/single_file/sac.py --seed 1

The method is that of Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018
(arXiv:1812.05905).  The agent maximises reward plus `alpha` times the entropy of its policy.  Two
critics learn the value of actions, the policy climbs the lower of the two, and `alpha` moves so
that the entropy stays near a target.  Every transition is kept and learned from many times.

Shapes in comments: B batch, D entries of an observation, A entries of an action.
"""

from __future__ import annotations

import argparse
import copy
import math
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

    env: str = "Pendulum-v1"
    seed: int = 0
    steps: int = 10_000  # actions in the environment
    random_steps: int = 500  # uniformly random actions before learning begins
    capacity: int = 50_000  # transitions that are kept
    batch_size: int = 256
    width: int = 256  # of each of the two hidden layers
    learning_rate: float = 1e-3
    gamma: float = 0.99  # discount
    tau: float = 0.005  # share of the critics that moves into their targets at each update
    eval_interval: int = 1_000
    eval_episodes: int = 10


# -- Networks --------------------------------------------------------------------------------------


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Build a perceptron with two hidden layers."""
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Actor(nn.Module):
    """The policy: a Gaussian with a diagonal covariance, squashed into (-1, 1) by tanh."""

    def __init__(self, obs_size: int, action_size: int, width: int) -> None:
        super().__init__()
        self.net = mlp(obs_size, width, 2 * action_size)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation before the tanh, `[B, A]` each."""
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return mean, log_std.clamp(-20.0, 2.0)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[B, A]` and return their log density `[B]` with them.

        The action is a = tanh(u) with u = mean + std * noise, so that gradients flow through the
        draw to mean and std.  The change of variables costs (appendix C of the paper)
        log pi(a) = log N(u) - sum log(1 - tanh(u)^2).
        """
        mean, log_std = self(obs)
        noise = torch.randn_like(mean)  # [B, A]
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(u)^2), written so that it stays finite where tanh(u) rounds to 1.
        log_slope = 2 * (math.log(2) - u - functional.softplus(-2 * u))
        return torch.tanh(u), (log_normal - log_slope).sum(-1)

    def best_action(self, obs: Tensor) -> Tensor:
        """Return the action without noise, `[B, A]`, for evaluation."""
        return torch.tanh(self(obs)[0])


class Critics(nn.Module):
    """Two networks (s, a) -> Q(s, a) that differ in their initial weights alone.

    Each overestimates where its own errors are positive.  The lower of two does so less.
    """

    def __init__(self, obs_size: int, action_size: int, width: int) -> None:
        super().__init__()
        self.first = mlp(obs_size + action_size, width, 1)
        self.second = mlp(obs_size + action_size, width, 1)

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return both estimates, `[B]` each."""
        x = torch.cat((obs, action), dim=-1)  # [B, D + A]
        return self.first(x).squeeze(-1), self.second(x).squeeze(-1)

    def lower(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the lower of the two estimates, `[B]`."""
        return torch.minimum(*self(obs, action))


# -- Replay ----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Transitions (s, a, r, s') that were drawn from the replay."""

    obs: Tensor  # [B, D]
    action: Tensor  # [B, A]
    reward: Tensor  # [B]
    next_obs: Tensor  # [B, D]
    terminated: Tensor  # [B], 1 where s' is terminal


class Replay:
    """The last `capacity` transitions; the oldest are overwritten."""

    def __init__(self, capacity: int, obs_size: int, action_size: int) -> None:
        self.capacity, self.inserted = capacity, 0
        self.rows = Batch(
            obs=torch.zeros(capacity, obs_size),
            action=torch.zeros(capacity, action_size),
            reward=torch.zeros(capacity),
            next_obs=torch.zeros(capacity, obs_size),
            terminated=torch.zeros(capacity),
        )

    def add(self, *transition: np.ndarray | float) -> None:
        """Store one transition, in the order of the fields of `Batch`."""
        row = self.inserted % self.capacity
        for field, value in zip(self.rows, transition, strict=True):
            field[row] = torch.as_tensor(value)
        self.inserted += 1

    def sample(self, batch_size: int) -> Batch:
        """Draw transitions uniformly, with replacement."""
        index = torch.randint(min(self.inserted, self.capacity), (batch_size,))
        return Batch(*(field[index] for field in self.rows))


# -- Learning --------------------------------------------------------------------------------------


class SAC:
    """Networks, optimizers and the update."""

    def __init__(self, obs_size: int, action_size: int, settings: Settings) -> None:
        self.settings = settings
        self.actor = Actor(obs_size, action_size, settings.width)
        self.critics = Critics(obs_size, action_size, settings.width)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        # The logarithm keeps alpha positive, and its steps are in proportion to alpha.
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.target_entropy = -float(action_size)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), settings.learning_rate)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), settings.learning_rate)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], settings.learning_rate)

    def critic_loss(self, batch: Batch) -> Tensor:
        """Squared error to r + gamma (min_i Q_i(s', a') - alpha log pi(a'|s')) (Eqs. 2, 3, 5)."""
        with torch.no_grad():
            next_action, log_prob = self.actor.sample(batch.next_obs)
            next_value = self.targets.lower(batch.next_obs, next_action)  # [B]
            next_value -= self.log_alpha.exp() * log_prob
            # Nothing follows a terminal state.  A time limit is not one: the task would have gone
            # on, so the value of s' counts, and `truncated` has no part in the target.
            target = batch.reward + self.settings.gamma * (1 - batch.terminated) * next_value
        first, second = self.critics(batch.obs, batch.action)
        return functional.mse_loss(first, target) + functional.mse_loss(second, target)

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean of alpha log pi(a|s) - min_i Q_i(s, a) (Eq. 9), and the entropy of the policy."""
        action, log_prob = self.actor.sample(batch.obs)
        value = self.critics.lower(batch.obs, action)  # [B]
        alpha = self.log_alpha.detach().exp()
        return (alpha * log_prob - value).mean(), -log_prob.detach().mean()

    def update(self, batch: Batch) -> None:
        """Take one gradient step for critics, policy and temperature, and move the targets."""
        minimize(self.critic_loss(batch), self.critic_adam)
        actor_loss, entropy = self.actor_loss(batch)
        minimize(actor_loss, self.actor_adam)
        # Entropy below its target raises alpha (Eq. 18, with log alpha in place of alpha).
        minimize(self.log_alpha * (entropy - self.target_entropy), self.alpha_adam)
        with torch.no_grad():
            for target, source in zip(
                self.targets.parameters(), self.critics.parameters(), strict=True
            ):
                target.lerp_(source, self.settings.tau)


def minimize(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take one gradient step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# -- Running ---------------------------------------------------------------------------------------


def make_env(name: str) -> gym.Env[np.ndarray, np.ndarray]:
    """Make an environment whose actions are in [-1, 1], as the policy's are."""
    env = gym.make(name)
    space = env.action_space
    assert isinstance(space, gym.spaces.Box), "this script is for continuous actions"
    return gym.wrappers.RescaleAction(env, np.float32(-1.0), np.float32(1.0))


def evaluate(agent: SAC, episodes: int) -> list[float]:
    """Return the undiscounted returns of whole episodes, always from the same start states."""
    env, returns = make_env(agent.settings.env), []
    for episode in range(episodes):
        obs, _ = env.reset(seed=1_000_000 + episode)
        total, ended = 0.0, False
        while not ended:
            with torch.no_grad():
                action = agent.actor.best_action(torch.as_tensor(obs)).numpy()
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def train(settings: Settings) -> SAC:
    """Act, remember, learn."""
    torch.manual_seed(settings.seed)
    env = make_env(settings.env)
    env.action_space.seed(settings.seed)
    assert env.observation_space.shape is not None
    assert env.action_space.shape is not None
    (obs_size,), (action_size,) = env.observation_space.shape, env.action_space.shape
    agent = SAC(obs_size, action_size, settings)
    replay = Replay(settings.capacity, obs_size, action_size)
    obs, _ = env.reset(seed=settings.seed)
    for step in range(1, settings.steps + 1):
        if step <= settings.random_steps:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = agent.actor.sample(torch.as_tensor(obs))[0].numpy()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        replay.add(obs, action, float(reward), next_obs, float(terminated))
        # The episode ends either way; only `terminated` was stored.
        obs = env.reset()[0] if terminated or truncated else next_obs
        if step > settings.random_steps:
            agent.update(replay.sample(settings.batch_size))
        if settings.eval_interval and step % settings.eval_interval == 0:
            report(step, evaluate(agent, settings.eval_episodes), agent.log_alpha.exp().item())
    env.close()
    return agent


def report(step: int, returns: list[float], alpha: float) -> None:
    """Print one line about an evaluation."""
    mean, std = np.mean(returns), np.std(returns)
    print(f"step {step:7,}  return {mean:9.2f} +- {std:.2f}  alpha {alpha:.3f}", flush=True)


def settings_from_command_line() -> Settings:
    """Read one option for each field of `Settings`."""
    parser = argparse.ArgumentParser(description="Soft Actor-Critic in one file.")
    for field in fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    trained = train(settings_from_command_line())
    final = evaluate(trained, episodes=100)
    print(f"100 episodes at the end: {np.mean(final):.2f} +- {np.std(final):.2f}")

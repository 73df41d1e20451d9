"""Proximal Policy Optimization in one file, to be read from top to bottom.

    python examples/single_file/ppo.py --seed 1

The method is that of Schulman et al., "Proximal Policy Optimization Algorithms", 2017
(arXiv:1707.06347), with the advantages of "High-Dimensional Continuous Control Using Generalized
Advantage Estimation", 2015 (arXiv:1506.02438).  The policy plays for a while, the rollout is
learned from in several epochs of minibatches, and then it is thrown away.  A clip keeps the new
policy from profiting by leaving the one that played.

Shapes in comments: T steps of a rollout, n environments, B rows of a minibatch, D entries of an
observation, A actions.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical


@dataclass
class Settings:
    """Everything that can be changed from the command line, as `--learning-rate 3e-4`."""

    env: str = "CartPole-v1"
    seed: int = 0
    steps: int = 100_000  # actions in all environments together
    num_envs: int = 8
    num_steps: int = 128  # of a rollout, in each environment
    epochs: int = 10  # over each rollout
    minibatch_size: int = 256
    width: int = 64  # of each of the two hidden layers
    learning_rate: float = 1e-3  # at the start; it falls to 0 along a line
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # 0 gives one-step advantages, 1 Monte-Carlo ones
    clip: float = 0.2  # half width of the interval that the probability ratio is clipped to
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    max_grad_norm: float = 0.5
    eval_interval: int = 20_000
    eval_episodes: int = 10


# -- Networks --------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Build a layer with orthogonal weights, scaled by `gain`, and zero biases."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, width: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Build a perceptron with two hidden layers."""
    first, second = linear(inputs, width, 2**0.5), linear(width, width, 2**0.5)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), linear(width, outputs, last_gain))


class ActorCritic(nn.Module):
    """The policy and the value, two networks that share nothing."""

    def __init__(self, obs_size: int, num_actions: int, width: int) -> None:
        super().__init__()
        # A small last layer: the first policy is close to uniform.
        self.actor = mlp(obs_size, width, num_actions, last_gain=0.01)
        self.critic = mlp(obs_size, width, 1, last_gain=1.0)

    def policy(self, obs: Tensor) -> Categorical:
        """Return the distribution over actions."""
        return Categorical(logits=self.actor(obs), validate_args=False)

    def value(self, obs: Tensor) -> Tensor:
        """Return V(s); observations `[..., D]` give `[...]`."""
        return self.critic(obs).squeeze(-1)


# -- Rollouts --------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """What n environments did in T steps."""

    obs: Tensor  # [T, n, D]
    action: Tensor  # [T, n]
    reward: Tensor  # [T, n]
    next_obs: Tensor  # [T, n, D], at the end of an episode its last observation
    terminated: Tensor  # [T, n], the episode reached a terminal state
    truncated: Tensor  # [T, n], the episode was cut by a time limit


class Runner:
    """Environments in the middle of their episodes."""

    def __init__(self, settings: Settings) -> None:
        self.envs = [gym.make(settings.env) for _ in range(settings.num_envs)]
        seeds = np.random.SeedSequence(settings.seed).generate_state(settings.num_envs)
        starts = [env.reset(seed=int(seed))[0] for env, seed in zip(self.envs, seeds, strict=True)]
        self.obs = np.stack(starts)  # [n, D]

    def rollout(self, model: ActorCritic, num_steps: int) -> Rollout:
        """Play `num_steps` steps in every environment."""
        steps = [self._step(model) for _ in range(num_steps)]
        columns = (torch.as_tensor(np.stack(column)) for column in zip(*steps, strict=True))
        return Rollout(*columns)

    def _step(self, model: ActorCritic) -> tuple[np.ndarray, ...]:
        """Take one step in every environment, and begin new episodes where one ended."""
        obs = self.obs
        with torch.no_grad():
            action = model.policy(torch.as_tensor(obs)).sample().numpy()  # [n]
        next_obs, ends = np.empty_like(obs), []
        self.obs = np.empty_like(obs)
        for i, env in enumerate(self.envs):
            next_obs[i], reward, terminated, truncated, _ = env.step(action[i])
            self.obs[i] = env.reset()[0] if terminated or truncated else next_obs[i]
            ends.append((float(reward), terminated, truncated))
        rewards, terminations, truncations = zip(*ends, strict=True)
        reward = np.array(rewards, np.float32)
        return obs, action, reward, next_obs, np.array(terminations), np.array(truncations)


# -- Learning --------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What a gradient step needs of each step of a rollout; the axes T and n are one."""

    obs: Tensor  # [B, D]
    action: Tensor  # [B]
    log_prob: Tensor  # [B], log pi_old(a|s) of the policy that played
    advantage: Tensor  # [B]
    target: Tensor  # [B], what the value should be


def advantages(rollout: Rollout, model: ActorCritic, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantages, `[T, n]` (Eq. 16 of arXiv:1506.02438, from the end backwards).

    delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t)
    A_t     = delta_t + gamma lambda (1 - ended_t) A_{t+1}

    The two masks differ.  After a terminal state nothing follows, so its value is 0.  After a time
    limit the task would have gone on, so V(s_{t+1}) counts, with the last observation and not the
    first one of the next episode.  The sum stops at both.
    """
    value, next_value = model.value(rollout.obs), model.value(rollout.next_obs)
    goes_on = ~(rollout.terminated | rollout.truncated)
    delta = rollout.reward + gamma * ~rollout.terminated * next_value - value
    result = torch.zeros_like(delta)
    later = torch.zeros_like(delta[0])  # [n]
    for t in reversed(range(len(delta))):
        later = delta[t] + gamma * gae_lambda * goes_on[t] * later
        result[t] = later
    return result


class PPO:
    """Networks, optimizer and the update."""

    def __init__(self, obs_size: int, num_actions: int, settings: Settings) -> None:
        self.settings = settings
        self.model = ActorCritic(obs_size, num_actions, settings.width)
        self.adam = torch.optim.Adam(self.model.parameters(), settings.learning_rate, eps=1e-5)

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> Rows:
        """Compute once what all epochs use."""
        gamma, gae_lambda = self.settings.gamma, self.settings.gae_lambda
        advantage = advantages(rollout, self.model, gamma, gae_lambda)  # [T, n]
        log_prob = self.model.policy(rollout.obs).log_prob(rollout.action)
        target = advantage + self.model.value(rollout.obs)
        parts = (rollout.obs, rollout.action, log_prob, advantage, target)
        return Rows(*(part.flatten(0, 1) for part in parts))

    def loss(self, rows: Rows) -> Tensor:
        """Return the clipped surrogate, the value error and the entropy bonus together (Eq. 9)."""
        settings, policy = self.settings, self.model.policy(rows.obs)
        advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
        ratio = (policy.log_prob(rows.action) - rows.log_prob).exp()  # pi(a|s) / pi_old(a|s)
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        # Eq. 7: the lower of the two, so that leaving the interval earns nothing but may cost.
        surrogate = torch.minimum(ratio * advantage, clipped * advantage).mean()
        value_error = 0.5 * (self.model.value(rows.obs) - rows.target).square().mean()
        entropy = policy.entropy().mean()
        return -surrogate + settings.value_weight * value_error - settings.entropy_weight * entropy

    def update(self, rollout: Rollout) -> None:
        """Go over a rollout several times, each time in a new order."""
        rows = self.prepare(rollout)
        for _ in range(self.settings.epochs):
            for index in torch.randperm(len(rows.obs)).split(self.settings.minibatch_size):
                self.adam.zero_grad()
                self.loss(Rows(*(part[index] for part in rows))).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
                self.adam.step()

    def set_progress(self, progress: float) -> None:
        """Let the learning rate fall to 0 at the end of the run."""
        for group in self.adam.param_groups:
            group["lr"] = self.settings.learning_rate * (1 - progress)


# -- Running ---------------------------------------------------------------------------------------


def evaluate(agent: PPO, episodes: int) -> list[float]:
    """Return the returns of whole episodes, by the likeliest actions, from fixed start states."""
    env, returns = gym.make(agent.settings.env), []
    for episode in range(episodes):
        obs, _ = env.reset(seed=1_000_000 + episode)
        total, ended = 0.0, False
        while not ended:
            with torch.no_grad():
                action = agent.model.actor(torch.as_tensor(obs)).argmax().item()
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def train(settings: Settings) -> PPO:
    """Play, learn, forget."""
    torch.manual_seed(settings.seed)
    runner = Runner(settings)
    space = runner.envs[0].action_space
    assert isinstance(space, gym.spaces.Discrete), "this script is for discrete actions"
    agent = PPO(runner.obs.shape[1], int(space.n), settings)
    per_rollout = settings.num_steps * settings.num_envs
    evaluations = 0
    for step in range(0, settings.steps, per_rollout):
        agent.set_progress(step / settings.steps)
        agent.update(runner.rollout(agent.model, settings.num_steps))
        done = step + per_rollout
        if settings.eval_interval and done // settings.eval_interval > evaluations:
            evaluations = done // settings.eval_interval
            report(done, evaluate(agent, settings.eval_episodes))
    return agent


def report(step: int, returns: list[float]) -> None:
    """Print one line about an evaluation."""
    print(f"step {step:7,}  return {np.mean(returns):7.2f} +- {np.std(returns):.2f}", flush=True)


def settings_from_command_line() -> Settings:
    """Read one option for each field of `Settings`."""
    parser = argparse.ArgumentParser(description="Proximal Policy Optimization in one file.")
    for field in fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    trained = train(settings_from_command_line())
    final = evaluate(trained, episodes=100)
    print(f"100 episodes at the end: {np.mean(final):.2f} +- {np.std(final):.2f}")

"""Parallelised Q-Network (Gallici et al., 2024, arXiv:2407.04811).

Q-learning without replay and without target networks: many environments give a rollout, its
Q(lambda) targets are computed once, and several epochs of minibatches regress to them.  Layer
normalisation keeps the network's values bounded (Section 3), which a target network does elsewhere.

Deviations: a time limit is not a termination: its target bootstraps from the final observation,
    where the authors' code ends the return.  Values of s' are computed in one pass over the
    finished rollout, by the parameters that gathered it, in place of those stored while acting,
    which are the same.  Weights start orthogonal after images and as PyTorch's own elsewhere
    (he_normal and lecun_normal there); no batch normalisation of inputs, but running
    statistics (`normalize_observations`); a reward scale belongs to the task
    (`env_kwargs.wrappers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActingState, OnPolicyLearner, StepOutput
from rl_training.algorithms.config import AlgoConfig, OptimizerChoice, OptimizerSettings, part_of
from rl_training.algorithms.losses import lambda_returns
from rl_training.algorithms.pixel_config import PixelConfig, encoder_for
from rl_training.algorithms.sources import RolloutSettings, RolloutStatistics
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.value_based import EpsilonGreedy
from rl_training.data.batch import RolloutBatch, RolloutRows
from rl_training.envs.spec import EnvSpec
from rl_training.models.heads import best_allowed, uniform_allowed
from rl_training.models.layers import ActivationName
from rl_training.models.mlp_q_network import QNetwork
from rl_training.rng import Rng
from rl_training.state import Scalar
from rl_training.validation import Fraction, PositiveFloat, PositiveInt, Settings, Sizes


class PQNConfig(RolloutStatistics, AlgoConfig):
    """Settings of PQN."""

    varying: ClassVar[frozenset[str]] = frozenset({"learning_rate"})

    num_steps: PositiveInt = 32
    """Steps of each environment per rollout."""
    hidden_sizes: Sizes = (128, 128)
    """Widths of the hidden layers for vector observations."""
    activation: ActivationName = "relu"
    """What follows each hidden layer; convolutions have relu."""
    layer_norm: bool = True
    """Normalise before each activation; without it values may grow without bound."""
    learning_rate: PositiveFloat = 2.5e-4
    """Learning rate."""
    optimizer: OptimizerChoice = OptimizerSettings(type="radam")
    """Optimizer of the networks: a name, or a mapping `{type: sgd, momentum: 0.9}`."""
    q_lambda: Fraction = 0.65
    """0 gives one-step targets, 1 the rewards to the rollout's end and a bootstrap there."""
    max_grad_norm: PositiveFloat | None = 10.0
    """Clip the gradient to this norm, per seed; null does not."""
    eval_epsilon: Fraction = 0.0
    """Share of random actions in stochastic evaluation (`eval_deterministic: false`)."""


@dataclass(frozen=True)
class Targets(RolloutRows):
    """Rows of a rollout with their regression targets, `[S, B, ...]`."""

    target: Tensor


class PQN(OnPolicyLearner):
    """Regression to Q(lambda) returns of rollouts."""

    config_class: ClassVar[type[Settings]] = PQNConfig
    parts: ClassVar[tuple[type[Settings], ...]] = (PixelConfig, RolloutSettings, EpsilonGreedy)
    network_names: ClassVar[tuple[str, ...]] = ("q_network",)
    config: PQNConfig
    q_network: QNetwork

    def setup(self) -> None:
        """Create the optimizer and the share of random actions."""
        self.optimizer = self.network_optimizer(
            self.q_network.parameters(), max_grad_norm=self.config.max_grad_norm
        )
        self.share_random = Scalar(1.0, self.device)

    def step(self, batch: RolloutBatch) -> StepOutput:
        """Do several epochs of minibatch steps on a rollout."""
        metrics, steps = self.epochs(self.prepare(batch))
        self.see_rollout(batch)
        return StepOutput(metrics, num_gradient_steps=steps)

    @torch.no_grad()
    def prepare(self, batch: RolloutBatch) -> Targets:
        """Compute the targets of a rollout from max_a Q(s', a)."""
        obs = self.normalize(batch.obs.flatten(1, 2))  # [S, T n, ...]
        next_obs = self.normalize(batch.next_obs.flatten(1, 2))
        next_q = best_allowed(self.q_network(next_obs), self.allowed(next_obs))
        next_value = next_q.amax(-1)  # [S, T n]
        target = lambda_returns(
            self.scaled(batch.reward),
            next_value.view_as(batch.reward),
            batch.terminated,
            batch.truncated,
            gamma=self.config.gamma,
            q_lambda=self.config.q_lambda,
        )
        return Targets(obs, batch.action.flatten(1, 2), target.flatten(1, 2))

    def loss(self, batch: Targets) -> tuple[Tensor, dict[str, Tensor]]:
        """Half squared error of Q of the actions taken, `[S]` (Algorithm 1), and metrics."""
        q = self.q_network(batch.obs).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [S, B]
        error = q - batch.target
        loss = 0.5 * error.square().mean(1)
        values = {"q_value_mean": q, "target_mean": batch.target, "td_error_mean": error.abs()}
        means = {name: value.detach().mean(1) for name, value in values.items()}
        return loss, {"loss": loss.detach(), **means}

    def minibatch_step(self, batch: Targets, active: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step."""
        loss, metrics = self.loss(batch)
        self.optimizer.minimize(loss)
        return metrics, active

    def set_progress(self, progress: float) -> None:
        """Move the learning rate and epsilon."""
        super().set_progress(progress)
        self.share_random.set(self.part(EpsilonGreedy).epsilon(self.progress))

    def schedule_values(self, index: int = 0) -> dict[str, float]:
        """Return the learning rate and epsilon."""
        return super().schedule_values(index) | {"epsilon": self.share_random.value}

    def draw_noise(self, num_steps: int, num_envs: int) -> Tensor:
        """Draw a whole rollout's lots, and an action for where the lot falls, `[S, T, n, 2]`."""
        return self.rng.uniform(num_steps, num_envs, 2)

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Choose the best action, or, with probability epsilon, a random one."""
        return self.epsilon_greedy(self.normalize(obs), noise, self.share_random.tensor)

    def epsilon_greedy(self, obs: Tensor, noise: Tensor, epsilon: float | Tensor) -> Tensor:
        """Choose the best action, or a random one where noise `[S, n, 2]` says so."""
        (lot, action), allowed = noise.unbind(-1), self.allowed(obs)
        drawn = (
            (action * self.q_network.action_dim).long()
            if allowed is None
            else uniform_allowed(action, allowed)
        )
        return torch.where(lot < epsilon, drawn, self.best(obs))

    def best(self, obs: Tensor) -> Tensor:
        """Return the action `[S, n]` of the largest Q among those allowed."""
        return best_allowed(self.q_network(obs), self.allowed(obs)).argmax(-1)

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose the best action, or when exploring, with probability epsilon, a random one."""
        if explore:
            noise = self.draw_noise(1, obs.shape[1])[:, 0]
            return self.epsilon_greedy(obs, noise, self.share_random.tensor)
        return self.best(obs)

    def sample_from(self, state: ActingState | None, obs: Tensor) -> Tensor:
        """Choose the best action, or a random one by `eval_epsilon`."""
        noise = self.draw_noise(1, obs.shape[1])[:, 0]
        return self.epsilon_greedy(self.shown(state, obs), noise, self.config.eval_epsilon)


def pqn_loss(learner: PQN, batch: RolloutBatch) -> dict[str, Tensor]:
    """Compute PQN's loss and metrics over a whole rollout without changing the parameters."""
    return learner.loss(learner.prepare(batch))[1]


def pqn_networks(env: EnvSpec, config: PQNConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the network for a task."""
    encoder = encoder_for(
        env,
        config,
        rng,
        more=part_of(config, PixelConfig).head_hidden_sizes,
        activation=config.activation,
        orthogonal_init=True,
        layer_norm=config.layer_norm,
    )
    return {"q_network": QNetwork(encoder, env.action_dim, rng=rng)}


SPEC = AlgorithmSpec(
    name="pqn",
    title="Parallelised Q-Network",
    paper="arXiv:2407.04811",
    summary="value-based on rollouts; Q(lambda), no replay, no target network; discrete actions",
    learner=PQN,
    networks=pqn_networks,
    loop=Loop.ON_POLICY,
    action_kinds=("discrete",),
    obs_ndims=(1, 3),
    metrics={
        "loss": "half squared TD error",
        "q_value_mean": "mean Q of the actions taken",
        "target_mean": "mean regression target",
        "td_error_mean": "mean absolute TD error",
    },
)

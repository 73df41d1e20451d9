"""Template of value-based learners over discrete actions: TD regression, and epsilon-greedy acting.

A variant overrides `q_values` and `td_loss`.  Exploration is epsilon-greedy or by noisy layers
(Fortunato et al., 2018, arXiv:1706.10295): noise is drawn for every action and, independently, for
each use of a network in an update; acting without exploring uses the means.
Shapes: S seeds, B batch, A actions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import (
    ActingState,
    StepOutput,
    TransitionLearner,
    frozen_copy,
    polyak_update,
)
from rl_training.algorithms.config import AlgoConfig
from rl_training.algorithms.optim import linear
from rl_training.algorithms.pixel_config import PixelConfig
from rl_training.algorithms.sources import TransitionReplay
from rl_training.data.batch import TransitionBatch
from rl_training.models.heads import best_allowed
from rl_training.models.layers import ActivationName, fresh_noise, noisy_layers
from rl_training.state import Scalar
from rl_training.validation import Fraction, PositiveFloat, PositiveInt, Settings, Sizes

KEEP_TARGET, MOVE_TARGET = 0, 1


class ValueBasedConfig(AlgoConfig):
    """Settings of every value-based learner, wherever its data comes from."""

    varying: ClassVar[frozenset[str]] = frozenset({"learning_rate", "tau"})

    hidden_sizes: Sizes = (64, 64)
    """Widths of the hidden layers."""
    activation: ActivationName = "relu"
    """What follows each hidden layer; convolutions and embedded fractions have relu."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate."""
    target_update_interval: PositiveInt = 500
    """Gradient steps between two updates of the target network."""
    tau: Fraction = 1.0
    """Share of the network that moves into the target; 1 copies it."""
    double: bool = True
    """Choose the next action with the online network, evaluate it with the target (van Hasselt,
    2016)."""
    dueling: bool = False
    """Split the network's head into value and advantage."""
    max_grad_norm: PositiveFloat | None = 10.0
    """Clip the gradient to this norm, per seed; null does not."""
    eval_epsilon: Fraction = 0.0
    """Share of random actions in stochastic evaluation (`eval_deterministic: false`)."""


class ValueReplay(TransitionReplay):
    """How a value-based learner keeps and draws experience."""

    buffer_capacity: PositiveInt = 100_000
    """Transitions kept; the oldest are overwritten."""
    batch_size: PositiveInt = 64
    """Transitions per gradient step and seed."""


class EpsilonGreedy(Settings):
    """How often a learner of values acts at random."""

    epsilon_start: Fraction = 1.0
    """Share of random actions at the start."""
    epsilon_end: Fraction = 0.05
    """Share of random actions once exploration has settled."""
    exploration_fraction: Fraction = 0.1
    """Share of the run over which epsilon falls from start to end."""

    def epsilon(self, progress: float) -> float:
        """Return the share of random actions at a progress of the run in [0, 1]."""
        span = self.exploration_fraction
        done = 1.0 if span == 0 else progress / span
        return linear(self.epsilon_start, self.epsilon_end, done)


class Exploration(EpsilonGreedy):
    """How a learner of values with a replay explores."""

    noisy: bool = False
    """Explore by learned noise on the weights (Fortunato et al., 2018); epsilon is then 0."""

    def epsilon(self, progress: float) -> float:
        """Return the share of random actions; with noise on the weights it is 0."""
        return 0.0 if self.noisy else super().epsilon(progress)


class ValueBased(TransitionLearner):
    """TD regression of a Q-network with a target network."""

    config: ValueBasedConfig
    parts: ClassVar[tuple[type[Settings], ...]] = (Exploration, PixelConfig, ValueReplay)
    network_names: ClassVar[tuple[str, ...]] = ("q_network",)
    q_network: Any  # a network over observations with `action_dim`

    def setup(self) -> None:
        """Create the target network and the optimizer."""
        self.target_network = frozen_copy(self.value_network)
        self.target_parameters = list(self.target_network.parameters())
        self.optimizer = self.network_optimizer(
            self.value_network.parameters(), max_grad_norm=self.config.max_grad_norm
        )
        self._noisy = {
            id(network): noisy_layers(network)
            for network in (self.value_network, self.target_network)
        }
        if isinstance(self.config, EpsilonGreedy):
            self.share_random = Scalar(1.0, self.device)

    @property
    def value_network(self) -> nn.Module:
        """The part of `q_network` that regression moves and that has a target."""
        network: nn.Module = self.q_network
        return network

    def noise(self, *networks: nn.Module) -> AbstractContextManager[None]:
        """Draw noise for the noisy layers of networks, to be used within; nothing without any."""
        layers = [layer for network in networks for layer in self._noisy[id(network)]]
        return fresh_noise(layers, self.rng)

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Do one update of the network and, when due, of its target."""
        loss, metrics, priority = self.td_loss(batch)
        self.optimizer.minimize(loss)
        self.update_rest(metrics)
        if self.phase() == MOVE_TARGET:
            polyak_update(self.target_parameters, self.optimizer.parameters, self.setting("tau"))
        return StepOutput({"loss": loss, **metrics}, priority=priority)

    def phase(self) -> int:
        """Tell whether the target network moves after the next gradient step."""
        due = (self.num_updates.value + 1) % self.config.target_update_interval == 0
        return MOVE_TARGET if due else KEEP_TARGET

    def td_loss(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the loss `[S]`, metrics, and new priorities `[S, B]`."""
        raise NotImplementedError

    def update_rest(self, measured: dict[str, Tensor]) -> None:
        """Move what has an optimizer of its own, by the losses among the metrics."""

    def greedy(self, obs: Tensor, q: Tensor) -> Tensor:
        """Return the action `[S, B]` of the largest Q `[S, B, A]` among those allowed in `obs`."""
        return best_allowed(q, self.allowed(obs)).argmax(-1)

    def q_values(self, obs: Tensor, network: nn.Module | None = None) -> Tensor:
        """Return Q of every action `[S, B, A]`."""
        q: Tensor = (network or self.q_network)(obs)
        return q

    def set_progress(self, progress: float) -> None:
        """Move the learning rate and epsilon."""
        super().set_progress(progress)
        if isinstance(self.config, EpsilonGreedy):
            self.share_random.set(self.epsilon())

    def epsilon(self) -> float:
        """Return the share of random actions at the current progress, for the log.

        An update reads `share_random.tensor`: this number would be a constant of its program.
        """
        config = self.config
        return config.epsilon(self.progress) if isinstance(config, EpsilonGreedy) else 0.0

    def schedule_values(self, index: int = 0) -> dict[str, float]:
        """Return the learning rate, and epsilon where the settings have one."""
        values = super().schedule_values(index)
        explores = isinstance(self.config, EpsilonGreedy)
        return values | {"epsilon": self.epsilon()} if explores else values

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose the best action, or when exploring, with probability epsilon, a random one."""
        if not explore or not isinstance(self.config, EpsilonGreedy):
            return self.greedy(obs, self.q_values(obs))
        best = self.best_of_drawn(obs)
        if self._noisy[id(self.value_network)]:
            return best
        return self.epsilon_greedy(obs, best, self.share_random.tensor)

    def exploring_q_values(self, obs: Tensor) -> Tensor:
        """Return the Q that exploring actions are best for, where it is an estimate by samples."""
        return self.q_values(obs)

    def best_of_drawn(self, obs: Tensor) -> Tensor:
        """Choose the best action by an estimate with noise, where the network has any."""
        with self.noise(self.value_network):
            return self.greedy(obs, self.exploring_q_values(obs))

    def sample_from(self, state: ActingState | None, obs: Tensor) -> Tensor:
        """Choose the best action by a drawn estimate, or a random one by `eval_epsilon`."""
        shown = self.shown(state, obs)
        return self.epsilon_greedy(shown, self.best_of_drawn(shown), self.config.eval_epsilon)

    def random_action(self, num_envs: int, allowed: Tensor | None = None) -> Tensor:
        """Draw actions uniformly."""
        return self.random_choice(self.q_network.action_dim, num_envs, allowed)

    def epsilon_greedy(self, obs: Tensor, best: Tensor, epsilon: float | Tensor) -> Tensor:
        """Replace the best actions `[S, n]` for `obs` by random ones with probability epsilon."""
        lottery = self.rng.uniform(best.shape[1])
        drawn = self.random_action(best.shape[1], self.allowed(obs))
        return torch.where(lottery < epsilon, drawn, best)

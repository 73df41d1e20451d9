"""Fitted Q evaluation (Le et al., 2019, arXiv:1903.08738; Paine et al., 2020, arXiv:2007.09055).

Regresses Q(s, a) on r + gamma Q-(s', pi(s')) over recorded transitions, for a policy pi that is
fixed: the value of pi, without an environment.  The seed axis holds the members of a bootstrap.

Deviations: the target network follows by Polyak averaging instead of being copied after each full
    regression, and the estimate is read from it; the learning rate falls linearly to zero; hidden
    layers are normalised; outputs are in units of the data's own returns; the level of Q, the part
    that all states share, is solved for instead of being iterated (`level`).

It is not a learner: it has neither a policy of its own nor a `SPEC`.

Shapes: S members, B batch, D entries of an observation, A entries of an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rl_training.algorithms.base import frozen_copy, polyak_update, td_target
from rl_training.algorithms.optim import Adam
from rl_training.data.batch import TransitionBatch
from rl_training.models.layers import StackedMLP
from rl_training.rng import Rng
from rl_training.state import Stateful
from rl_training.validation import PositiveFloat, PositiveInt, Seed, Settings, Sizes

FEWEST_STEPS, MOST_STEPS, STEPS_PER_HORIZON = 10_000, 30_000, 100
"""Gradient steps where none are given: for each step of the horizon 1 / (1 - gamma), within limits.

The level of Q needs none of them, so the most are enough for tasks that forget where they started
within a few hundred steps."""


class FQEConfig(Settings):
    """Settings of fitted Q evaluation."""

    gamma: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Discount of the value that is estimated; null takes the checkpoint's own."""
    updates: PositiveInt | None = None
    """Gradient steps; null takes 10,000, and 100 / (1 - gamma) up to 30,000 where that is more."""
    members: Annotated[int, Field(ge=2, le=10_000)] = 20
    """Resamples of the episodes, each with a network of its own; the interval is theirs."""
    batch_size: PositiveInt = 256
    """Transitions per gradient step and member."""
    hidden_sizes: Sizes = (64, 64)
    """Widths of the hidden layers."""
    use_layer_norm: bool = True
    """Normalise hidden layers, which bounds Q at actions the data lacks (arXiv:2302.02948, 4.2)."""
    learning_rate: PositiveFloat = 1e-3
    """Adam learning rate at the start; it falls linearly to zero."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Share of the network that its target takes on per gradient step."""
    seed: Seed = 0
    """Seed of the resamples, the initial networks, the batches and sampled actions."""

    @property
    def gradient_steps(self) -> int:
        """Gradient steps to take; gamma must be given."""
        assert self.gamma is not None
        if self.updates is not None:
            return self.updates
        wanted = round(STEPS_PER_HORIZON / (1 - self.gamma))
        return min(max(wanted, FEWEST_STEPS), MOST_STEPS)


@dataclass(frozen=True)
class ValueUnits:
    """Q = centre + scale f, where f is what the network gives.

    With r' = (r - (1 - discount) centre) / scale, f obeys Q's own equation,
    f(s, a) = r' + discount f(s', a'), terminations included.  Since centre and scale are those of
    the data's returns, a factor on every reward changes nothing but the factor on the result.
    """

    centre: float
    scale: float

    @classmethod
    def of(cls, returns: Tensor) -> ValueUnits:
        """Take mean and standard deviation of discounted returns `[N]`, on the host."""
        wide = returns.double()
        centre, scale = float(wide.mean()), float(wide.std(correction=0))
        # Constant returns up to rounding: their size is the only scale there is.
        if scale <= 1e-6 * abs(centre):
            scale = abs(centre)
        return cls(centre, scale or 1.0)

    def reward(self, reward: Tensor, discount: Tensor) -> Tensor:
        """Return r' `[...]`; `discount` is zero at terminations."""
        return (reward - (1 - discount) * self.centre) / self.scale

    def value(self, output: Tensor) -> Tensor:
        """Map the network's output to units of the rewards."""
        return self.centre + self.scale * output


class FQE(Stateful):
    """Q networks of S members, their targets and one optimizer."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        config: FQEConfig,
        *,
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: D.
            action_dim: A, or the number of discrete actions, which the network gets one-hot.
            config: Sizes and rates.
            seeds: One per member.
            device: Where they live.
        """
        self.config, self.action_dim = config, action_dim
        sizes = (obs_dim + action_dim, *config.hidden_sizes, 1)
        rng = Rng(seeds, "fqe", device)
        self.network = StackedMLP(sizes, rng, layer_norm=config.use_layer_norm)
        self.target = frozen_copy(self.network)
        self.target_parameters = list(self.target.parameters())
        self.offset = torch.zeros(len(seeds), 1, device=device)
        """Level of Q, added to what the networks give, `[S, 1]`."""
        self.optimizer = Adam(self.network.parameters(), config.learning_rate)

    def update(self, batch: TransitionBatch, next_action: Tensor, progress: float) -> Tensor:
        """Take one gradient step.

        Args:
            batch: Transitions, rewards in the network's units.
            next_action: pi(s') `[S, B, A]`, or `[S, B]` int64 where actions are discrete.
            progress: Share of the updates that is done.

        Returns:
            The loss before the step, `[S]`.
        """
        self.optimizer.rate.set(self.config.learning_rate * (1 - progress))
        loss = fqe_loss(self, batch, next_action)
        self.optimizer.minimize(loss)
        polyak_update(self.target_parameters, self.optimizer.parameters, self.config.tau)
        return loss.detach()

    def q_values(self, network: nn.Module, obs: Tensor, action: Tensor) -> Tensor:
        """Return outputs `[S, B]` for `[S, B, D]` and actions `[S, B, A]`, or `[S, B]` int64."""
        if action.dtype == torch.int64:
            action = functional.one_hot(action, self.action_dim).to(obs.dtype)
        output: Tensor = network.forward(torch.cat((obs, action), -1))
        return output.squeeze(-1) + self.offset

    def estimate(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the target network's outputs `[S, B]`, without gradients."""
        with torch.no_grad():
            return self.q_values(self.target, obs, action)


def level(residual: Tensor, discount: Tensor, weight: Tensor) -> Tensor:
    """Return what must be added to Q for its mean Bellman residual to vanish, `[S, 1]`.

    Adding c to every Q changes a residual r + discount Q(s', a') - Q(s, a) by -(1 - discount) c.
    At the solution every residual is zero, so this moves no solution.  By iteration the level grows
    by a share of 1 - gamma a time, long after differences between states have settled.

    Args:
        residual: Of all rows, `[S, N]`.
        discount: Gamma, or 0 at terminations, `[N]`.
        weight: How often a member has each row, `[S, N]`.
    """
    return (weight * residual).sum(1, True) / (weight * (1 - discount)).sum(1, True)


def fqe_loss(learner: FQE, batch: TransitionBatch, next_action: Tensor) -> Tensor:
    """E[(Q(s, a) - r - discount Q-(s', pi(s')))^2], `[S]` (Eq. 2 of arXiv:2007.09055)."""
    next_value = learner.estimate(batch.next_obs, next_action)
    target = td_target(batch.reward, batch.discount, next_value)  # [S, B]
    q = learner.q_values(learner.network, batch.obs, batch.action)
    assert q.shape == target.shape
    return (q - target).square().mean(-1)

"""Implicit Quantile Networks (Dabney et al., 2018, arXiv:1806.06923).

The network answers F^-1(tau) for any fraction tau, given as cosines; a gradient step draws N
fractions for the prediction and N' for the target (Eq. 3), and an action is the best mean of K
quantiles drawn from a distortion of the return, which may be averse to risk.

Overrides: td_loss, q_values, exploring_q_values.
Deviations: acting without exploring uses K midpoints in place of draws, so that it is
    deterministic; double Q-learning is the default; cosines are counted from 1, as in the
    authors' code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.config import part_of
from rl_training.algorithms.losses import midpoints
from rl_training.algorithms.pixel_config import encoder_for
from rl_training.algorithms.quantile import (
    QUANTILE_METRICS,
    QuantileConfig,
    QuantileLearner,
    of_action,
)
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.value_based import Exploration
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.quantile_networks import ImplicitQuantileNetwork
from rl_training.rng import Rng
from rl_training.validation import PositiveInt, Sizes

if TYPE_CHECKING:
    from rl_training.algorithms.fqf import FQFConfig


class IQNConfig(QuantileConfig):
    """Settings of IQN."""

    num_quantiles: PositiveInt = 64
    """Fractions drawn per transition for the prediction, N."""
    num_target_quantiles: PositiveInt = 64
    """Fractions drawn per transition for the target, N'."""
    num_action_quantiles: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Fractions used to compare actions, K."""
    embedding_dim: PositiveInt = 64
    """Number of cosines in the embedding of a fraction."""
    head_hidden_sizes: Sizes = ()
    """Hidden layers after the product of the embeddings of state and fraction."""
    cvar_eta: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Maximise the mean of this lowest share of returns (CVaR); 1 is risk-neutral."""


class IQN(QuantileLearner):
    """Regression of quantiles at drawn fractions."""

    config_class = IQNConfig
    config: IQNConfig
    q_network: ImplicitQuantileNetwork

    def q_values(self, obs: Tensor, network: nn.Module | None = None) -> Tensor:
        """Return the (distorted) expectation of every action `[S, B, A]`, by K midpoints."""
        fractions = midpoints(self.config.num_action_quantiles, self.device)
        chosen = self._part(network)
        tau = fractions.expand(self.num_seeds, 1, -1)
        return self.distorted_mean(chosen, chosen.embed(obs), tau)

    def exploring_q_values(self, obs: Tensor) -> Tensor:
        """Return the same by K draws."""
        return self.sampled_q_values(self.q_network, self.q_network.embed(obs))

    def sampled_q_values(self, network: ImplicitQuantileNetwork, embedding: Tensor) -> Tensor:
        """Estimate the (distorted) expectation of every action `[S, B, A]` by K draws."""
        tau = self.rng.uniform(embedding.shape[1], self.config.num_action_quantiles)
        return self.distorted_mean(network, embedding, tau)

    def distorted_mean(
        self, network: ImplicitQuantileNetwork, embedding: Tensor, tau: Tensor
    ) -> Tensor:
        """Mean of F^-1(beta(tau)) with beta(tau) = eta tau, the CVaR of level eta (Section 3.1)."""
        return network.mean(embedding, self.config.cvar_eta * tau)

    def next_quantiles(self, next_obs: Tensor) -> Tensor:
        """N' quantiles of s' `[S, B, N']` for the best action."""
        target = self._part(self.target_network)
        embedding = target.embed(next_obs)
        chooser = self.q_network if self.config.double else target
        chooser_embedding = chooser.embed(next_obs) if self.config.double else embedding
        best = self.greedy(next_obs, self.sampled_q_values(chooser, chooser_embedding))
        tau = self.rng.uniform(next_obs.shape[1], self.config.num_target_quantiles)
        return of_action(target.quantiles(embedding, tau), best)

    def td_loss(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Quantile Huber loss at drawn fractions."""
        with torch.no_grad(), self.noise(self.q_network, self.target_network):
            next_quantiles = self.next_quantiles(batch.next_obs)
        tau = self.rng.uniform(batch.obs.shape[1], self.config.num_quantiles)
        with self.noise(self.q_network):
            quantiles = of_action(self.q_network(batch.obs, tau), batch.action)
        return self.regress(batch, quantiles, tau, next_quantiles)

    def _part(self, network: nn.Module | None) -> ImplicitQuantileNetwork:
        chosen = network or self.q_network
        assert isinstance(chosen, ImplicitQuantileNetwork)
        return chosen


def iqn_loss(learner: IQN, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute IQN's loss and metrics at the current parameters without changing them."""
    loss, metrics, _ = learner.td_loss(batch)
    return {"loss": loss, **metrics}


def implicit_network(
    env: EnvSpec, config: IQNConfig | FQFConfig, rng: Rng
) -> ImplicitQuantileNetwork:
    """Build the quantile network for a task."""
    noisy = part_of(config, Exploration).noisy
    return ImplicitQuantileNetwork(
        encoder_for(env, config, rng, activation=config.activation, noisy=noisy),
        env.action_dim,
        config.embedding_dim,
        config.head_hidden_sizes,
        activation=config.activation,
        dueling=config.dueling,
        noisy=noisy,
        rng=rng,
    )


def iqn_networks(env: EnvSpec, config: IQNConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the network for a task."""
    return {"q_network": implicit_network(env, config, rng)}


SPEC = AlgorithmSpec(
    name="iqn",
    title="Implicit Quantile Networks",
    paper="arXiv:1806.06923",
    summary="value-based, distributional; quantiles at drawn fractions, risk; discrete actions",
    learner=IQN,
    networks=iqn_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("discrete",),
    obs_ndims=(1, 3),
    metrics=QUANTILE_METRICS,
)

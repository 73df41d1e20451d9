"""Fully Parameterized Quantile Function (Yang et al., 2019, arXiv:1911.02140).

A layer proposes the fractions at which the return distribution is described, and moves them down
the 1-Wasserstein error of that description, whose gradient is known in closed form
(Proposition 1); the quantiles at their midpoints are learned as in IQN, and Q weighs each by the
width of its interval.

Overrides: value_network, update_rest, td_loss, q_values.
Deviations: `uniform_share` of equal widths is mixed into every proposal, so that no interval can
    vanish; the authors' code bounds the largest width by 0.98 instead.  `correct_crossing` keeps
    the boundary terms of the gradient right where learned quantiles cross.  Double Q-learning is
    the default.  Each target quantile counts by the width of its interval: the paper's loss takes
    all as equally likely, which is wrong where widths differ (`weighted_target: false` gives it).
    As in the authors' code the target is read at the fractions of the current state, and fractions
    are those of the online network everywhere.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import weighted_mean
from rl_training.algorithms.iqn import implicit_network
from rl_training.algorithms.optim import RMSprop
from rl_training.algorithms.quantile import (
    QUANTILE_METRICS,
    QuantileConfig,
    QuantileLearner,
    of_action,
    require_outputs,
)
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.quantile_networks import FQFNetwork, Fractions, ImplicitQuantileNetwork
from rl_training.rng import Rng
from rl_training.validation import NonNegativeFloat, PositiveFloat, PositiveInt, Sizes


class FQFConfig(QuantileConfig):
    """Settings of FQF."""

    varying: ClassVar[frozenset[str]] = frozenset({"fraction_learning_rate"})

    num_quantiles: PositiveInt = 32
    """Intervals that describe the return distribution, N."""
    embedding_dim: PositiveInt = 64
    """Number of cosines in the embedding of a fraction."""
    head_hidden_sizes: Sizes = ()
    """Hidden layers after the product of the embeddings of state and fraction."""
    fraction_learning_rate: PositiveFloat = 2.5e-9
    """RMSprop learning rate of the fractions; the paper's, at which they hardly move."""
    entropy_coef: NonNegativeFloat = 1e-3
    """Weight of the entropy of the widths, which keeps them apart; 0 uses the error alone."""
    uniform_share: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of equal widths in every proposal: none is below this over N; 0 has no such bound."""
    weighted_target: bool = True
    """Weight each target quantile by the width of its interval; false is the paper's loss."""
    correct_crossing: bool = False
    """Use absolute differences in the fractions' gradient, which crossing quantiles need."""


class FQF(QuantileLearner):
    """Regression of quantiles at fractions that are learned too."""

    config_class = FQFConfig
    config: FQFConfig
    q_network: FQFNetwork

    def setup(self) -> None:
        """Create the target, the optimizer of the quantiles, and that of the fractions."""
        require_outputs("num_quantiles", self.config.num_quantiles, self.q_network.num_quantiles)
        super().setup()
        self.fraction_optimizer = RMSprop(
            self.q_network.fraction_layer.parameters(), self.rate("fraction_learning_rate")
        )

    @property
    def value_network(self) -> ImplicitQuantileNetwork:
        """The quantiles; the proposal of fractions has no target and its own optimizer."""
        return self.q_network.quantile_network

    def update_rest(self, measured: dict[str, Tensor]) -> None:
        """Move the fractions."""
        self.fraction_optimizer.minimize(measured["fraction_loss"] + measured["entropy_loss"])

    def q_values(self, obs: Tensor, network: nn.Module | None = None) -> Tensor:
        """Return Q `[S, B, A]` = sum_i (tau_{i+1} - tau_i) F^-1(tau_hat_i) (Eq. 1)."""
        chosen = network or self.value_network
        assert isinstance(chosen, ImplicitQuantileNetwork)
        return self.weighted_q(chosen, chosen.embed(obs))

    def weighted_q(self, network: ImplicitQuantileNetwork, embedding: Tensor) -> Tensor:
        """Return Q `[S, B, A]` of embedded states."""
        fractions = self.q_network.fractions(embedding)
        return network.mean(embedding, fractions.tau_hats, fractions.widths)

    def next_quantiles(self, next_obs: Tensor, tau_hats: Tensor) -> Tensor:
        """Quantiles of s' `[S, B, N]` for the best action, at the fractions of s."""
        target = self.target_network
        assert isinstance(target, ImplicitQuantileNetwork)
        embedding = target.embed(next_obs)
        q = self.q_values(next_obs) if self.config.double else self.weighted_q(target, embedding)
        return of_action(target.quantiles(embedding, tau_hats), self.greedy(next_obs, q))

    def td_loss(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Quantile Huber loss at the proposed fractions, and the loss of the proposal."""
        network = self.value_network
        with self.noise(network):
            embedding = network.embed(batch.obs)  # once; every use below reads it
            fractions = self.q_network.fractions(embedding)
            hats = of_action(network.quantiles(embedding, fractions.tau_hats), batch.action)
            with torch.no_grad():
                inner = fractions.taus[..., 1:-1]
                at_taus = of_action(network.quantiles(embedding, inner), batch.action)
        with torch.no_grad(), self.noise(network, self.target_network):
            next_quantiles = self.next_quantiles(batch.next_obs, fractions.tau_hats)
        widths = fractions.widths
        loss, metrics, priority = self.regress(
            batch,
            hats,
            fractions.tau_hats,
            next_quantiles,
            widths=widths,
            # The target is read at the same fractions, so its quantiles have the same widths.
            target_weight=widths if self.config.weighted_target else None,
        )
        gradient = fraction_gradient(
            at_taus, hats.detach(), correct_crossing=self.config.correct_crossing
        )
        proposal = weighted_mean(fraction_loss(fractions.taus, gradient), batch.weight)
        metrics |= {"fraction_loss": proposal} | self.fraction_metrics(fractions)
        return loss, metrics, priority

    def fraction_metrics(self, fractions: Fractions) -> dict[str, Tensor]:
        """Return the entropy term, which has a gradient, and where the fractions lie."""
        taus = fractions.taus.detach()
        N = self.config.num_quantiles
        return {
            "entropy_loss": -self.config.entropy_coef * fractions.entropy.mean(-1),
            "fraction_entropy": fractions.entropy,
            "fraction_width_min": fractions.widths.amin(-1),
            "fraction_low": taus[..., max(N // 4, 1)],
            "fraction_middle": taus[..., max(N // 2, 1)],
            "fraction_high": taus[..., max(3 * N // 4, 1)],
        }


def fraction_gradient(
    quantiles_tau: Tensor, quantile_hats: Tensor, *, correct_crossing: bool = False
) -> Tensor:
    """Derivative of the 1-Wasserstein error in each inner fraction, `[..., N - 1]`.

    `dW/dtau_i = 2 F^-1(tau_i) - F^-1(tau_hat_i) - F^-1(tau_hat_{i-1})` (Proposition 1), which
    needs quantiles in order.  Corrected, its two parts are the absolute differences at
    the boundary of neighbouring intervals: equal in order, right also where quantiles cross.

    Args:
        quantiles_tau: F^-1 at the inner fractions `[..., N - 1]`.
        quantile_hats: F^-1 at the midpoints `[..., N]`.
        correct_crossing: Use absolute differences.
    """
    from_left = quantiles_tau - quantile_hats[..., :-1]
    to_right = quantile_hats[..., 1:] - quantiles_tau
    if correct_crossing:
        return from_left.abs() - to_right.abs()
    return from_left - to_right


def fraction_loss(taus: Tensor, gradient: Tensor) -> Tensor:
    """Return a number per sample `[...]` whose gradient in the inner `taus` is `gradient`."""
    return (gradient.detach() * taus[..., 1:-1]).sum(-1)


def fqf_loss(learner: FQF, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute FQF's losses and metrics at the current parameters without changing them."""
    loss, metrics, _ = learner.td_loss(batch)
    return {"loss": loss, **metrics}


def fqf_networks(env: EnvSpec, config: FQFConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the network for a task."""
    network = FQFNetwork(
        implicit_network(env, config, rng),
        config.num_quantiles,
        uniform_share=config.uniform_share,
        rng=rng,
    )
    return {"q_network": network}


SPEC = AlgorithmSpec(
    name="fqf",
    title="Fully Parameterized Quantile Function",
    paper="arXiv:1911.02140",
    summary="value-based, distributional; quantiles at learned fractions; discrete actions",
    learner=FQF,
    networks=fqf_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("discrete",),
    obs_ndims=(1, 3),
    metrics=QUANTILE_METRICS
    | {
        "fraction_loss": "loss of the proposed fractions; only its gradient means something",
        "entropy_loss": "minus the weighted entropy of the widths",
        "fraction_entropy": "entropy of the widths of the fractions, at most log N",
        "fraction_width_min": "width of the narrowest interval",
        "fraction_low": "proposed fraction that starts at a quarter",
        "fraction_middle": "proposed fraction that starts at a half",
        "fraction_high": "proposed fraction that starts at three quarters",
    },
)

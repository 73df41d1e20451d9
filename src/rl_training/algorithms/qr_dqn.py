"""Quantile-regression DQN (Dabney et al., 2018, arXiv:1710.10044).

The return of an action is N quantiles at fixed midpoints (2i - 1) / 2N; each is regressed to the
whole target distribution by the quantile Huber loss, and Q is their mean (Algorithm 1).

Overrides: td_loss, q_values.
Deviations: double Q-learning is the default, as in DQN here; the paper's own choice of action is
    by the target network (`double: false`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_training.algorithms.losses import midpoints
from rl_training.algorithms.quantile import (
    QUANTILE_METRICS,
    QuantileConfig,
    QuantileLearner,
    of_action,
    require_outputs,
    return_network,
)
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.quantile_networks import QuantileNetwork
from rl_training.rng import Rng


class QRDQNConfig(QuantileConfig):
    """Settings of QR-DQN."""


class QRDQN(QuantileLearner):
    """Regression of quantiles at fixed fractions."""

    config_class = QRDQNConfig
    q_network: QuantileNetwork

    def setup(self) -> None:
        """Check the number of quantiles."""
        require_outputs("num_quantiles", self.config.num_quantiles, self.q_network.num_quantiles)
        super().setup()

    def q_values(self, obs: Tensor, network: nn.Module | None = None) -> Tensor:
        """Return Q `[S, B, A]`, the mean of the quantiles."""
        quantiles: Tensor = (network or self.q_network)(obs)
        return quantiles.mean(-1)

    def next_quantiles(self, next_obs: Tensor) -> Tensor:
        """Quantiles of s' `[S, B, N]` for the action that has the largest mean."""
        quantiles: Tensor = self.target_network(next_obs)  # [S, B, A, N]
        q = self.q_values(next_obs) if self.config.double else quantiles.mean(-1)
        return of_action(quantiles, self.greedy(next_obs, q))

    def td_loss(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Quantile Huber loss against the target distribution."""
        with torch.no_grad(), self.noise(self.q_network, self.target_network):
            next_quantiles = self.next_quantiles(batch.next_obs)
        with self.noise(self.q_network):
            quantiles = of_action(self.q_network(batch.obs), batch.action)
        tau = midpoints(self.config.num_quantiles, self.device)
        return self.regress(batch, quantiles, tau, next_quantiles)


def qr_dqn_loss(learner: QRDQN, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute QR-DQN's loss and metrics at the current parameters without changing them."""
    loss, metrics, _ = learner.td_loss(batch)
    return {"loss": loss, **metrics}


def qr_dqn_networks(env: EnvSpec, config: QRDQNConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the network for a task."""
    return {"q_network": return_network(env, config, config.num_quantiles, rng)}


SPEC = AlgorithmSpec(
    name="qr_dqn",
    title="Quantile-Regression DQN",
    paper="arXiv:1710.10044",
    summary="value-based, distributional; quantiles at fixed fractions; discrete actions",
    learner=QRDQN,
    networks=qr_dqn_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("discrete",),
    obs_ndims=(1, 3),
    metrics=QUANTILE_METRICS,
)

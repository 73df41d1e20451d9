"""Deep Q-Network (Mnih et al., 2015) with the parts of Rainbow that need no other head.

Double Q-learning (van Hasselt et al., 2016), dueling head (Wang et al., 2016), n-step targets and
prioritized replay (Schaul et al., 2016) are settings; n-step and priorities belong to the replay.

Deviations: Adam instead of RMSProp; Huber loss with unit width in place of clipped errors, which
    has the same gradient; double Q-learning is the default.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import td_target, weighted_mean
from rl_training.algorithms.config import part_of
from rl_training.algorithms.losses import huber
from rl_training.algorithms.own_encoders import encoder_of
from rl_training.algorithms.pixel_config import PixelConfig, encoder_for, own_features, reads_parts
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.value_based import Exploration, ValueBased, ValueBasedConfig
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.heads import best_allowed
from rl_training.models.mlp_q_network import MLPQNetwork, QNetwork
from rl_training.models.recurrent_mlp import RecurrentQNetwork
from rl_training.rng import Rng
from rl_training.validation import Settings


class DQNConfig(ValueBasedConfig):
    """Settings of DQN."""


class DQN(ValueBased):
    """TD regression of scalar action values; double Q-learning by default."""

    config_class: ClassVar[type[Settings]] = DQNConfig
    q_network: MLPQNetwork | QNetwork | RecurrentQNetwork

    def next_value(self, next_obs: Tensor) -> Tensor:
        """Value of s' `[S, B]`: max_a Q-(s', a), or Q-(s', argmax_a Q(s', a)) when double."""
        target_q = self.q_values(next_obs, self.target_network)
        if not self.config.double:
            return best_allowed(target_q, self.allowed(next_obs)).amax(-1)
        best = self.greedy(next_obs, self.q_values(next_obs))
        return target_q.gather(-1, best.unsqueeze(-1)).squeeze(-1)

    def td_loss(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Huber loss of the TD error, weighted by importance."""
        with self.noise(self.q_network):
            q_values = self.q_values(batch.obs)
        return self.regression(q_values, batch)

    def regression(
        self, q_values: Tensor, batch: TransitionBatch
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Regress Q of the actions taken to its target, given Q(s, .) `[S, B, A]`."""
        with torch.no_grad(), self.noise(self.q_network, self.target_network):
            target = td_target(batch.reward, batch.discount, self.next_value(batch.next_obs))
        q = q_values.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [S, B]
        loss = weighted_mean(huber(q, target), batch.weight)
        size = (q.detach() - target).abs()
        metrics = {"q_value_mean": q, "target_mean": target, "td_error_mean": size}
        return loss, metrics, size


def dqn_loss(learner: DQN, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute DQN's loss and metrics at the current parameters without changing them."""
    loss, metrics, _ = learner.td_loss(batch)
    return {"loss": loss, **metrics}


def dqn_networks(env: EnvSpec, config: ValueBasedConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the network for a task."""
    noisy = isinstance(config, Exploration) and config.noisy
    streams, activation = {"dueling": config.dueling, "noisy": noisy}, config.activation
    own, sizes = encoder_of(config), config.hidden_sizes
    if len(env.obs_shape) == 1 and own is None and not reads_parts(env):
        shape = (env.obs_dim, env.action_dim)
        vector = MLPQNetwork(*shape, sizes, activation=activation, **streams, rng=rng)
        return {"q_network": vector}
    if len(env.obs_shape) == 1 and own is not None:
        features = own_features(env, own, sizes, rng, activation=activation, noisy=noisy)
        return {"q_network": QNetwork(features, env.action_dim, **streams, rng=rng)}
    more = part_of(config, PixelConfig).head_hidden_sizes
    encoder = encoder_for(env, config, rng, more=more, activation=activation, noisy=noisy)
    return {"q_network": QNetwork(encoder, env.action_dim, **streams, rng=rng)}


SPEC = AlgorithmSpec(
    name="dqn",
    title="Deep Q-Network",
    paper="doi:10.1038/nature14236",
    summary="value-based; double, dueling, n-step, prioritized; discrete actions",
    learner=DQN,
    networks=dqn_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("discrete",),
    obs_ndims=(1, 3),
    metrics={
        "loss": "Huber loss of the TD error",
        "q_value_mean": "mean Q of the actions taken",
        "target_mean": "mean regression target",
        "td_error_mean": "mean absolute TD error",
    },
)

"""Conservative Q-Learning over discrete actions (Kumar et al., 2020, arXiv:2006.04779), CQL(H).

Double DQN on a dataset, whose Q is pushed down over all actions and up at the data's: the penalty
is log sum_a exp Q(s, a) - Q(s, a_data) (Eq. 4), here a sum over every action and so exact.

Overrides: td_loss.
Deviations: scalar Q, where the authors' Atari runs have quantiles (QR-DQN); the log-sum-exp has a
    temperature, 1 in the paper; online, a fixed share of actions is random.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.base import add_weighted, weighted_mean
from rl_training.algorithms.dqn import DQN, dqn_loss, dqn_networks
from rl_training.algorithms.pixel_config import PixelConfig
from rl_training.algorithms.sources import OfflineToOnlineSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.value_based import ValueBasedConfig
from rl_training.data.batch import TransitionBatch
from rl_training.models.heads import best_allowed
from rl_training.validation import Fraction, PositiveFloat, PositiveInt


class DiscreteCQLConfig(ValueBasedConfig):
    """Settings of discrete CQL."""

    varying: ClassVar[frozenset[str]] = frozenset({"cql_alpha", "cql_temperature"})

    batch_size: PositiveInt = 64
    """Transitions per gradient step and seed."""
    cql_alpha: PositiveFloat = 1.0
    """Weight of the conservative penalty; towards 0 it is double DQN on the data."""
    cql_temperature: PositiveFloat = 1.0
    """Temperature of the log-sum-exp; towards 0 only the largest Q is pushed down."""
    exploration: Fraction = 0.05
    """Share of random actions when exploring, that is online; 0 does not explore."""


class DiscreteCQL(DQN):
    """Double DQN with conservative values."""

    config_class = DiscreteCQLConfig
    parts = (OfflineToOnlineSettings, PixelConfig)
    config: DiscreteCQLConfig

    def td_loss(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Huber loss of the TD error plus the weighted penalty."""
        q_values = self.q_values(batch.obs)  # [S, B, A]
        td_loss, metrics, size = self.regression(q_values, batch)
        # Actions that are not allowed are not off the data: nobody could take them.
        gap = self.penalty(best_allowed(q_values, self.allowed(batch.obs)), batch.action)  # [S, B]
        loss = add_weighted(td_loss, weighted_mean(gap, batch.weight), self.setting("cql_alpha"))
        return loss, metrics | {"td_loss": td_loss.detach(), "cql_penalty": gap.detach()}, size

    def penalty(self, q_values: Tensor, action: Tensor) -> Tensor:
        """T log sum_a exp(Q(s, a) / T) - Q(s, a_data), `[S, B]`; T log A where Q is uniform."""
        temperature = self.setting("cql_temperature", 2)
        scaled = q_values / self.setting("cql_temperature", 3)
        data = q_values.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return temperature * torch.logsumexp(scaled, -1) - data

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose the best action, or with probability `exploration` a random one if asked to."""
        best = super().choose(obs)
        return self.epsilon_greedy(obs, best, self.config.exploration) if explore else best


def discrete_cql_loss(learner: DiscreteCQL, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the loss and metrics at the current parameters without changing them."""
    return dqn_loss(learner, learner.normalized(batch))


SPEC = AlgorithmSpec(
    name="discrete_cql",
    title="Discrete Conservative Q-Learning",
    paper="arXiv:2006.04779",
    summary="offline; double DQN that is pessimistic off the data; discrete actions",
    learner=DiscreteCQL,
    networks=dqn_networks,
    loop=Loop.OFFLINE,
    action_kinds=("discrete",),
    obs_ndims=(1, 3),
    counterpart="cql",
    metrics={
        "loss": "Huber loss of the TD error plus the weighted penalty",
        "td_loss": "Huber loss of the TD error",
        "cql_penalty": "log-sum-exp of Q minus Q of the data's action",
        "q_value_mean": "mean Q of the data's actions",
        "target_mean": "mean regression target",
        "td_error_mean": "mean absolute TD error",
    },
)

"""Advantage-Weighted Actor-Critic (Nair et al., 2020, arXiv:2006.09359), outside the package.

Critics regress to the value of the policy's own actions; the policy clones the data, weighted by
the exponential of its advantage, so that it improves without leaving the data.

    PYTHONPATH=examples/plugin rl-training train --config examples/plugin/awac_pendulum.yaml

Overrides: td_target, actor_loss, choose.
Deviations: weights are clipped where the authors' code divides them by their sum over the batch.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.actor_critic import ActorCritic, ActorCriticConfig, Loss, networks_of
from rl_training.algorithms.base import td_target
from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.sources import OfflineToOnlineSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models import MLPSACModel
from rl_training.models.actor_with_critics import tanh_gaussian_log_prob, tanh_gaussian_sample
from rl_training.validation import PositiveFloat


class AWACConfig(ActorCriticConfig):
    """Settings of AWAC."""

    varying: ClassVar[frozenset[str]] = frozenset({"temperature"})

    temperature: PositiveFloat = 1.0
    """Scale of the advantage in the weights (lambda in the paper); large values clone the data."""
    max_weight: PositiveFloat = 100.0
    """Largest weight of a transition in the policy's loss."""


class AWAC(ActorCritic):
    """Advantage-weighted cloning against critics of the policy's own actions."""

    config_class = AWACConfig
    parts = (LearningRate, OfflineToOnlineSettings)
    config: AWACConfig
    model: MLPSACModel

    def sample_action(self, obs: Tensor) -> Tensor:
        """Draw a ~ pi(.|s), `[S, B, A]`."""
        mean, log_std = self.model.policy(obs)
        noise = self.rng.normal(obs.shape[1], self.model.action_dim)
        return tanh_gaussian_sample(mean, log_std, noise)[0]

    def td_target(self, batch: TransitionBatch) -> Loss:
        """R + discount min_i Q_i(s', a') with a' of the policy (Eq. 9)."""
        action = self.sample_action(batch.next_obs)
        q = self.model.q_values(batch.next_obs, action, self.target_critic).amin(1)
        target = td_target(batch.reward, batch.discount, q)
        return target, {"target_q_mean": target}

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """-E[exp((Q(s, a) - V(s)) / lambda) log pi(a|s)] (Eq. 13), V by one action of pi."""
        with torch.no_grad():
            value = self.model.q_values(batch.obs, self.sample_action(batch.obs)).amin(1)
            advantage = self.model.q_values(batch.obs, batch.action).amin(1) - value  # [S, B]
            weight = (advantage / self.setting("temperature", 2)).exp()
            weight = weight.clamp(max=self.config.max_weight)
        log_prob = tanh_gaussian_log_prob(*self.model.policy(batch.obs), batch.action)
        metrics = {"advantage_mean": advantage, "weight_mean": weight}
        return -(weight * log_prob).mean(1), metrics

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Sample from the policy when exploring, else take its mode."""
        return self.sample_action(obs) if explore else torch.tanh(self.model.policy(obs)[0])


SPEC = AlgorithmSpec(
    name="awac",
    title="Advantage-Weighted Actor-Critic",
    paper="arXiv:2006.09359",
    summary="offline, then online; advantage-weighted cloning; continuous actions",
    learner=AWAC,
    networks=networks_of(MLPSACModel),
    loop=Loop.OFFLINE,
    action_kinds=("continuous",),
    metrics={
        "critic_loss": "squared TD error, summed over critics",
        "actor_loss": "-log pi of the data's actions, weighted by advantage",
        "target_q_mean": "mean regression target",
        "advantage_mean": "mean of Q(s, a) - V(s) on the data",
        "weight_mean": "mean weight of a transition in the actor's loss",
    },
)

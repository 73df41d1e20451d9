"""Implicit Q-Learning (Kostrikov et al., 2021, arXiv:2110.06169).

V regresses to an upper expectile of Q over the actions of the data, Q regresses to V of the next
state, and the policy clones the data weighted by advantage: no action outside the data is valued.

Overrides: setup, step, td_target, actor_loss, set_progress.
Deviations: the actor's learning rate is constant unless `actor_lr_schedule` is given, where the
    authors decay it by a cosine; initial weights are PyTorch's uniform ones, where theirs are
    orthogonal with gain sqrt 2 and no bias; `num_critics` may be any number, the minimum is over
    all.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.actor_critic import ActorCritic, ActorCriticConfig, Loss, networks_of
from rl_training.algorithms.base import StepOutput, polyak_update, td_target, weighted_mean
from rl_training.algorithms.config import LearningRate, LRSchedule
from rl_training.algorithms.losses import expectile_loss
from rl_training.algorithms.optim import learning_rate_factor
from rl_training.algorithms.sources import OfflineToOnlineSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPIQLModel
from rl_training.models.layers import dropout
from rl_training.validation import NonNegativeFloat, PositiveFloat


class IQLConfig(ActorCriticConfig):
    """Settings of IQL."""

    varying: ClassVar[frozenset[str]] = frozenset({"expectile", "beta"})

    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Expectile of Q that V regresses to; 0.5 is the mean, towards 1 the best of the data."""
    beta: NonNegativeFloat = 3.0
    """Inverse temperature of the advantage weights; 0 clones the data."""
    max_advantage_weight: PositiveFloat = 100.0
    """Largest weight of a transition in the policy's loss."""
    policy_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the policy's hidden outputs that its loss drops at random; 0.1 on some of the
    paper's tasks with little data."""
    value_layer_norm: bool = False
    """Normalise the hidden layers of V; `use_layer_norm` does so for the critics."""
    actor_lr_schedule: LRSchedule | None = None
    """Schedule of the actor's learning rate, a cosine in the paper; null uses `lr_schedule`."""


class IQL(ActorCritic):
    """Expectile value, critics that bootstrap from it, and advantage-weighted cloning."""

    config_class = IQLConfig
    parts = (LearningRate, OfflineToOnlineSettings)
    config: IQLConfig
    model: MLPIQLModel

    def setup(self) -> None:
        """Add the value's optimizer, and the policy's deviation to the actor's."""
        super().setup()
        config = self.config
        self.value_optimizer = self.network_optimizer(
            self.model.value_net.parameters(), max_grad_norm=config.max_grad_norm
        )
        self.actor_optimizer = self.network_optimizer(
            self.model.policy_parameters(),
            self.actor_rate,
            max_grad_norm=config.max_grad_norm,
        )

    def set_progress(self, progress: float) -> None:
        """Move the schedules: the actor's own, where it has one, and that of the rest."""
        super().set_progress(progress)
        schedule, actor = self.config.actor_lr_schedule, self.actor_optimizer
        if schedule is not None:
            factor = self.rate_factor * learning_rate_factor(schedule, self.progress)
            actor.rate.set(actor.base_learning_rate * factor)

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Update value, actor, critics and targets, in the order of the authors' code."""
        q = self.data_q(batch)
        value_loss, value_metrics = self.value_loss(batch, q)
        self.value_optimizer.minimize(value_loss)
        # From here on V is the new one, in the policy's weights and in the critics' target.
        actor_loss, actor_metrics = self.actor_loss(batch, q)
        self.actor_optimizer.minimize(actor_loss)
        with torch.no_grad():
            target, target_metrics = self.td_target(batch)
        critic_loss, _, td_error = self.critic_loss(batch, target)
        self.critic_optimizer.minimize(critic_loss)
        tau = self.setting("tau")
        polyak_update(self.target_parameters, self.critic_optimizer.parameters, tau)
        metrics = {"critic_loss": critic_loss, "value_loss": value_loss, "actor_loss": actor_loss}
        metrics |= value_metrics | actor_metrics | target_metrics
        return StepOutput(metrics, priority=td_error)

    def data_q(self, batch: TransitionBatch) -> Tensor:
        """Least target Q of the data's own actions, `[S, B]`, without gradient."""
        with torch.no_grad():
            return self.model.q_values(batch.obs, batch.action, self.target_critic).amin(1)

    def value_loss(self, batch: TransitionBatch, q: Tensor) -> Loss:
        """E[|tau - 1(u < 0)| u^2] with u = min_i Q_i(s, a) - V(s) (Eq. 5); `q` is `[S, B]`."""
        value = self.model.value(batch.obs)
        loss = expectile_loss(q - value, self.setting("expectile", 2))
        return weighted_mean(loss, batch.weight), {"value_mean": value}

    def actor_loss(self, batch: TransitionBatch, q: Tensor | None = None) -> Loss:
        """-E[exp(beta (min_i Q_i(s, a) - V(s))) log pi(a|s)], weights clipped (Eq. 7).

        Args:
            batch: Transitions, observations as the networks see them.
            q: The batch's `data_q`, where it is at hand.
        """
        with torch.no_grad():
            q = self.data_q(batch) if q is None else q
            advantage = q - self.model.value(batch.obs)  # [S, B]
            weight = (self.setting("beta", 2) * advantage).exp()
            weight = weight.clamp(max=self.config.max_advantage_weight)
        rows, rate = batch.obs.shape[1], self.config.policy_dropout
        with dropout(self.model.actor, rate, rows, self.rng):
            log_prob = self.log_prob(batch)
        loss = -(weight * log_prob).mean(1)
        return loss, {"advantage_mean": advantage, "weight_mean": weight}

    def log_prob(self, batch: TransitionBatch) -> Tensor:
        """Return the policy's log density at the data's actions, `[S, B]`."""
        return self.model.log_prob(batch.obs, batch.action)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Bootstrap from the value, r + discount V(s') (Eq. 6): no action is asked for at s'."""
        target = td_target(batch.reward, batch.discount, self.model.value(batch.next_obs))
        return target, {"target_q_mean": target}

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Sample from the policy when exploring, else take its mean; clipped to the box."""
        mean, log_std = self.model.policy(obs)
        if explore:
            noise = self.rng.normal(obs.shape[1], self.model.action_dim)
            mean = torch.addcmul(mean, log_std.exp(), noise)
        return mean.clamp(-1, 1)


def iql_loss(learner: IQL, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the losses and metrics at the current parameters without changing them.

    In an update actor and critics use the value after its step; here all use the current one.
    """
    batch = learner.normalized(batch)
    q = learner.data_q(batch)
    value_loss, value_metrics = learner.value_loss(batch, q)
    actor_loss, actor_metrics = learner.actor_loss(batch, q)
    with torch.no_grad():
        target, target_metrics = learner.td_target(batch)
    critic_loss = learner.critic_loss(batch, target)[0]
    losses = {"critic_loss": critic_loss, "value_loss": value_loss, "actor_loss": actor_loss}
    return losses | value_metrics | actor_metrics | target_metrics


iql_networks = networks_of(MLPIQLModel, "value_layer_norm")


SPEC = AlgorithmSpec(
    name="iql",
    title="Implicit Q-Learning",
    paper="arXiv:2110.06169",
    summary="offline; expectile value and advantage-weighted cloning; continuous actions",
    learner=IQL,
    networks=iql_networks,
    loop=Loop.OFFLINE,
    action_kinds=("continuous",),
    counterpart="discrete_iql",
    metrics={
        "critic_loss": "squared TD error, summed over critics",
        "value_loss": "expectile loss of V against min target Q",
        "actor_loss": "-log pi of the data's actions, weighted by advantage",
        "advantage_mean": "mean of min target Q - V on the data",
        "weight_mean": "mean weight of a transition in the actor's loss",
        "value_mean": "mean V before its step",
        "target_q_mean": "mean regression target of the critics",
    },
)

"""Flow Q-Learning (Park et al., 2025, arXiv:2502.02538).

A flow learns the data's actions, however many modes they have.  The policy that acts maps noise to
an action in one step: it is distilled from the flow and maximises Q besides, so that no gradient
has to pass through the flow's many steps.

Overrides: setup, td_target, actor_loss.
Deviations: critics, policy and targets move one after the other, as in every actor-critic here,
    where the authors' code computes all from the networks before the step; the critics' errors are
    summed over critics, theirs averaged, which Adam does not see.  LayerNorm comes before the
    activation, not after.  `num_critics` and `n_step` may be any number.  Prediction without
    randomness takes the action of zero noise; evaluation samples noise, as theirs does.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl_training.algorithms.actor_critic import ActorCritic, ActorCriticConfig, Loss, networks_of
from rl_training.algorithms.base import td_target
from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.sources import OfflineToOnlineSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPFQLModel
from rl_training.models.layers import ActivationName, WeightsName
from rl_training.validation import NonNegativeFloat, PositiveInt, Sizes


class FQLConfig(ActorCriticConfig):
    """Settings of FQL."""

    varying: ClassVar[frozenset[str]] = frozenset({"alpha"})

    alpha: NonNegativeFloat = 10.0
    """Weight of distillation against Q in the policy's loss: to be chosen for each task,
    between 3 and 30,000 in the paper; 0 ignores the data, a large value clones it."""
    flow_steps: PositiveInt = 10
    """Steps in which the flow turns noise into the action that is distilled."""
    q_agg: Literal["mean", "min"] = "mean"
    """How target critics are combined: their mean, or their minimum."""
    normalize_q: bool = False
    """Divide Q by its mean size in the policy's loss, so that `alpha` does not depend on the scale
    of rewards; the authors advise it for new tasks, with an `alpha` between 0.03 and 10."""
    hidden_sizes: Sizes = (512, 512, 512, 512)
    """Widths of the hidden layers of policy, flow and critics."""
    actor_hidden_sizes: Sizes | None = None
    """Widths of the hidden layers of policy and flow; null uses `hidden_sizes`."""
    activation: ActivationName = "gelu"
    """What follows each hidden layer of policy, flow and critics."""
    num_critics: PositiveInt = 2
    """Members of the critic ensemble; the policy follows their mean."""
    use_layer_norm: bool = True
    """Normalise the critics' hidden layers."""
    weight_init: WeightsName = "glorot"
    """How initial weights are drawn: `glorot` is the authors', `uniform` PyTorch's own; `glorot`
    and `orthogonal` have zero biases."""


class FQL(ActorCritic):
    """A flow that clones the data, and a one-step policy between the flow and the critics."""

    config_class = FQLConfig
    parts = (LearningRate, OfflineToOnlineSettings)
    config: FQLConfig
    model: MLPFQLModel

    def setup(self) -> None:
        """Add the flow's parameters to the actor's; no loss has a gradient for both networks."""
        super().setup()
        model, config = self.model, self.config
        self.actor_optimizer = self.network_optimizer(
            [*model.actor.parameters(), *model.flow.parameters()],
            self.actor_rate,
            max_grad_norm=config.max_grad_norm,
        )

    def draw_noise(self, rows: int) -> Tensor:
        """Draw the policy's noise, `[S, B, A]`."""
        return self.rng.normal(rows, self.model.action_dim)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Bootstrap from a' = clip(mu(s', z)), z ~ N(0, I): r + discount agg_i Q'_i(s', a')."""
        noise = self.draw_noise(batch.next_obs.shape[1])
        action = self.model.policy(batch.next_obs, noise).clamp(-1, 1)
        q = self.model.q_values(batch.next_obs, action, self.target_critic)  # [S, N, B]
        value = q.amin(1) if self.config.q_agg == "min" else q.mean(1)
        target = td_target(batch.reward, batch.discount, value)
        return target, {"target_q_mean": target}

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """Flow matching + alpha x distillation - Q: the first trains the flow, the rest the policy.

        Squares are averaged over rows and entries of the action; Q is the mean of the critics.
        """
        flow_loss = self.flow_loss(batch)
        noise = self.draw_noise(batch.obs.shape[1])
        with torch.no_grad():
            cloned = self.model.flow_action(batch.obs, noise, self.config.flow_steps)
        action = self.model.policy(batch.obs, noise)
        distillation = (action - cloned).square().mean((1, 2))
        q = self.model.q_values(batch.obs, action.clamp(-1, 1)).mean(1)  # [S, B]
        size = q.detach().abs().mean(1)  # [S]
        weight = size.reciprocal() if self.config.normalize_q else size.new_ones(size.shape)
        loss = flow_loss + self.setting("alpha") * distillation - weight * q.mean(1)
        metrics = {"flow_loss": flow_loss, "distillation_loss": distillation, "q_mean": q}
        return loss, metrics | {"q_weight": weight}

    def flow_loss(self, batch: TransitionBatch) -> Tensor:
        """E|v(s, (1 - t) x + t a, t) - (a - x)|^2 with x ~ N(0, I) and t ~ U[0, 1], `[S]`."""
        start = self.draw_noise(batch.obs.shape[1])
        time = self.rng.uniform(batch.obs.shape[1], 1)
        position = torch.lerp(start, batch.action, time)
        velocity = self.model.velocity(batch.obs, position, time)
        return (velocity - (batch.action - start)).square().mean((1, 2))

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Map noise to actions when exploring, else take the action of zero noise; clipped."""
        shape = (*obs.shape[:2], self.model.action_dim)
        noise = self.draw_noise(obs.shape[1]) if explore else torch.zeros(shape, device=obs.device)
        return self.model.policy(obs, noise).clamp(-1, 1)


def fql_loss(learner: FQL, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the losses and metrics at the current parameters without changing them."""
    batch = learner.normalized(batch)
    with torch.no_grad():
        target, metrics = learner.td_target(batch)
    actor_loss, actor_metrics = learner.actor_loss(batch)
    losses = {"critic_loss": learner.critic_loss(batch, target)[0], "actor_loss": actor_loss}
    return losses | metrics | actor_metrics


fql_networks = networks_of(MLPFQLModel)


SPEC = AlgorithmSpec(
    name="fql",
    title="Flow Q-Learning",
    paper="arXiv:2502.02538",
    summary="offline; one-step policy distilled from a flow of the data; continuous actions",
    learner=FQL,
    networks=fql_networks,
    loop=Loop.OFFLINE,
    action_kinds=("continuous",),
    eval_deterministic=False,
    metrics={
        "critic_loss": "squared TD error, summed over critics",
        "actor_loss": "flow_loss + alpha x distillation_loss - q_weight x Q",
        "flow_loss": "squared error of the flow's velocity on the data",
        "distillation_loss": "squared distance of the policy's actions to the flow's",
        "q_mean": "mean Q of the policy's actions",
        "q_weight": "weight of Q in the actor's loss",
        "target_q_mean": "mean regression target",
    },
)

"""TD3+BC (Fujimoto & Gu, 2021, arXiv:2106.06860).

TD3 with one more term: the policy maximises lambda Q(s, pi(s)) - (pi(s) - a)^2, where lambda
divides by the mean size of Q, so that the weight of the two terms does not depend on the rewards.

Deviations: observations are divided by their deviation, at least 1e-3, and clipped to +-10, where
    the authors divide by std + 1e-3; entries that are constant in the data are not scaled; actions
    are cloned and noised in [-1, 1] whatever the action box (theirs: in its own units, which
    scales cloning where it is larger); metrics of the actor are those of its last step; online,
    actions get Gaussian noise and the weight of cloning may fall linearly.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.actor_critic import ActorCriticConfig, Loss, networks_of
from rl_training.algorithms.base import ActingState, StepOutput, frozen_copy, polyak_update
from rl_training.algorithms.delayed_actor import DelayedActor
from rl_training.algorithms.losses import td_target
from rl_training.algorithms.online_config import OfflineToOnlineConfig
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.standardized import Standardized
from rl_training.data.batch import TransitionBatch
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.state import Scalar
from rl_training.validation import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt


class TD3BCConfig(ActorCriticConfig, OfflineToOnlineConfig):
    """Settings of TD3+BC."""

    varying: ClassVar[frozenset[str]] = frozenset({"bc_alpha"})

    normalize_observations: bool = True
    """Give the nets observations with the dataset's mean taken off, over its deviation."""
    bc_alpha: PositiveFloat = 2.5
    """Weight of Q against cloning; towards 0 the policy clones the data."""
    policy_noise: NonNegativeFloat = 0.2
    """Deviation of the noise on the target policy's actions."""
    noise_clip: NonNegativeFloat = 0.5
    """Largest size of that noise."""
    policy_delay: PositiveInt = 2
    """Critic updates per update of the policy and the targets."""
    cloning_end: Fraction = 1.0
    """Factor that the cloning term of an online run falls to, linearly; 0 ends as TD3."""
    exploration_noise: NonNegativeFloat = 0.1
    """Deviation of the noise on actions that explore, in learner units; 0 does not explore."""


class TD3BC(Standardized, DelayedActor):
    """Twin critics, a deterministic policy, and cloning."""

    config_class = TD3BCConfig
    config: TD3BCConfig
    model: MLPTD3Model
    actor_metrics = ("actor_loss", "bc_loss", "q_weight")

    def setup(self) -> None:
        """Add the target policy."""
        super().setup()
        self.setup_statistics()
        self.target_actor = frozen_copy(self.model.actor)
        self.target_actor_parameters = list(self.target_actor.parameters())
        self.cloning = Scalar(1.0, self.device)

    def set_progress(self, progress: float) -> None:
        """Move the schedules, and online the weight of cloning."""
        super().set_progress(progress)
        if self.config.online is not None:
            self.cloning.set(1 + (self.config.cloning_end - 1) * self.progress)

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per update of the policy and the targets."""
        return self.config.policy_delay

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Update the critics and, every `policy_delay` updates, policy and targets."""
        return super().step(self.normalized(batch))

    def update_targets(self) -> None:
        """Move both targets, when the policy has moved."""
        if self.moves_actor():
            super().update_targets()
            tau = self.setting("tau")
            polyak_update(self.target_actor_parameters, self.actor_optimizer.parameters, tau)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Clipped double Q at the smoothed target policy: r + discount min_i Q_i(s', a')."""
        shape = (batch.next_obs.shape[1], self.model.action_dim)
        noise = self.rng.normal(*shape) * self.config.policy_noise
        noise = noise.clamp(-self.config.noise_clip, self.config.noise_clip)
        action = (self.model.policy(batch.next_obs, self.target_actor) + noise).clamp(-1, 1)
        q = self.model.q_values(batch.next_obs, action, self.target_critic).amin(1)
        target = td_target(batch.reward, batch.discount, q)
        return target, {"target_q_mean": target}

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """E[-lambda Q_1(s, pi(s)) + c (pi(s) - a)^2] with lambda = alpha / E|Q_1| (Eq. 5 and 6).

        The paper has c = 1; online it may fall with the progress of the run (`cloning_end`).
        """
        action = self.model.policy(batch.obs)
        q = self.model.q_values(batch.obs, action, members=slice(1))[:, 0]  # [S, B]
        weight = self.setting("bc_alpha") / q.detach().abs().mean(1)  # [S]
        cloning = (action - batch.action).square().mean((1, 2))
        loss = self.cloning.tensor * cloning - weight * q.mean(1)
        return loss, {"bc_loss": cloning.detach(), "q_weight": weight}

    def act(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Return the policy's action, with noise when exploring."""
        action = self.model.policy(self.normalize(obs))
        if not explore:
            return action
        noise = self.rng.normal(obs.shape[1], self.model.action_dim)
        return (action + self.config.exploration_noise * noise).clamp(-1, 1)

    def sample_from(self, state: ActingState | None, obs: Tensor) -> Tensor:  # noqa: ARG002
        """Return the policy's action: it has no noise but that of exploring."""
        return self.act(obs)


def td3_bc_loss(learner: TD3BC, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the losses and metrics at the current parameters without changing them."""
    batch = learner.normalized(batch)
    with torch.no_grad():
        target, metrics = learner.td_target(batch)
    actor_loss, actor_metrics = learner.actor_loss(batch)
    losses = {"critic_loss": learner.critic_loss(batch, target)[0], "actor_loss": actor_loss}
    return losses | metrics | actor_metrics


td3_bc_networks = networks_of(MLPTD3Model)


SPEC = AlgorithmSpec(
    name="td3_bc",
    title="TD3 with Behaviour Cloning",
    paper="arXiv:2106.06860",
    summary="offline; deterministic actor-critic held to the data by cloning; continuous actions",
    learner=TD3BC,
    networks=td3_bc_networks,
    loop=Loop.OFFLINE,
    action_kinds=("continuous",),
    metrics={
        "critic_loss": "squared TD error, summed over critics",
        "actor_loss": "cloning error - lambda Q",
        "bc_loss": "squared distance of the policy's actions to the data's",
        "q_weight": "lambda: weight of Q in the actor's loss",
        "target_q_mean": "mean regression target",
    },
)

"""Soft Actor-Critic (Haarnoja et al., 2018, arXiv:1801.01290 and arXiv:1812.05905).

Maximum-entropy actor-critic: critics regress to a soft Bellman target, the policy minimises the
divergence to the Boltzmann distribution of its critics, the temperature tracks a target entropy.

Deviations: the temperature is learned through its logarithm, with the loss of the authors' later
    code, `-log(alpha) (log pi + target entropy)`, whose gradient does not vanish with alpha; no
    separate state value network (as in the second paper); `num_critics` may exceed two, targets
    take the minimum of all, or of some that are drawn (`num_target_critics`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import (
    ActorCritic,
    ActorCriticConfig,
    Loss,
    networks_of,
)
from rl_training.algorithms.base import td_target
from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.sources import TransitionReplay
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPSACModel, tanh_gaussian_sample
from rl_training.validation import Number, PositiveFloat, PositiveInt, Settings

SAC_METRICS = {
    "critic_loss": "squared TD error, summed over critics",
    "actor_loss": "alpha log pi - min Q",
    "target_q_mean": "mean regression target",
    "entropy_term": "mean of -alpha log pi(a'|s') in the target",
    "q_mean": "mean of min Q at the policy's actions",
    "alpha": "temperature",
    "entropy": "policy entropy, estimated on the batch",
}
ACTOR_METRICS = ("actor_loss", "q_mean", "entropy")
"""What a step of the actor measures, for variants whose actor does not move at every update."""
DELAYED_METRICS = SAC_METRICS | {
    "actor_loss": "alpha log pi - Q (see `actor_q`), at the last actor step",
    "q_mean": "mean of that Q at the policy's actions, at the last actor step",
    "entropy": "policy entropy, at the last actor step",
}


class SACConfig(ActorCriticConfig):
    """Settings of SAC, wherever its data comes from."""

    varying: ClassVar[frozenset[str]] = frozenset({"alpha", "initial_alpha", "target_entropy"})

    alpha: PositiveFloat | Literal["auto"] = "auto"
    """Temperature: a number keeps it fixed, `auto` learns it."""
    initial_alpha: PositiveFloat = Field(default=1.0)
    """Start of a learned temperature."""
    target_entropy: Number | None = None
    """Entropy a learned temperature aims at; null means -A, one nat below uniform per dimension."""
    num_target_critics: PositiveInt | None = None
    """Target critics, drawn at random for each update, whose minimum is the target; null takes
    all of them."""
    actor_q: Literal["min", "mean"] = "min"
    """What the actor maximises: the minimum of the critics, or their mean."""

    @model_validator(mode="after")
    def _subset_fits_the_ensemble(self) -> SACConfig:
        if (self.num_target_critics or 1) > self.num_critics:
            raise ValueError(
                f"num_target_critics must be <= num_critics ({self.num_critics}), "
                f"got {self.num_target_critics}"
            )
        return self


class SAC(ActorCritic):
    """Soft actor-critic with fixed or learned temperature."""

    config_class: ClassVar[type[Settings]] = SACConfig
    parts: ClassVar[tuple[type[Settings], ...]] = (LearningRate, TransitionReplay)
    config: SACConfig
    model: MLPSACModel
    entropy_per_entry: ClassVar[float] = -1.0
    """What `target_entropy: null` means, for each entry of an action."""

    def setup(self) -> None:
        """Add the temperature to the actor-critic's parts."""
        super().setup()
        learned = self.config.alpha == "auto"
        start = self.setting("initial_alpha" if learned else "alpha")
        self.log_alpha = (torch.ones(self.num_seeds, device=self.device) * start).log()  # [S]
        if learned:
            self.log_alpha = nn.Parameter(self.log_alpha)
            self.alpha_optimizer = self.adam([self.log_alpha], self.actor_rate)

    @property
    def target_entropy(self) -> float | Tensor:
        """Entropy that a learned temperature aims at: a number, or `[S]` where it varies."""
        if self.config.target_entropy is None:
            return self.entropy_per_entry * self.model.action_dim
        return self.setting("target_entropy")

    def sample_action(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a ~ pi(.|s) with its log density: `[S, B, A]` and `[S, B]`."""
        mean, log_std = self.model.policy(obs)
        noise = self.rng.normal(obs.shape[1], self.model.action_dim)
        return tanh_gaussian_sample(mean, log_std, noise)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Soft Bellman target r + discount (min_i Q_i(s', a') - alpha log pi(a'|s')) (Eq. 3)."""
        action, log_prob = self.sample_action(batch.next_obs)
        members = self.target_members()
        q = self.model.q_values(batch.next_obs, action, self.target_critic, members)  # [S, N, B]
        return self.soft_target(batch, q, log_prob)

    def soft_target(self, batch: TransitionBatch, q: Tensor, log_prob: Tensor) -> Loss:
        """Return the target `[S, B]` that Q of s' `[S, N, B]` gives, with its metrics."""
        entropy_term = self.entropy_term(log_prob)
        target = td_target(batch.reward, batch.discount, self.next_value(q, entropy_term))
        return target, {
            "target_q_mean": target,
            "entropy_term": entropy_term,
        }

    def entropy_term(self, log_prob: Tensor) -> Tensor:
        """Return -alpha log pi, `[S, B]`, with no gradient to the temperature."""
        return -self.log_alpha.detach().exp().unsqueeze(1) * log_prob

    def target_members(self) -> Tensor | None:
        """Draw the target critics of this update, `[S, Z]` for each seed; None is all.

        A random subset of them is REDQ's (Algorithm 1 of arXiv:2101.05982).
        """
        size, members = self.config.num_target_critics, self.model.num_critics
        if size is None or size == members:
            return None
        return self.rng.permutation(members)[:, :size]

    def next_value(self, q: Tensor, entropy_term: Tensor) -> Tensor:
        """Value of s' `[S, B]` from the target critics `[S, N, B]`: their least, plus entropy."""
        return q.amin(1) + entropy_term

    def policy_value(self, q: Tensor) -> Tensor:
        """Value `[S, B]` of the policy's actions that it climbs, from the critics `[S, N, B]`."""
        return q.amin(1) if self.config.actor_q == "min" else q.mean(1)

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """E[alpha log pi(a|s) - min_i Q_i(s, a)] with reparametrised actions (Eq. 9).

        With `actor_q: mean` the mean of the critics is in place of the least of them.
        """
        action, log_prob = self.sample_action(batch.obs)
        q = self.policy_value(self.model.q_values(batch.obs, action))  # [S, B]
        alpha = self.log_alpha.detach().exp().unsqueeze(1)
        metrics = {"q_mean": q, "entropy": -self.row_mean(log_prob.detach(), batch)}
        return self.row_mean(alpha * log_prob - q, batch), metrics

    def row_mean(self, values: Tensor, batch: TransitionBatch) -> Tensor:  # noqa: ARG002
        """Return the mean `[S]` of what the policy's loss has for each row, `[S, B]`."""
        return values.mean(1)

    def update_multipliers(self, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move the temperature towards the target entropy (Eq. 18 of arXiv:1812.05905)."""
        if self.config.alpha == "auto":
            gap = measured["entropy"] - self.target_entropy
            self.alpha_optimizer.minimize(self.log_alpha * gap)
        return {}

    def improve(self, batch: TransitionBatch, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move actor and temperature when it is their turn; the temperature is always known."""
        return super().improve(batch, measured) | {"alpha": self.log_alpha.detach().exp()}

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Sample from the policy when exploring, else take the mode."""
        if explore:
            return self.sample_action(obs)[0]
        return torch.tanh(self.model.policy(obs)[0])


def sac_loss(learner: SAC, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute SAC's losses and metrics at the current parameters without changing them."""
    critic_loss, critic_metrics, _ = learner.regress(batch)
    actor_loss, actor_metrics = learner.actor_loss(batch)
    losses = {"critic_loss": critic_loss, "actor_loss": actor_loss}
    return losses | critic_metrics | actor_metrics


sac_networks = networks_of(MLPSACModel)


SPEC = AlgorithmSpec(
    name="sac",
    title="Soft Actor-Critic",
    paper="arXiv:1812.05905",
    summary="off-policy actor-critic with maximum entropy; continuous actions",
    learner=SAC,
    networks=sac_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    counterpart="discrete_sac",
    obs_ndims=(1, 3),
    metrics=SAC_METRICS,
)

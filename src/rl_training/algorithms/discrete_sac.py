"""Soft Actor-Critic for discrete actions (Christodoulou, 2019, arXiv:1910.07207).

SAC with critics that tell Q of every action and a categorical policy, so that what SAC estimates by
one action is an expectation over all of them: in the target, in the policy's loss and in the
entropy that the temperature follows.

Overrides: target_entropy, td_target, actor_loss, choose.
Deviations: those of SAC.  The target takes the paper's expectation (Eq. 10), where the author's
    code draws one action; the policy's loss sums over actions (Eq. 12), where that code takes the
    mean, which divides its step by the number of actions before Adam.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.actor_critic import Loss, networks_of
from rl_training.algorithms.base import td_target
from rl_training.algorithms.sac import SAC, SACConfig, sac_loss
from rl_training.algorithms.sac import SPEC as SAC_SPEC
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPDiscreteSACModel
from rl_training.validation import Fraction, Number


class DiscreteSACConfig(SACConfig):
    """Settings of discrete SAC."""

    varying: ClassVar[frozenset[str]] = frozenset({"target_entropy_share"})

    target_entropy: Number | None = None
    """Entropy a learned temperature aims at; null means `target_entropy_share`."""
    target_entropy_share: Fraction = 0.98
    """Share of the largest entropy that a learned temperature aims at: log A, or, where a mask
    leaves fewer actions, the mean of the logarithm of their number."""


class DiscreteSAC(SAC):
    """Soft actor-critic whose expectations over actions are sums."""

    config_class = DiscreteSACConfig
    config: DiscreteSACConfig
    model: MLPDiscreteSACModel  # type: ignore[assignment]  # with Q of every action

    @property
    def target_entropy(self) -> float | Tensor:
        """Entropy that a learned temperature aims at: a number, or `[S]` where it varies."""
        if self.config.target_entropy is None:
            return self.setting("target_entropy_share") * math.log(self.model.action_dim)
        return self.setting("target_entropy")

    def soft_value(self, obs: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of Q `[S, B, A]` under the policy, and the policy's entropy, each `[S, B]`."""
        log_prob = self.model.logits(obs, self.allowed(obs)).log_softmax(-1)
        prob = log_prob.exp()
        return (prob * q).sum(-1), -(prob * log_prob).sum(-1)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Soft Bellman target r + discount pi(s')^T (min_i Q_i(s') - alpha log pi(s')) (Eq. 10)."""
        q = self.model.all_q_values(batch.next_obs, self.target_critic).amin(1)  # [S, B, A]
        mean, entropy = self.soft_value(batch.next_obs, q)
        entropy_term = self.log_alpha.exp().unsqueeze(1) * entropy
        target = td_target(batch.reward, batch.discount, mean + entropy_term)
        return target, {"target_q_mean": target, "entropy_term": entropy_term}

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """E[pi(s)^T (alpha log pi(s) - min_i Q_i(s))] (Eq. 12)."""
        with torch.no_grad():
            q = self.model.all_q_values(batch.obs).amin(1)
        mean, entropy = self.soft_value(batch.obs, q)
        alpha = self.log_alpha.detach().exp().unsqueeze(1)
        metrics = {"q_mean": mean.detach(), "entropy": entropy.detach().mean(1)}
        return -(mean + alpha * entropy).mean(1), metrics

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Sample from the policy when exploring, else take its most likely action."""
        allowed = self.allowed(obs)
        if explore:
            return self.model.sample(obs, self.rng, allowed)
        return self.model.logits(obs, allowed).argmax(-1)

    def improve(self, batch: TransitionBatch, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move actor and temperature when it is their turn; masks bound the entropy."""
        allowed = self.allowed(batch.obs)
        if allowed is not None:
            measured = measured | {"largest_entropy": allowed.sum(-1).log().mean(1)}
        return super().improve(batch, measured)

    def update_multipliers(self, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move the temperature towards the target entropy, a share of what masks leave of log A."""
        if "largest_entropy" in measured and self.config.target_entropy is None:
            missing = math.log(self.model.action_dim) - measured["largest_entropy"]
            aim = self.setting("target_entropy_share") * missing
            measured = measured | {"entropy": measured["entropy"] + aim}
        return super().update_multipliers(measured)


def discrete_sac_loss(learner: DiscreteSAC, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the losses and metrics at the current parameters without changing them."""
    return sac_loss(learner, batch)


SPEC = AlgorithmSpec(
    name="discrete_sac",
    title="Discrete Soft Actor-Critic",
    paper="arXiv:1910.07207",
    summary="off-policy actor-critic with maximum entropy; discrete actions",
    learner=DiscreteSAC,
    networks=networks_of(MLPDiscreteSACModel),
    loop=Loop.OFF_POLICY,
    action_kinds=("discrete",),
    obs_ndims=(1, 3),
    counterpart="sac",
    metrics={
        **SAC_SPEC.metrics,
        "actor_loss": "expectation of alpha log pi - min Q",
        "entropy_term": "alpha times the policy's entropy in the target",
        "q_mean": "mean of min Q under the policy",
        "entropy": "policy entropy",
    },
)

"""The mathematics of a discriminator, as functions of its logits.

D = sigmoid(logit) is the probability that a pair is the expert's.
Shapes: S seeds, B batch, I inputs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

RewardForm = Literal["softplus", "log_d", "airl", "conditional"]


def imitation_reward(logit: Tensor, form: RewardForm) -> Tensor:
    """Reward of a pair from its logit l.

    `softplus`: -log(1 - D) = softplus(l), never negative, so that living pays.
    `log_d`: log D = -softplus(-l), never positive, so that dying early pays.
    `airl`: log D - log(1 - D) = l, of either sign (Eq. 5 ff. of arXiv:1710.11248).
    `conditional`: l too; who asks for it takes off the mean of l over the policy's actions.
    """
    if form == "softplus":
        return functional.softplus(logit)
    if form == "log_d":
        return -functional.softplus(-logit)
    return logit


def discriminator_loss(
    expert: Tensor,
    policy: Tensor,
    expert_weight: Tensor | None = None,
    policy_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Binary cross-entropy `[S]`: half of -E_expert[log D] - E_policy[log(1 - D)] (Eq. 17).

    Args:
        expert: Logits of expert pairs, `[S, B]`.
        policy: Logits of the policy's pairs, `[S, B]`.
        expert_weight: How many pairs each logit stands for, `[S, B]`; None is one each.
        policy_weight: The same for the policy's.
        label_smoothing: The expert's label is 1 minus this (one-sided; Salimans et al., 2016).
    """
    wrong = functional.softplus(-expert)  # -log D
    if label_smoothing > 0:
        wrong = wrong + label_smoothing * expert  # softplus(l) - softplus(-l) = l
    fooled = functional.softplus(policy)  # -log(1 - D)
    return 0.5 * (_mean(wrong, expert_weight) + _mean(fooled, policy_weight))


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return values.mean(1)
    return (values * weight).sum(1) / weight.sum(1)


def interpolate(expert: Tensor, policy: Tensor, mix: Tensor) -> Tensor:
    """Points `[S, B, I]` on the lines between pairs of inputs; `mix` in [0, 1) is `[S, B, 1]`."""
    return torch.lerp(policy, expert, mix)


def penalty_of_norm(gradient: Tensor, norm: float = 1.0) -> Tensor:
    """E[(|gradient| - norm)^2], `[S]` (Eq. 3 of arXiv:1704.00028); gradients are `[S, B, I]`."""
    # The root has no derivative at 0, which a discriminator that sees nothing would reach.
    length = (gradient.square().sum(-1) + 1e-12).sqrt()
    return (length - norm).square().mean(1)

"""Distributions over actions, as functions of tensors.

`torch.distributions` checks its arguments on the host and is avoided here on purpose.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LOG_2 = math.log(2)


def gaussian_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Log density of `mean + exp(log_std) * noise`, summed over the last axis."""
    return (-0.5 * noise * noise - log_std - LOG_SQRT_2PI).sum(-1)


def tanh_gaussian_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Squash a Gaussian sample by tanh.

    The log density subtracts `log(1 - tanh(u)^2)`, written as `2 (log 2 - u - softplus(-2u))`,
    which stays finite for large u (Haarnoja et al., 2018, App. C of arXiv:1801.01290).

    Returns:
        The action in (-1, 1) `[..., A]` and its log density `[...]`.
    """
    pre_tanh = mean + log_std.exp() * noise
    # What does not depend on the sample is taken out of the sum over action dimensions.
    constant = mean.shape[-1] * (LOG_SQRT_2PI + 2 * LOG_2)
    half_log_det = pre_tanh + functional.softplus(-2 * pre_tanh)
    log_prob = (2 * half_log_det - log_std - 0.5 * noise.square()).sum(-1) - constant
    return torch.tanh(pre_tanh), log_prob


def tanh_gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Log density `[...]` of a given action in [-1, 1] under the squashed Gaussian.

    Actions at the bounds have infinite `atanh`; they are moved inside by 1e-6.
    """
    pre_tanh = torch.atanh(action.clamp(-1 + 1e-6, 1 - 1e-6))
    noise = (pre_tanh - mean) * torch.exp(-log_std)
    log_det = 2 * (LOG_2 - pre_tanh - functional.softplus(-2 * pre_tanh))
    return gaussian_log_prob(noise, log_std) - log_det.sum(-1)


def gumbel_sample(logits: Tensor, log_exponential: Tensor) -> Tensor:
    """Sample from the categorical distribution of `logits`; int64 `[...]`.

    The Gumbel trick: argmax of logits plus Gumbel noise, which is minus the logarithm of
    exponential noise `[..., A]`.
    """
    return (logits - log_exponential).argmax(-1)


def categorical_log_prob_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log probability of integer actions `[...]`, and entropy, under `logits` `[..., A]`."""
    log_probs = functional.log_softmax(logits, -1)
    chosen = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return chosen, -(log_probs.exp() * log_probs).sum(-1)

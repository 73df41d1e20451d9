"""Distributions over actions, as functions of tensors.

`torch.distributions` checks its arguments on the host and is avoided here on purpose.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LOG_2 = math.log(2)


def gaussian_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Log density of `mean + exp(log_std) * noise`, summed over the last axis."""
    return (-0.5 * noise * noise - log_std - LOG_SQRT_2PI).sum(-1)


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

"""Distributions over actions, as functions of tensors.

`torch.distributions` checks its arguments on the host and is avoided here on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
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


NEVER = -1e9
"""Logit of an action that is not allowed: its probability is 0, and so is 0 times its logarithm."""


def only_allowed(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Give actions that a mask does not allow, `[..., A]` bool, no chance; None allows all."""
    return logits if allowed is None else torch.where(allowed, logits, NEVER)


def best_allowed(values: Tensor, allowed: Tensor | None) -> Tensor:
    """Return values `[..., A]` that are -inf where an action is not allowed, for their largest."""
    return values if allowed is None else torch.where(allowed, values, -math.inf)


def uniform_allowed(lots: Tensor, allowed: Tensor) -> Tensor:
    """Return one of the allowed actions for each lot `[...]` in [0, 1), all equally likely."""
    number = (lots * allowed.sum(-1)).long()
    return (allowed.cumsum(-1) <= number.unsqueeze(-1)).sum(-1)


class Choices:
    """Whole numbers that are drawn independently, each from logits of its own.

    A discrete action is a number `[...]`, a multi-discrete one of K parts a row `[..., K]`.  The
    logits of all parts are side by side, `[..., A]`.
    """

    def __init__(self, num_actions: int, sizes: Sequence[int] = ()) -> None:
        """Set up.

        Args:
            num_actions: A.
            sizes: Numbers of values of the parts of a multi-discrete action, A together; empty
                where an action is one number.
        """
        assert not sizes or sum(sizes) == num_actions
        self.sizes = list(sizes)

    def mode(self, logits: Tensor) -> Tensor:
        """Return the most likely action."""
        if not self.sizes:
            return logits.argmax(-1)
        return torch.stack([part.argmax(-1) for part in torch.split(logits, self.sizes, -1)], -1)

    def sample(self, logits: Tensor, log_exponential: Tensor) -> Tensor:
        """Sample an action, given the logarithm of exponential noise `[..., A]`."""
        return self.mode(logits - log_exponential)  # the Gumbel trick

    def log_prob_entropy(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log probability of an action and entropy, sums over the parts, each `[...]`."""
        if not self.sizes:
            return categorical_log_prob_entropy(logits, action)
        parts = zip(torch.split(logits, self.sizes, -1), action.unbind(-1), strict=True)
        each = [categorical_log_prob_entropy(*part) for part in parts]
        log_probs, entropies = zip(*each, strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)

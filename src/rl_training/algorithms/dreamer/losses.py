"""The terms of Dreamer as functions of tensors, an equation each (arXiv:2301.04104).

Shapes: S seeds, B batch, T steps, N rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rl_training.state import Stateful

Divergence = Callable[[Tensor, Tensor], Tensor]


def kl_terms(
    kl: Divergence, posterior: Tensor, prior: Tensor, free_nats: float
) -> tuple[Tensor, Tensor]:
    """Return the dynamics and the representation loss `[...]` (World model learning).

    `max(free, KL(sg(q) || p))` teaches the prior to predict, `max(free, KL(q || sg(p)))` the
    posterior to be predictable; below the free nats neither has a gradient.

    Args:
        kl: Divergence of two raw outputs.
        posterior: Raw outputs of q, `[..., P]`.
        prior: Raw outputs of p.
        free_nats: Divergence that costs nothing.
    """
    dynamics = kl(posterior.detach(), prior).clamp(min=free_nats)
    return dynamics, kl(posterior, prior.detach()).clamp(min=free_nats)


def continue_loss(logits: Tensor, terminated: Tensor, discount: float = 1.0) -> Tensor:
    """Binary cross-entropy `[...]` with target `d (1 - terminated)`; a time limit is not an end."""
    target = discount * (1 - terminated.to(logits.dtype))
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="none")


def lambda_return(reward: Tensor, discount: Tensor, value: Tensor, trace: Tensor | float) -> Tensor:
    """Bootstrapped lambda-returns of the states 0 .. T - 1, `[..., T]` (Critic learning).

    `R_t = r_{t+1} + d_{t+1} ((1 - l_{t+1}) v_{t+1} + l_{t+1} R_{t+1})` and `R_T = v_T`.

    Args:
        reward: Of arriving at each state, `[..., T + 1]`; that of the first is not used.
        discount: d, 0 at terminal states; the same shape.
        value: v; the same shape.
        trace: l: lambda, or 0 where the next state belongs to another episode.
    """
    if not isinstance(trace, Tensor):
        trace = torch.full_like(value, trace)
    known = torch.addcmul(reward, discount * (1 - trace), value)[..., 1:]
    decay = (discount * trace)[..., 1:]
    # The last one: R_T is the value.
    last = torch.addcmul(known[..., -1:], decay[..., -1:], value[..., -1:])
    known = torch.cat((known[..., :-1], last), -1)
    return discounted_sums(known, decay)


def discounted_sums(x: Tensor, decay: Tensor) -> Tensor:
    """Return y with `y_t = x_t + d_t y_{t+1}` and `y_{T-1} = x_{T-1}`, `[..., T]`.

    By doubling: y over 2 k steps follows from y over k, so that T steps take log2 T operations.
    """
    reach, steps = 1, x.shape[-1]
    while reach < steps:
        # What lies `reach` steps ahead, and how much of it arrives here.
        ahead = functional.pad(x[..., reach:], (0, reach))
        x = torch.addcmul(x, decay, ahead)
        decay = decay * functional.pad(decay[..., reach:], (0, reach))
        reach *= 2
    return x


def path_weights(continues: Tensor, gamma: float) -> Tensor:
    """Return how much imagined states count `[..., T]`: the chance to get there, discounted.

    Args:
        continues: Chance that a state is not terminal, `[..., T]`; the first is that of the start,
            which is not discounted.
        gamma: Discount per step.
    """
    factors = torch.cat((continues[..., :1], gamma * continues[..., 1:]), -1)
    return factors.cumprod(-1)


class PercentileRange(Stateful):
    """Spread of returns: an average over time of two of their percentiles (Actor learning).

    Returns are divided by it, but never by less than 1: small ones are not blown up to large ones,
    so that noise is not followed where there is no reward.
    """

    def __init__(
        self,
        num_seeds: int,
        device: torch.device,
        *,
        low: float = 0.05,
        high: float = 0.95,
        rate: float = 0.01,
    ) -> None:
        """Begin at 0.

        Args:
            num_seeds: S.
            device: Where it lies.
            low: Lower quantile.
            high: Upper quantile.
            rate: Share of the newest batch in the average.
        """
        self.quantiles, self.rate = (low, high), rate
        self.bounds = torch.zeros(num_seeds, 2, device=device)

    def update(self, returns: Tensor) -> None:
        """Take in a batch of returns `[S, N]`."""
        ordered = returns.detach().sort(-1).values
        percentiles = torch.stack([quantile(ordered, q) for q in self.quantiles], -1)
        self.bounds.lerp_(percentiles, self.rate)

    def scale(self) -> Tensor:
        """Return the divisor `[S]`: the distance of the percentiles, at least 1."""
        return (self.bounds[:, 1] - self.bounds[:, 0]).clamp(min=1.0)


def quantile(ordered: Tensor, share: float) -> Tensor:
    """Return a quantile of sorted numbers `[S, N]`, linear between them, `[S]`."""
    place = share * (ordered.shape[-1] - 1)
    below = int(place)
    above = min(below + 1, ordered.shape[-1] - 1)
    return torch.lerp(ordered[:, below], ordered[:, above], place - below)


def actor_loss(
    log_prob: Tensor, entropy: Tensor, advantage: Tensor, entropy_coef: float | Tensor
) -> Tensor:
    """REINFORCE with an entropy bonus, per state: `-sg(A) log pi(a | s) - eta H`."""
    return -(advantage.detach() * log_prob + entropy_coef * entropy)

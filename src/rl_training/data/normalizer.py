"""Running statistics per seed: of observations, and of the discounted return that scales rewards.

Mean and variance are those of everything seen (Chan et al., 1979, parallel form).
Shapes: S seeds, B batch, n environments per seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.state import Stateful

LEAST_DEVIATION = 1e-3
"""No entry is amplified beyond one over this; the authors of TD3+BC add as much."""
LIMIT = 10.0
"""Largest standardised entry, and largest scaled reward."""
CONSTANT = 1e-6
"""A deviation below this, or below this share of the mean, is rounding."""


def divisor(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return what standardising divides by: the deviation, with a floor, or 1.

    An entry that did not change tells nothing about its scale: divided by almost nothing, the
    smallest change later on would be the largest input there is.
    """
    rounding = deviation <= CONSTANT * mean.abs().clamp(min=1.0)
    return deviation.clamp(min=LEAST_DEVIATION).masked_fill(rounding, 1.0)


class RunningNorm(Stateful):
    """Standardise by the statistics of everything seen so far, clipped to +-10."""

    def __init__(
        self,
        num_seeds: int,
        shape: tuple[int, ...],
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Begin with mean 0 and variance 1.

        Args:
            num_seeds: Seeds S.
            shape: Of what is standardised.
            device: Where the statistics are.
            dtype: Of the statistics; batches of a few rows, of which there will be millions, add
                too little to float32.
        """
        self.mean = torch.zeros(num_seeds, 1, *shape, device=device, dtype=dtype)
        self.variance = torch.ones(num_seeds, 1, *shape, device=device, dtype=dtype)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Standardise `[S, B, ...]`."""
        mean, divisor = self.mean.to(x.dtype), self.divisor().to(x.dtype)
        return ((x - mean) / divisor).clamp(-LIMIT, LIMIT)

    def divisor(self) -> Tensor:
        """Return what differences to the mean are divided by, `[S, 1, ...]`."""
        return divisor(self.mean, self.variance.sqrt())

    def update(self, x: Tensor, weight: float | None = None) -> None:
        """Take in a batch `[S, B, ...]`.

        Args:
            x: The batch.
            weight: How many rows it counts for, beside those of other batches; None is its own B.
        """
        size = x.shape[1] if weight is None else weight
        variance, mean = torch.var_mean(x.to(self.mean.dtype), 1, correction=0, keepdim=True)
        total = self.count + size
        share = (size / total).to(self.mean.dtype)
        delta = mean - self.mean
        between = delta.square() * share * (1 - share)
        self.variance.lerp_(variance, share).add_(between)
        self.mean.addcmul_(delta, share)
        self.count.copy_(total)


class ReturnScale(RunningNorm):
    """Divides rewards by the deviation of the discounted return; their sign stays."""

    def __init__(self, num_seeds: int, device: torch.device | str) -> None:
        super().__init__(num_seeds, (), device, torch.float64)

    def __call__(self, reward: Tensor) -> Tensor:
        """Scale rewards `[S, ...]`: r / sqrt(variance + 1e-8), clipped to +-10."""
        deviation = (self.variance + 1e-8).sqrt().to(reward.dtype)
        return (reward / deviation.view(-1, *[1] * (reward.ndim - 1))).clamp(-LIMIT, LIMIT)


class BoundedReturnScale(ReturnScale):
    """Divides rewards by the deviation of the return, or by more: no return exceeds a bound.

    `r / max(sqrt(Var G), max |G| / bound)` (Sec. 4.4 of arXiv:2502.15280).
    """

    def __init__(self, num_seeds: int, device: torch.device | str, bound: float) -> None:
        super().__init__(num_seeds, device)
        self.largest = torch.zeros_like(self.mean)
        self._bound = bound

    def update(self, x: Tensor, weight: float | None = None) -> None:
        """Take in returns `[S, n]`."""
        super().update(x, weight)
        largest = x.abs().amax(1, keepdim=True).to(self.largest.dtype)
        torch.maximum(self.largest, largest, out=self.largest)

    def __call__(self, reward: Tensor) -> Tensor:
        """Scale rewards `[S, ...]`."""
        divisor = torch.maximum((self.variance + 1e-8).sqrt(), self.largest / self._bound)
        return reward / divisor.to(reward.dtype).view(-1, *[1] * (reward.ndim - 1))


class DiscountedReturns(Stateful):
    """The discounted return of each environment's episode so far, `[S, n]`."""

    def __init__(self, num_seeds: int, num_envs: int, device: torch.device | str) -> None:
        self.returns = torch.zeros(num_seeds, num_envs, dtype=torch.float64, device=device)

    def add(self, reward: Tensor, ended: Tensor, gamma: float, scale: ReturnScale) -> None:
        """Continue by a step, R <- gamma R + r, show R to `scale`, and begin again where `ended`.

        Args:
            reward: Of the step, `[S, n]`.
            ended: Whether it terminated or truncated the episode, `[S, n]`.
            gamma: Discount per step.
            scale: Whose statistics take the returns in.
        """
        self.returns.mul_(gamma).add_(reward)
        scale.update(self.returns)
        self.returns.masked_fill_(ended, 0.0)

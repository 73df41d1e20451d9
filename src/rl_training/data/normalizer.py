"""Running mean and variance of observations, per seed (Chan et al., 1979, parallel form)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.state import Stateful

LEAST_DEVIATION = 1e-3
"""No entry is amplified beyond one over this; the authors of TD3+BC add as much."""
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

    def __init__(self, num_seeds: int, shape: tuple[int, ...], device: torch.device | str) -> None:
        self.mean = torch.zeros(num_seeds, 1, *shape, device=device)
        self.variance = torch.ones(num_seeds, 1, *shape, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Standardise `[S, B, ...]`."""
        return ((x - self.mean) / self.divisor()).clamp(-10.0, 10.0)

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
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        total = self.count + size
        share = (size / total).to(x.dtype)
        delta = mean - self.mean
        between = delta.square() * share * (1 - share)
        self.variance.lerp_(variance, share).add_(between)
        self.mean.addcmul_(delta, share)
        self.count.copy_(total)

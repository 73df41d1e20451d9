"""Batch renormalisation (Ioffe, 2017, arXiv:1702.03275) in stacked layers.

Statistics belong to a seed and member alone, so a seed learns in a group as it does by itself.
There are two ways to normalise, and code says which by where it calls a network: by running
statistics, and within `batch_statistics` by those of the batch, which moves the running ones.
Shapes: S seeds, B batch, I inputs; statistics, scales and shifts are `[S, *members, 1, I]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.layers import StackedMLP, chosen_members
from rl_training.rng import Rng

EPS = 1e-3
"""Added to variances before their root is taken."""
MOST_R, MOST_D = 3.0, 5.0
"""Bounds on how far a batch's deviation and mean may be from the running ones."""


class StackedBatchRenorm(nn.Module):
    """Batch renormalisation with its own statistics, scale and shift per seed and member."""

    mean: Tensor
    variance: Tensor
    steps: Tensor

    def __init__(
        self,
        size: int,
        rng: Rng,
        members: tuple[int, ...] = (),
        *,
        momentum: float,
        warmup: int,
    ) -> None:
        """Build the layer: mean 0 and variance 1 until a batch is seen.

        Args:
            size: I.
            rng: Gives the number of seeds and the device.
            members: Axes of members.
            momentum: Share of the running statistics that a batch leaves of them.
            warmup: Batches that are normalised by their own statistics alone (r = 1, d = 0).
        """
        super().__init__()
        shape = (rng.num_seeds, *members, 1, size)
        self.momentum, self.warmup = momentum, warmup
        self.scale = nn.Parameter(torch.ones(shape, device=rng.device))
        self.shift = nn.Parameter(torch.zeros(shape, device=rng.device))
        self.register_buffer("mean", torch.zeros(shape, device=rng.device))
        self.register_buffer("variance", torch.ones(shape, device=rng.device))
        self.register_buffer("steps", torch.zeros((), device=rng.device))
        self.by_batch = False
        """Whether a batch is normalised by itself and counted; see `batch_statistics`."""

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        """Normalise `[S, *members, B, I]` over B, in single precision, for all or some members."""
        x = x if x.dtype == torch.float64 else x.float()
        if self.by_batch:
            assert members is None, "a batch counts for all members"
            return self._by_batch(x)
        held = (self.scale, self.shift, self.mean, self.variance)
        scale, shift, mean, variance = (chosen_members(tensor, members) for tensor in held)
        return torch.addcmul(shift, x - mean, scale * (variance + EPS).rsqrt())

    def _by_batch(self, x: Tensor) -> Tensor:
        """x^ = (x - mu) / sigma r + d (Algorithm 1); no gradient flows through r and d."""
        mean = x.mean(-2, keepdim=True)
        centred = x - mean
        variance = centred.square().mean(-2, keepdim=True)
        deviation = (variance + EPS).sqrt()
        with torch.no_grad():
            running = (self.variance + EPS).sqrt()
            r = (deviation / running).clamp(1 / MOST_R, MOST_R)
            d = ((mean - self.mean) / running).clamp(-MOST_D, MOST_D)
            is_warm = self.steps >= self.warmup
            r, d = torch.where(is_warm, r, torch.ones_like(r)), d * is_warm
            self.mean.lerp_(mean, 1 - self.momentum)
            self.variance.lerp_(variance, 1 - self.momentum)
            self.steps += 1
        return torch.addcmul(self.shift + self.scale * d, centred, self.scale * (r / deviation))


class RenormedMLP(StackedMLP):
    """A perceptron whose inputs and hidden outputs, after their activation, are renormalised."""

    def __init__(
        self,
        sizes: Sequence[int],
        rng: Rng,
        *,
        momentum: float,
        warmup: int,
        **options: Any,
    ) -> None:
        """Build the layers.

        Args:
            sizes: Inputs, hidden widths, outputs.
            rng: Where the initial weights come from; also fixes S and the device.
            momentum: See `StackedBatchRenorm`.
            warmup: See `StackedBatchRenorm`.
            **options: As for `StackedMLP`.
        """
        super().__init__(sizes, rng, **options)
        self.renorms = nn.ModuleList(
            StackedBatchRenorm(size, rng, self.members, momentum=momentum, warmup=warmup)
            for size in sizes[:-1]
        )
        self._renorms = tuple(self.renorms)

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        """Map `[S, B, I]` (shared by all members) to `[S, *members, B, O]`."""
        # In one piece and all members at once: statistics are those of the whole batch.
        x = self._shared(x, members)
        for renorm, (layer, norm) in zip(self._renorms[:-1], self._hidden, strict=True):
            x = layer.forward(renorm.forward(x, members), members)
            x = self.activation(x if norm is None else norm.forward(x, members))
        x = self._renorms[-1].forward(x, members)
        return self._output[0].forward(x, members).float()


@contextmanager
def batch_statistics(network: nn.Module) -> Iterator[None]:
    """Let a network normalise what it is shown by the batch, and move its running statistics."""
    layers = [part for part in network.modules() if isinstance(part, StackedBatchRenorm)]
    for layer in layers:
        layer.by_batch = True
    try:
        yield
    finally:
        for layer in layers:
            layer.by_batch = False

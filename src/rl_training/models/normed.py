"""Layers of world models: RMS normalisation, SiLU, and weights by truncated normals.

Shapes: S seeds, B batch, C channels, H height, W width, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.layers import BLOCK_ROWS, Init, StackedLinear, in_blocks
from rl_training.rng import Rng

EPS = 1e-4
"""Added to the mean square before its root is taken."""


def scaled_init(scale: float) -> Init:
    """Return an initialiser: normal, cut at two deviations, of variance scale^2 / inputs."""

    def init(rng: Rng, members: tuple[int, ...], outputs: int, inputs: int) -> Tensor:
        # Cut at two deviations, a standard normal has this deviation left.
        return rng.truncated_normal(*members, inputs, outputs) * (
            scale / (0.8796 * math.sqrt(inputs))
        )

    return init


class StackedRMSNorm(nn.Module):
    """Division by the root of the mean square (Zhang & Sennrich, 2019), with a learned scale."""

    def __init__(self, size: int, rng: Rng, *, channels: bool = False) -> None:
        """Build the layer.

        Args:
            size: Entries that are normalised together.
            rng: Gives the number of seeds and the device.
            channels: Normalise `[S, B, C, H, W]` over C in place of `[S, B, I]` over I.
        """
        super().__init__()
        self.size, self.channels = size, channels
        shape = (size, 1, 1) if channels else (size,)
        self.scale = nn.Parameter(torch.ones(rng.num_seeds, 1, *shape, device=rng.device))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        axis = -3 if self.channels else -1
        x = x.float()
        return x * torch.rsqrt(x.square().mean(axis, keepdim=True) + EPS) * self.scale


class NormedMLP(nn.Module):
    """Hidden layers of linear map, RMS normalisation and SiLU, then a linear output."""

    def __init__(self, sizes: Sequence[int], rng: Rng, *, output_scale: float = 1.0) -> None:
        """Build the layers.

        Args:
            sizes: Inputs, hidden widths, outputs.
            rng: Source of the initial weights.
            output_scale: Scale of the initial weights of the output; 0 begins with zeros.
        """
        super().__init__()
        hidden = sizes[:-1]
        self.layers = nn.ModuleList(
            StackedLinear(inputs, outputs, rng, (), scaled_init(1.0))
            for inputs, outputs in pairwise(hidden)
        )
        self.norms = nn.ModuleList(StackedRMSNorm(width, rng) for width in hidden[1:])
        self.output = StackedLinear(hidden[-1], sizes[-1], rng, (), scaled_init(output_scale))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[S, B, I]` to `[S, B, O]`."""
        return in_blocks(self._whole, x, BLOCK_ROWS, axis=1)

    def _whole(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = functional.silu(norm(layer(x)))
        output: Tensor = self.output(x)
        return output.float()

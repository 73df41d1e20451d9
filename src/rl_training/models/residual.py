"""Residual networks with normalised branches (SimBa, arXiv:2410.09754).

What a block adds is computed from layer-normalised features by a hidden layer four times as wide,
and what it adds to passes unchanged: an untouched path from the inputs to the last normalisation,
which biases the network towards simple functions.
Shapes: S seeds, B batch, D width, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.actor_with_critics import SmoothSACModel
from rl_training.models.layers import (
    StackedLayerNorm,
    StackedLinear,
    chosen_members,
    orthogonal_init,
    scaled_init,
)
from rl_training.models.own_encoder import StackedEncoder
from rl_training.rng import Rng

EXPANSION = 4
"""Width of a block's hidden layer over that of its features."""


class PreNormBlock(nn.Module):
    """`x + W_2 relu(W_1 LN(x))`, the hidden layer wider (Sec. 4)."""

    def __init__(self, width: int, rng: Rng, members: tuple[int, ...]) -> None:
        super().__init__()
        init = scaled_init(math.sqrt(2))
        self.norm = StackedLayerNorm(width, rng, members)
        self.first = StackedLinear(width, EXPANSION * width, rng, members, init)
        self.second = StackedLinear(EXPANSION * width, width, rng, members, init)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape `[S, *members, B, D]`."""
        added: Tensor = self.second(torch.relu(self.first(self.norm(x))))
        return x + added


class ResidualNet(nn.Module):
    """Embedding, blocks of one width, a last normalisation, and a linear head (Sec. 4)."""

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        outputs: int,
        rng: Rng,
        members: tuple[int, ...] = (),
    ) -> None:
        """Build the network.

        Args:
            inputs: Entries of what it reads.
            widths: One number per block, all the same.
            outputs: Numbers that it tells.
            rng: Source of the initial weights; its number of seeds is S.
            members: Axes of members.
        """
        super().__init__()
        width = widths[0]
        assert set(widths) == {width}
        self.members = members
        self.embed = StackedLinear(inputs, width, rng, members, orthogonal_init(1.0))
        self.blocks = nn.ModuleList(PreNormBlock(width, rng, members) for _ in widths)
        self.norm = StackedLayerNorm(width, rng, members)
        self.head = StackedLinear(width, outputs, rng, members, orthogonal_init(1.0))

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        """Map inputs `[S, B, I]` to `[S, *members, B, O]`, of all or some members."""
        for count in self.members:
            x = x.unsqueeze(1).expand(-1, count, *x.shape[1:])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return chosen_members(self.head(self.norm(x)).float(), members)


class SimBaModel(SmoothSACModel):
    """Tanh-Gaussian policy and critics, all of them residual networks."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        encoder: Callable[[Rng], StackedEncoder] | None = None,
        **options: Any,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action.
            hidden_sizes: One number per block of networks that have none of their own.
            encoder: Always None: the embedding reads observations as they are.
            **options: As for `ActorWithCritics`.
        """
        assert encoder is None
        super().__init__(obs_dim, action_dim, hidden_sizes, **options)

    def network(
        self,
        sizes: Sequence[int],
        rng: Rng,
        *,
        beside: int = 0,
        members: tuple[int, ...] = (),
        layer_norm: bool = False,
    ) -> Any:
        """Build the actor, or critics, which have members; arguments as of the base."""
        assert not layer_norm
        return ResidualNet(self.obs_dim + beside, sizes[:-1], sizes[-1], rng, members)

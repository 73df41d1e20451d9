"""Networks whose features and weights lie on the unit hypersphere (SimbaV2, arXiv:2502.15280).

A layer without bias whose columns have norm 1 tells cosines, a learned vector scales them, and what
leaves a block has norm 1 again.  So neither features nor weights grow during training, and the
effective learning rate stays.  After each step of an optimizer `project` puts the columns back.
Shapes: S seeds, N members, B batch, D width, I inputs, O outputs, A action, K bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.actor_with_critics import SmoothSACModel
from rl_training.models.categorical_critics import CategoricalCritics
from rl_training.models.layers import StackedLinear, orthogonal_init
from rl_training.models.own_encoder import StackedEncoder
from rl_training.rng import Rng

SHIFT = 3.0
"""Appended to an observation before it is normalised, so that its length is not lost (Sec. 4.1)."""
EXPANSION = 4
"""Width of a block's hidden layer over that of its features."""
_EPS = 1e-8


def unit(x: Tensor, axis: int = -1) -> Tensor:
    """Scale vectors along an axis to norm 1, in single precision at least."""
    x = x if x.dtype == torch.float64 else x.float()
    norm: Tensor = torch.linalg.vector_norm(x, dim=axis, keepdim=True)
    return x / norm.clamp(min=_EPS)


class HyperLinear(StackedLinear):
    """Linear layers side by side, no bias, columns of norm 1: weight `[S, *members, I, O]`."""

    def __init__(self, inputs: int, outputs: int, rng: Rng, members: tuple[int, ...]) -> None:
        super().__init__(inputs, outputs, rng, members, orthogonal_init(1.0))
        del self.bias
        self.project()

    def project(self) -> None:
        """Scale each column to norm 1."""
        with torch.no_grad():
            self.weight.copy_(unit(self.weight, -2))

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        """Map `[S, *members, B, I]` to `[S, *members, B, O]`."""
        assert members is None
        return x.to(self.compute_dtype or self.weight.dtype) @ self._operand()

    def _operand(self) -> Tensor:
        return self.weight if self.compute_dtype is None else self.weight.to(self.compute_dtype)


class Scaler(nn.Module):
    """A learned factor per feature that starts at `start` but is stored, and moves, as `scale`.

    An optimizer whose steps have a size of their own, such as Adam, moves it by `start / scale`
    times as much (Eq. 9).
    """

    def __init__(
        self, size: int, rng: Rng, members: tuple[int, ...], start: float, scale: float
    ) -> None:
        super().__init__()
        shape = (rng.num_seeds, *members, 1, size)
        self.factor = nn.Parameter(torch.full(shape, scale, device=rng.device))
        self._forward_factor = start / scale

    def forward(self, x: Tensor) -> Tensor:
        """Scale `[S, *members, B, D]`."""
        return x * (self.factor * self._forward_factor)


class LerpBlock(nn.Module):
    """A step on the sphere from the features towards what a hidden layer makes of them (Eq. 12).

    `h <- unit((1 - alpha) h + alpha unit(W_2 relu(s W_1 h)))` with a learned alpha per feature.
    """

    def __init__(self, width: int, blocks: int, rng: Rng, members: tuple[int, ...]) -> None:
        super().__init__()
        hidden = EXPANSION * width
        start = math.sqrt(2 / hidden)
        self.first = HyperLinear(width, hidden, rng, members)
        self.scaler = Scaler(hidden, rng, members, start, start)
        self.second = HyperLinear(hidden, width, rng, members)
        self.alpha = Scaler(width, rng, members, 1 / (blocks + 1), 1 / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape `[S, *members, B, D]`, and the norm of 1."""
        # The epsilon keeps a vector that relu has emptied from having no direction.
        hidden = torch.relu(self.scaler(self.first(x))) + _EPS
        return unit(x + self.alpha(unit(self.second(hidden)) - x))


class HypersphereNet(nn.Module):
    """Embedding on the sphere, blocks of one width, and heads (Fig. 3 of the paper)."""

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        outputs: int,
        rng: Rng,
        *,
        members: tuple[int, ...] = (),
        heads: int = 1,
    ) -> None:
        """Build the network.

        Args:
            inputs: Entries of what it reads.
            widths: One number per block, all the same.
            outputs: Numbers that each head tells.
            rng: Source of the initial weights; its number of seeds is S.
            members: Axes of members.
            heads: Independent heads on the same features, whose outputs are concatenated.
        """
        super().__init__()
        width, blocks = widths[0], len(widths)
        assert set(widths) == {width}
        self.members, self.heads = members, heads
        start = math.sqrt(2 / width)
        self.embed = HyperLinear(inputs + 1, width, rng, members)
        self.embed_scaler = Scaler(width, rng, members, start, start)
        self.blocks = nn.ModuleList(LerpBlock(width, blocks, rng, members) for _ in widths)
        of_heads = (*members, heads)
        self.head = HyperLinear(width, width, rng, of_heads)
        self.head_scaler = Scaler(width, rng, of_heads, 1.0, 1.0)
        self.output = HyperLinear(width, outputs, rng, of_heads)
        bias = torch.zeros(rng.num_seeds, *of_heads, 1, outputs, device=rng.device)
        self.output_bias = nn.Parameter(bias)

    def features(self, x: Tensor) -> Tensor:
        """Map inputs `[S, B, I]` to features `[S, *members, B, D]` of norm 1."""
        x = unit(torch.cat((x, torch.full_like(x[..., :1], SHIFT)), -1))
        for _ in self.members:
            x = x.unsqueeze(1)
        x = unit(self.embed_scaler(self.embed(x)))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs `[S, B, I]` to the heads' outputs `[S, *members, B, heads O]`."""
        features = self.features(x).unsqueeze(-3)  # [S, *members, 1, B, D]
        told = self.output(self.head_scaler(self.head(features))) + self.output_bias
        return torch.cat(told.unbind(-3), -1)


def project(network: nn.Module) -> None:
    """Put the weights of a network back on the hypersphere."""
    for layer in network.modules():
        if isinstance(layer, HyperLinear):
            layer.project()


class SimbaV2Model(CategoricalCritics, SmoothSACModel):
    """Tanh-Gaussian policy and categorical critics, all on the hypersphere.

    Critics tell the distribution of the return over K atoms between -`value_range` and
    `value_range`.
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_bins: int = 101,
        value_range: float = 5.0,
        encoder: Callable[[Rng], StackedEncoder] | None = None,
        **options: Any,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action.
            hidden_sizes: One number per block of networks that have none of their own.
            num_bins: Atoms of a return's distribution, K.
            value_range: Largest return that the atoms reach.
            encoder: Always None: observations are put on the sphere as they are.
            **options: As for `ActorWithCritics`.
        """
        assert encoder is None
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            num_atoms=num_bins,
            v_min=-value_range,
            v_max=value_range,
            **options,
        )

    def network(
        self,
        sizes: Sequence[int],
        rng: Rng,
        *,
        beside: int = 0,
        members: tuple[int, ...] = (),
        layer_norm: bool = False,
    ) -> Any:
        """Build the actor, with heads for mean and deviation, or critics, which have members."""
        assert not layer_norm
        inputs, widths = self.obs_dim + beside, sizes[:-1]
        if members:
            return HypersphereNet(inputs, widths, self.num_atoms, rng, members=members)
        return HypersphereNet(inputs, widths, self.action_dim, rng, heads=2)

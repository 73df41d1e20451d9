"""What a world model reads and writes: images through convolutions, vectors through an MLP.

An encoder maps observations `[S, B, ...]` to an embedding `[S, B, E]`; a decoder maps features
`[S, B, F]` to a prediction in the same units that `target` gives of an observation, and its `loss`
is the squared distance, summed over an observation.  Images are divided by 255, vectors squeezed by
symlog.
Shapes: S seeds, B batch, C channels, H height, W width, E embedding, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.errors import SpecMismatch
from rl_training.models.conv import StackedConv2d, StackedConvTranspose2d
from rl_training.models.layers import StackedLinear, in_blocks
from rl_training.models.normed import NormedMLP, StackedRMSNorm, scaled_init
from rl_training.models.symlog import symexp, symlog
from rl_training.rng import Rng

OUTPUT_SCALE = 0.01
BLOCK_IMAGES = 128
"""Images that go through all convolutions at a time on a CPU."""
SMALLEST = 4
"""Height and width below which an image is not halved again: 64 becomes 4 in four steps."""


def halvings(height: int, width: int) -> list[tuple[int, int]]:
    """Return the sizes of an image, each half of the one before, down to the last."""
    sizes = [(height, width)]
    while min(sizes[-1]) >= 2 * SMALLEST:
        sizes.append((sizes[-1][0] // 2, sizes[-1][1] // 2))
    return sizes


class ImageEncoder(nn.Module):
    """Convolutions of kernel 4 and stride 2 with twice as many channels each time."""

    def __init__(self, obs_shape: Sequence[int], depth: int, rng: Rng, scale: float) -> None:
        """Build the layers.

        Args:
            obs_shape: `[C, H, W]`.
            depth: Channels of the first convolution.
            rng: Source of the initial weights.
            scale: Factor on the pixels.

        Raises:
            SpecMismatch: When channels come last, or the image is too small.
        """
        super().__init__()
        channels, height, width = obs_shape
        if width < channels and width <= 16:
            raise SpecMismatch(
                f"images of shape {tuple(obs_shape)} look as if channels came last, but [channels, "
                "height, width] is needed; set env_kwargs.wrappers.pixels.channel_first to true"
            )
        if min(height, width) < 2 * SMALLEST:
            raise SpecMismatch(
                f"images of shape {tuple(obs_shape)} are smaller than the {2 * SMALLEST} pixels in "
                "height and width that a world model takes; set env_kwargs.wrappers.pixels."
                "resize_shape to more"
            )
        self.scale, self.sizes = scale, halvings(height, width)
        widths = [channels, *(depth * 2**stage for stage in range(len(self.sizes) - 1))]
        self.layers = nn.ModuleList(
            StackedConv2d(i, o, 4, rng, stride=2, padding=1, init=scaled_init(1.0))
            for i, o in pairwise(widths)
        )
        self.norms = nn.ModuleList(StackedRMSNorm(o, rng, channels=True) for o in widths[1:])
        self.last_shape = (widths[-1], *self.sizes[-1])
        self.embedding_dim = math.prod(self.last_shape)

    def forward(self, obs: Tensor) -> Tensor:
        """Embed images `[S, B, C, H, W]`, giving `[S, B, E]`."""
        return in_blocks(self._whole, obs, BLOCK_IMAGES, axis=1)

    def _whole(self, obs: Tensor) -> Tensor:
        x = obs.to(torch.float32) * self.scale
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = functional.silu(norm(layer(x)))
        return x.flatten(2)


class ImageDecoder(nn.Module):
    """The encoder's mirror image: transposed convolutions up to the size of the observation."""

    def __init__(self, encoder: ImageEncoder, channels: int, features: int, rng: Rng) -> None:
        super().__init__()
        self.scale, self.sizes, self.first_shape = (
            encoder.scale,
            encoder.sizes,
            encoder.last_shape,
        )
        stages = len(self.sizes) - 1
        last = encoder.last_shape[0]
        widths = [last // 2**stage for stage in range(stages)] + [channels]
        self.first = StackedLinear(features, math.prod(self.first_shape), rng, (), scaled_init(1.0))
        self.first_norm = StackedRMSNorm(last, rng, channels=True)
        # A last layer near 0 begins with a black image: noise of unit size would have to be
        # unlearned first, and what the encoder can tell of small things with it.
        scales = [1.0] * (stages - 1) + [OUTPUT_SCALE]
        self.layers = nn.ModuleList(
            StackedConvTranspose2d(i, o, 4, rng, stride=2, padding=1, init=scaled_init(scale))
            for (i, o), scale in zip(pairwise(widths), scales, strict=True)
        )
        self.norms = nn.ModuleList(StackedRMSNorm(o, rng, channels=True) for o in widths[1:-1])

    def forward(self, features: Tensor) -> Tensor:
        """Predict images `[S, B, C, H, W]`, in the units of `target`."""
        return in_blocks(self._whole, features, BLOCK_IMAGES, axis=1)

    def _whole(self, features: Tensor) -> Tensor:
        x: Tensor = self.first(features).view(*features.shape[:2], *self.first_shape)
        x = functional.silu(self.first_norm(x))
        for index, (layer, size) in enumerate(zip(self.layers, self.sizes[-2::-1], strict=True)):
            x = layer(x, *size)
            if index < len(self.norms):
                x = functional.silu(self.norms[index](x))
        return x.float()

    def target(self, obs: Tensor) -> Tensor:
        """Return what a prediction is compared with."""
        return obs.to(torch.float32) * self.scale

    def observation(self, prediction: Tensor) -> Tensor:
        """Return a prediction in the units of observations."""
        return prediction / self.scale

    def loss(self, prediction: Tensor, obs: Tensor) -> Tensor:
        """Squared distance, summed over an image, `[S, B]`."""
        return (prediction - self.target(obs)).square().flatten(2).sum(-1)


class VectorEncoder(nn.Module):
    """An MLP on symlog of the observation."""

    def __init__(self, obs_dim: int, units: int, layers: int, rng: Rng) -> None:
        super().__init__()
        self.layers = NormedMLP((obs_dim, *[units] * layers), rng)
        self.norm = StackedRMSNorm(units, rng)
        self.embedding_dim = units

    def forward(self, obs: Tensor) -> Tensor:
        """Embed vectors `[S, B, I]`, giving `[S, B, E]`."""
        return functional.silu(self.norm(self.layers(symlog(obs.to(torch.float32)))))


class VectorDecoder(nn.Module):
    """An MLP that predicts symlog of the observation."""

    def __init__(self, features: int, units: int, layers: int, obs_dim: int, rng: Rng) -> None:
        super().__init__()
        self.layers = NormedMLP((features, *[units] * layers, obs_dim), rng)

    def forward(self, features: Tensor) -> Tensor:
        """Predict `[S, B, I]`."""
        prediction: Tensor = self.layers(features)
        return prediction

    def target(self, obs: Tensor) -> Tensor:
        """Return what a prediction is compared with."""
        return symlog(obs.to(torch.float32))

    def observation(self, prediction: Tensor) -> Tensor:
        """Return a prediction in the units of observations."""
        return symexp(prediction)

    def loss(self, prediction: Tensor, obs: Tensor) -> Tensor:
        """Squared distance of symlogs, summed over an observation, `[S, B]`."""
        return (prediction - self.target(obs)).square().sum(-1)

"""Encoders: modules that turn observations into an embedding `[S, B, E]` for a head to read.

Whatever has `embedding_dim` and maps `[S, B, ...]` to `[S, B, E]` will do; `make_encoder` builds
one for a task.  Images are `[channels, height, width]`; uint8 ones are divided by 255 inside.
Shapes: S seeds, B batch, C channels, H height, W width, E embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rl_training.errors import ConfigError, SpecMismatch
from rl_training.models.layers import (
    ACTIVATIONS,
    Activation,
    ActivationName,
    Init,
    StackedConv2d,
    StackedLayerNorm,
    StackedLinear,
    StackedMLP,
    StackedNoisyLinear,
    max_pool,
)
from rl_training.models.layers import orthogonal_init as orthogonal
from rl_training.models.rows import split
from rl_training.observations import ObservationSpec
from rl_training.rng import Rng

EncoderName: TypeAlias = Literal["auto", "nature", "impala", "small"]
EMBEDDING_WIDTH = 32
"""Entries of the vector that stands for a whole number."""
SMALLEST_FOR_NATURE = 36
"""Height and width from which three strided convolutions leave an image."""


def _activation(name: ActivationName) -> Activation:
    """Return what follows a layer; not in place, as the output of a kernel may be a view."""
    return torch.relu if name == "relu" else ACTIVATIONS[name]


class MLPEncoder(nn.Module):
    """Hidden layers, each activated; without any, the observation is its own embedding."""

    def __init__(
        self,
        obs_dim: int,
        hidden_sizes: Sequence[int],
        rng: Rng,
        *,
        activation: ActivationName = "relu",
        noisy: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.obs_dim = obs_dim
        self.embedding_dim = hidden_sizes[-1] if hidden_sizes else obs_dim
        sizes, self.activation = (obs_dim, *hidden_sizes), _activation(activation)
        options: dict[str, Any] = {"activation": activation, "noisy": noisy}
        self.layers = self.norm = None
        if hidden_sizes:
            self.layers = StackedMLP(sizes, rng, layer_norm=layer_norm, **options)
            self.norm = StackedLayerNorm(sizes[-1], rng) if layer_norm else None

    def forward(self, obs: Tensor) -> Tensor:
        """Embed observations `[S, B, I]`, giving `[S, B, E]`."""
        if self.layers is None:
            return obs
        x = self.layers.forward(obs)
        return self.activation(x if self.norm is None else self.norm.forward(x))


class NatureTrunk(nn.Module):
    """Three convolutions (Mnih et al., 2015, doi:10.1038/nature14236)."""

    def __init__(
        self, channels: int, rng: Rng, init: Init | None, layer_norm: bool = False
    ) -> None:
        super().__init__()
        sizes = ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
        self.layers = nn.ModuleList(
            StackedConv2d(
                inputs, outputs, kernel, rng, stride=stride, init=init, layer_norm=layer_norm
            )
            for inputs, outputs, kernel, stride in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images to `[S, B, 64, H', W']`."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class SmallTrunk(nn.Module):
    """One convolution for images of some ten pixels (Young & Tian, 2019, arXiv:1903.03176)."""

    def __init__(
        self, channels: int, rng: Rng, init: Init | None, layer_norm: bool = False
    ) -> None:
        super().__init__()
        self.layer = StackedConv2d(
            channels, 16, 3, rng, padding=1, init=init, layer_norm=layer_norm
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images to `[S, B, 16, H, W]`."""
        return torch.relu(self.layer(x))


class ResidualBlock(nn.Module):
    """`x + conv(relu(conv(relu(x))))`."""

    def __init__(
        self, channels: int, rng: Rng, init: Init | None, layer_norm: bool = False
    ) -> None:
        super().__init__()
        self.first = StackedConv2d(
            channels, channels, 3, rng, padding=1, init=init, layer_norm=layer_norm
        )
        self.second = StackedConv2d(
            channels, channels, 3, rng, padding=1, init=init, layer_norm=layer_norm
        )

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        inner: Tensor = self.second(torch.relu(self.first(torch.relu(x))))
        return x + inner


class ImpalaTrunk(nn.Module):
    """Three sections of convolution, pooling and two residual blocks (arXiv:1802.01561, Fig. 3)."""

    def __init__(
        self, channels: int, rng: Rng, init: Init | None, layer_norm: bool = False
    ) -> None:
        super().__init__()
        widths = (channels, 16, 32, 32)
        self.entries = nn.ModuleList(
            StackedConv2d(
                widths[i], widths[i + 1], 3, rng, padding=1, init=init, layer_norm=layer_norm
            )
            for i in range(3)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width, rng, init, layer_norm) for _ in range(2)))
            for width in widths[1:]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images to `[S, B, 32, H / 8, W / 8]`, rounded up."""
        for entry, blocks in zip(self.entries, self.blocks, strict=True):
            x = blocks(max_pool(entry(x), 3, 2, 1))
        return torch.relu(x)


TRUNKS: dict[str, type[nn.Module]] = {
    "nature": NatureTrunk,
    "impala": ImpalaTrunk,
    "small": SmallTrunk,
}


class PixelEncoder(nn.Module):
    """Convolutions with relu, then hidden layers, each activated."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        hidden_sizes: Sequence[int],
        rng: Rng,
        *,
        kind: EncoderName = "auto",
        scale: float = 1 / 255,
        activation: ActivationName = "relu",
        noisy: bool = False,
        orthogonal_init: bool = False,
        layer_norm: bool = False,
    ) -> None:
        """Build the layers.

        Args:
            obs_shape: `[C, H, W]`.
            hidden_sizes: Layers after the convolutions; without any, these are the embedding.
            rng: Source of the initial weights; its number of seeds is S.
            kind: Which convolutions; `auto` goes by the size of the image.
            scale: What pixels are multiplied by.
            activation: What follows each layer after the convolutions.
            noisy: Let the hidden layers carry learned noise.
            orthogonal_init: Draw orthogonal weights, as policy gradients like them.
            layer_norm: Normalise before each activation, convolutions over their channels.

        Raises:
            SpecMismatch: When the image is too small for the convolutions, or not channels first.
        """
        super().__init__()
        kind = check_image(obs_shape, kind)
        init = orthogonal(math.sqrt(2)) if orthogonal_init else None
        self.scale, self.activation = scale, _activation(activation)
        self.trunk = TRUNKS[kind](obs_shape[0], rng, init, layer_norm)
        with torch.no_grad():
            blank = torch.zeros(rng.num_seeds, 1, *obs_shape, device=rng.device)
            width = self.trunk(blank)[0, 0].numel()
        layers: list[StackedLinear] = []
        for outputs in hidden_sizes:
            layers.append(
                StackedNoisyLinear(width, outputs, rng)
                if noisy
                else StackedLinear(width, outputs, rng, (), init)
            )
            width = outputs
        self.layers = nn.ModuleList(layers)
        widths = hidden_sizes if layer_norm else ()
        self.norms = nn.ModuleList(StackedLayerNorm(size, rng) for size in widths)
        self.obs_dim, self.embedding_dim = math.prod(obs_shape), width

    def forward(self, obs: Tensor) -> Tensor:
        """Embed images `[S, B, C, H, W]`, giving `[S, B, E]`."""
        x: Tensor = self.trunk(obs.to(torch.float32) * self.scale).flatten(2)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = self.activation(self.norms[index](x) if self.norms else x)
        return x.float()


class PartsEncoder(nn.Module):
    """The features of an observation of several parts, given as a row, one behind the other.

    Images go through convolutions of their own and whole numbers through embeddings; real numbers,
    flags and one-hot vectors are features as they are.  The mask of actions is none.
    """

    def __init__(self, parts: ObservationSpec, image_options: EncoderOptions, rng: Rng) -> None:
        """Build the encoders of the parts.

        Args:
            parts: What a row holds.
            image_options: How an image becomes features.
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        self.parts = parts
        self.images, self.tables = nn.ModuleDict(), nn.ModuleDict()
        self.obs_dim, self.embedding_dim = parts.num_floats, 0
        for index, leaf in enumerate(parts.leaves):
            if leaf.kind == "image":
                image = make_encoder(leaf.row_shape, leaf.dtype, image_options, rng)
                self.images[str(index)] = image
                self.embedding_dim += image.embedding_dim
            elif leaf.kind == "index":
                table = StackedEmbedding(leaf.sizes, rng)
                self.tables[str(index)] = table
                self.embedding_dim += table.embedding_dim
            elif leaf.kind != "mask":
                self.embedding_dim += math.prod(leaf.row_shape)

    def forward(self, rows: Tensor) -> Tensor:
        """Embed rows `[S, B, W]`, giving `[S, B, E]`."""
        values = split(self.parts, rows)
        features = []
        for index, leaf in enumerate(self.parts.leaves):
            value, key = values[leaf.name], str(index)
            if leaf.kind == "image":
                features.append(self.images[key](value))
            elif leaf.kind == "index":
                features.append(self.tables[key](value))
            elif leaf.kind != "mask":
                features.append(value.flatten(2))
        return torch.cat(features, -1)


class StackedEmbedding(nn.Module):
    """A learned vector for each value of several whole numbers, for S seeds."""

    def __init__(self, sizes: Sequence[int], rng: Rng, width: int = EMBEDDING_WIDTH) -> None:
        super().__init__()
        self.embedding_dim = width * len(sizes)
        self.tables = nn.ParameterList(rng.normal(size, width) for size in sizes)

    def forward(self, numbers: Tensor) -> Tensor:
        """Embed numbers `[S, B, K]` that count from 0, giving `[S, B, K * width]`."""
        vectors = []
        for index, table in zip(numbers.unbind(-1), self.tables, strict=True):
            every = torch.arange(table.shape[1], device=index.device)
            # A product rather than a look-up, whose gradient would be summed in any order.
            chosen = (index.unsqueeze(-1) == every).to(table.dtype)  # [S, B, values]
            vectors.append(torch.bmm(chosen, table))
        return torch.cat(vectors, -1)


def check_image(shape: Sequence[int], kind: EncoderName) -> Literal["nature", "impala", "small"]:
    """Return which convolutions an image takes.

    Raises:
        SpecMismatch: When it is too small for them, or its channels come last.
    """
    channels, height, width = shape
    if width < channels and width <= 16:
        raise SpecMismatch(
            f"images of shape {tuple(shape)} look as if channels came last, but [channels, height, "
            "width] is needed; set env_kwargs.wrappers.pixels.channel_first to true"
        )
    large = min(height, width) >= SMALLEST_FOR_NATURE
    if kind == "auto":
        return "nature" if large else "small"
    if kind == "nature" and not large:
        raise SpecMismatch(
            f"algo_kwargs.encoder is nature, but images of shape {tuple(shape)} are smaller than "
            f"the {SMALLEST_FOR_NATURE} pixels it needs; use auto, small or impala"
        )
    return kind


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """How observations become an embedding."""

    hidden_sizes: Sequence[int]
    """Hidden layers for vectors."""
    pixel_sizes: Sequence[int]
    """Hidden layers after the convolutions, for images."""
    kind: EncoderName = "auto"
    activation: ActivationName = "relu"
    """What follows each hidden layer; convolutions have relu."""
    noisy: bool = False
    orthogonal_init: bool = False
    layer_norm: bool = False
    """Normalise before each activation."""


def make_encoder(
    obs_shape: Sequence[int], obs_dtype: str, options: EncoderOptions, rng: Rng
) -> MLPEncoder | PixelEncoder:
    """Build the encoder of a task: hidden layers for vectors, convolutions for images."""
    if len(obs_shape) == 1:
        return MLPEncoder(
            obs_shape[0],
            options.hidden_sizes,
            rng,
            activation=options.activation,
            noisy=options.noisy,
            layer_norm=options.layer_norm,
        )
    if len(obs_shape) != 3:
        raise ConfigError(f"no encoder takes observations of shape {tuple(obs_shape)}")
    return PixelEncoder(
        obs_shape,
        options.pixel_sizes,
        rng,
        kind=options.kind,
        scale=1 / 255 if obs_dtype == "uint8" else 1.0,
        activation=options.activation,
        noisy=options.noisy,
        orthogonal_init=options.orthogonal_init,
        layer_norm=options.layer_norm,
    )

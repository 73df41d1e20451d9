"""The networks of Dreamer: world model, actor and critic, for S seeds, in named sizes.

Actions go through the networks as vectors `[..., A]`: one-hot for discrete ones.

An encoder maps observations `[S, B, ...]` to an embedding `[S, B, E]`; a decoder maps features
`[S, B, F]` to a prediction in the same units that `target` gives of an observation, and its `loss`
is the squared distance, summed over an observation.  Images are divided by 255, vectors squeezed by
`symlog(x) = sign(x) log(|x| + 1)` (Robust predictions in arXiv:2301.04104).

Reward and value are predicted as the mean of a categorical distribution over bins from
`symexp(-20)` to `symexp(20)`; a target puts weight on the two bins around it so that their mean is
the target.
Shapes: S seeds, B batch, T steps, A action, E embedding, F features of a state, K bins;
of images C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.errors import SpecMismatch
from rl_training.models.heads import LOG_SQRT_2PI, gaussian_log_prob
from rl_training.models.layers import (
    NormedMLP,
    StackedConv2d,
    StackedConvTranspose2d,
    StackedLinear,
    StackedRMSNorm,
    in_blocks,
    max_pool,
    scaled_init,
)
from rl_training.models.rows import split
from rl_training.models.rssm import (
    RSSM,
    ActionWeights,
    CategoricalLatent,
    GaussianLatent,
    Latent,
    RecurrentWeights,
    RSSMSequence,
    RSSMState,
    action_share,
    joined,
    mixed_log_probs,
    normed_mlp,
    one_hot_argmax,
    product_in_blocks,
    recur,
)
from rl_training.models.scan import Scanned, Tensors, scan
from rl_training.observations import LeafSpec, ObservationSpec
from rl_training.rng import Rng

LatentKind: TypeAlias = Literal["categorical", "gaussian"]
SizeName: TypeAlias = Literal["tiny", "1m", "12m", "25m", "50m", "100m", "200m", "400m"]
ConvKind: TypeAlias = Literal["pooled", "strided"]
UNIFORM_MIX = 0.01
"""Share of the uniform distribution in every categorical one."""
LEAST_STD, LARGEST_STD = 0.1, 1.0
"""Deviations of a policy over continuous actions."""
OUTPUT_SCALE = 0.01
"""Scale of the initial weights of the last layer of images."""
BLOCK_IMAGES = 128
"""Images that go through all convolutions at a time on a CPU."""
MULTIPLES = (2, 3, 4, 4)
"""Channels of pooled convolutions as multiples of the depth; further ones are like the last."""
SMALLEST = 4
"""Height and width below which an image is not halved again: 64 becomes 4 in four steps."""


@dataclass(frozen=True, kw_only=True)
class DreamerSize:
    """Widths of all networks."""

    deter: int
    """Deterministic state D."""
    hidden: int
    """Layers inside the recurrent model."""
    units: int
    """Layers of the heads, of actor and critic, and of the encoder of vectors."""
    depth: int
    """Channels of the convolutions; each layer has a multiple of it."""
    classes: int
    """Classes of each categorical variable of the stochastic state."""
    groups: int = 32
    """How many of them."""
    gaussians: int = 30
    """Normal variables in their place, where they are asked for."""
    blocks: int = 8
    """Parts into which the large products of the recurrent model are cut."""
    layers: int = 3
    """Hidden layers of actor and critic, and of encoder and decoder of vectors."""
    head_layers: int = 1
    """Hidden layers of the heads for reward and continuation."""
    prior_layers: int = 2
    """Hidden layers of the prior."""
    convolutions: ConvKind = "pooled"
    """`pooled`: kernel 5 and a maximum over 2 x 2; `strided`: kernel 4 and stride 2, a tenth of the
    work."""


def _published(deter: int, classes: int) -> DreamerSize:
    """Return one of the authors' sizes: all of them have the same proportions."""
    width = 16 * classes
    return DreamerSize(deter=deter, hidden=width, units=width, depth=classes, classes=classes)


SIZES: dict[SizeName, DreamerSize] = {
    "tiny": DreamerSize(
        deter=128,
        hidden=64,
        units=64,
        depth=8,
        classes=8,
        groups=16,
        gaussians=16,
        blocks=1,
        layers=2,
        head_layers=2,
        prior_layers=1,
        convolutions="strided",
    ),
    "1m": _published(512, 4),
    "12m": _published(2048, 16),
    "25m": _published(3072, 24),
    "50m": _published(4096, 32),
    "100m": _published(6144, 48),
    "200m": _published(8192, 64),
    "400m": _published(12288, 96),
}


def symlog(x: Tensor) -> Tensor:
    """Compress: the identity near 0, a logarithm far from it."""
    return x.sign() * torch.log1p(x.abs())


def symexp(x: Tensor) -> Tensor:
    """Undo `symlog`."""
    return x.sign() * torch.expm1(x.abs())


class TwoHot(nn.Module):
    """Categorical distributions over `num_bins` numbers that stand for their mean."""

    bins: Tensor

    def __init__(self, num_bins: int, largest: float = 20.0, device: torch.device | str = "cpu"):
        """Lay out the bins.

        Args:
            num_bins: K, odd, so that one bin is 0.
            largest: symlog of the largest bin.
            device: Where they lie.
        """
        super().__init__()
        assert num_bins % 2 == 1
        self.num_bins = num_bins
        positive = symexp(torch.linspace(0.0, largest, num_bins // 2 + 1, dtype=torch.float64))
        bins = torch.cat((-positive[1:].flip(0), positive)).float().to(device)
        # Not saved: a constant.
        self.register_buffer("bins", bins, persistent=False)

    def start_logits(self) -> Tensor:
        """Return logits `[K]` of a distribution to begin with: mean 0, far bins improbable.

        `-|symlog(bin)|` gives every bin the same share in the mean.  From equal logits a rounding
        error of the largest bin's probability is a thousandfold of a usual reward, until learning
        has made that bin improbable.
        """
        return -symlog(self.bins).abs()

    def mean(self, logits: Tensor) -> Tensor:
        """Return the mean `[...]` of distributions `[..., K]`.

        Bins of opposite sign are taken together: added up one after the other, uniform logits would
        give rounding errors of the largest bin in place of 0.
        """
        middle = self.num_bins // 2
        probs = torch.softmax(logits, -1)
        difference = probs[..., middle + 1 :] - probs[..., :middle].flip(-1)
        return (difference * self.bins[middle + 1 :]).sum(-1)

    def weights(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bin below each number `[...]`, int64, and the weight of the one above it."""
        target = target.clamp(self.bins[0], self.bins[-1])
        below = (torch.bucketize(target, self.bins, right=True) - 1).clamp(0, self.num_bins - 2)
        low, high = self.bins[below], self.bins[below + 1]
        return below, (target - low) / (high - low)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy `[...]` between the two-hot target `[...]` and `[..., K]`."""
        below, upper = self.weights(target)
        log_probs = functional.log_softmax(logits, -1)
        places = torch.stack((below, below + 1), -1)
        low, high = log_probs.gather(-1, places).unbind(-1)
        return -torch.lerp(low, high, upper)


def halvings(height: int, width: int) -> list[tuple[int, int]]:
    """Return the sizes of an image, each half of the one before, down to the last."""
    sizes = [(height, width)]
    while min(sizes[-1]) >= 2 * SMALLEST:
        sizes.append((sizes[-1][0] // 2, sizes[-1][1] // 2))
    return sizes


def checked_halvings(obs_shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return `halvings` of images `[C, H, W]`.

    Raises:
        SpecMismatch: When channels come last, or the image is too small.
    """
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
    return halvings(height, width)


def channel_counts(kind: ConvKind, depth: int, stages: int) -> list[int]:
    """Return the channels after each convolution of an encoder."""
    if kind == "strided":
        return [depth * 2**stage for stage in range(stages)]
    return [depth * MULTIPLES[min(stage, len(MULTIPLES) - 1)] for stage in range(stages)]


class ImageEncoder(nn.Module):
    """Convolutions that halve an image each time, each with RMS normalisation and SiLU."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        depth: int,
        rng: Rng,
        scale: float,
        kind: ConvKind = "pooled",
    ) -> None:
        """Build the layers.

        Args:
            obs_shape: `[C, H, W]`.
            depth: Channels of the convolutions; each layer has a multiple of it.
            rng: Source of the initial weights.
            scale: Factor on the pixels.
            kind: How an image is halved.

        Raises:
            SpecMismatch: When channels come last, or the image is too small.
        """
        super().__init__()
        self.scale, self.kind, self.sizes = scale, kind, checked_halvings(obs_shape)
        widths = [obs_shape[0], *channel_counts(kind, depth, len(self.sizes) - 1)]
        kernel, stride, padding = (5, 1, 2) if kind == "pooled" else (4, 2, 1)
        self.layers = nn.ModuleList(
            StackedConv2d(i, o, kernel, rng, stride=stride, padding=padding, init=scaled_init(1.0))
            for i, o in pairwise(widths)
        )
        self.norms = nn.ModuleList(StackedRMSNorm(o, rng, channels=True) for o in widths[1:])
        self.widths = widths
        self.last_shape = (widths[-1], *self.sizes[-1])
        self.embedding_dim = math.prod(self.last_shape)

    def forward(self, obs: Tensor) -> Tensor:
        """Embed images `[S, B, C, H, W]`, giving `[S, B, E]`."""
        return in_blocks(self._whole, obs, BLOCK_IMAGES, axis=1)

    def _whole(self, obs: Tensor) -> Tensor:
        x = obs.to(torch.float32) * self.scale
        if self.kind == "pooled":
            x = x - 0.5
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(x)
            if self.kind == "pooled":
                x = max_pool(x, 2, 2, 0)
            x = functional.silu(norm(x))
        return x.flatten(2)


class ImageDecoder(nn.Module):
    """What image decoders have in common: the units that images are compared in."""

    scale: float

    def forward(self, features: Tensor) -> Tensor:
        """Predict images `[S, B, C, H, W]` from `[S, B, F]`, in the units of `target`."""
        return in_blocks(self._whole, features, BLOCK_IMAGES, axis=1)

    def _whole(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def target(self, obs: Tensor) -> Tensor:
        """Return what a prediction is compared with."""
        return obs.to(torch.float32) * self.scale

    def observation(self, prediction: Tensor) -> Tensor:
        """Return a prediction in the units of observations."""
        return prediction / self.scale

    def pictures(self, prediction: Tensor) -> Tensor | None:
        """Return predictions as images: they are."""
        return prediction

    def loss(self, prediction: Tensor, obs: Tensor) -> Tensor:
        """Squared distance, summed over an image, `[S, B]`."""
        return (prediction - self.target(obs)).square().flatten(2).sum(-1)


class PooledDecoder(ImageDecoder):
    """The mirror image of pooled convolutions: pixels doubled, then convolved.

    The first image is the sum of a map of h, in blocks that each fill some channels, and of a
    network on z.  The last goes through a sigmoid.
    """

    def __init__(self, encoder: ImageEncoder, size: DreamerSize, latent: int, rng: Rng) -> None:
        super().__init__()
        self.scale, self.sizes, self.first_shape = encoder.scale, encoder.sizes, encoder.last_shape
        self.deter = size.deter
        pixels, init = math.prod(self.first_shape), scaled_init(1.0)
        channels = self.first_shape[0]
        blocks = math.gcd(size.blocks, channels)
        self.from_deter = StackedLinear(
            size.deter // blocks, pixels // blocks, rng, (blocks,), init
        )
        self.from_latent = StackedLinear(latent, 2 * size.units, rng, (), init)
        self.latent_norm = StackedRMSNorm(2 * size.units, rng)
        self.first = StackedLinear(2 * size.units, pixels, rng, (), init)
        self.first_norm = StackedRMSNorm(channels, rng, channels=True)
        widths = encoder.widths[::-1]
        self.layers = nn.ModuleList(
            StackedConv2d(i, o, 5, rng, padding=2, init=init) for i, o in pairwise(widths)
        )
        self.norms = nn.ModuleList(StackedRMSNorm(o, rng, channels=True) for o in widths[1:-1])

    def _whole(self, features: Tensor) -> Tensor:
        deter, latent = features[..., : self.deter], features[..., self.deter :]
        weight, bias = self.from_deter.operands()
        own = joined(product_in_blocks(deter, weight) + bias)  # [S, B, pixels], block by block
        x = functional.silu(self.latent_norm(self.from_latent(latent)))
        shape = (*features.shape[:2], *self.first_shape)
        x = functional.silu(self.first_norm((own + self.first(x)).view(shape)))
        for index, (layer, size) in enumerate(zip(self.layers, self.sizes[-2::-1], strict=True)):
            x = layer(enlarged(x, *size))
            if index < len(self.norms):
                x = functional.silu(self.norms[index](x))
        return torch.sigmoid(x.float())


def enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """Repeat pixels of `[S, B, C, H, W]` up to twice the size, or one more."""
    flat = functional.interpolate(x.flatten(0, 1), size=(height, width), mode="nearest")
    return flat.view(*x.shape[:2], *flat.shape[1:])


class StridedDecoder(ImageDecoder):
    """The mirror image of strided convolutions: transposed ones."""

    def __init__(self, encoder: ImageEncoder, features: int, rng: Rng) -> None:
        super().__init__()
        self.scale, self.sizes, self.first_shape = encoder.scale, encoder.sizes, encoder.last_shape
        widths = encoder.widths[::-1]
        self.first = StackedLinear(features, math.prod(self.first_shape), rng, (), scaled_init(1.0))
        self.first_norm = StackedRMSNorm(widths[0], rng, channels=True)
        # A last layer near 0 begins with a black image: noise of unit size would have to be
        # unlearned first, and what the encoder can tell of small things with it.
        scales = [1.0] * (len(widths) - 2) + [OUTPUT_SCALE]
        self.layers = nn.ModuleList(
            StackedConvTranspose2d(i, o, 4, rng, stride=2, padding=1, init=scaled_init(scale))
            for (i, o), scale in zip(pairwise(widths), scales, strict=True)
        )
        self.norms = nn.ModuleList(StackedRMSNorm(o, rng, channels=True) for o in widths[1:-1])

    def _whole(self, features: Tensor) -> Tensor:
        x: Tensor = self.first(features).view(*features.shape[:2], *self.first_shape)
        x = functional.silu(self.first_norm(x))
        for index, (layer, size) in enumerate(zip(self.layers, self.sizes[-2::-1], strict=True)):
            x = layer(x, *size)
            if index < len(self.norms):
                x = functional.silu(self.norms[index](x))
        return x.float()


def image_decoder(encoder: ImageEncoder, size: DreamerSize, latent: int, rng: Rng) -> ImageDecoder:
    """Build the mirror image of an encoder, for states of `size` with a latent part so long."""
    if size.convolutions == "pooled":
        return PooledDecoder(encoder, size, latent, rng)
    return StridedDecoder(encoder, size.deter + latent, rng)


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

    def pictures(self, prediction: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return None: there is nothing to draw."""
        return None

    def loss(self, prediction: Tensor, obs: Tensor) -> Tensor:
        """Squared distance of symlogs, summed over an observation, `[S, B]`."""
        return (prediction - self.target(obs)).square().sum(-1)


class PartsEncoder(nn.Module):
    """Encoders of the images of a row, and one of all its other parts as a vector."""

    def __init__(self, parts: ObservationSpec, size: DreamerSize, rng: Rng) -> None:
        """Build the encoders.

        Args:
            parts: What a row holds.
            size: Widths.
            rng: Source of the initial weights.

        Raises:
            SpecMismatch: An image is too small.
        """
        super().__init__()
        self.parts = parts
        others = [leaf for leaf in parts.leaves if leaf.kind != "image"]
        self.images = nn.ModuleDict()
        for index, leaf in enumerate(parts.leaves):
            if leaf.kind == "image":
                scale = 1 / 255 if leaf.dtype == "uint8" else 1.0
                image = ImageEncoder(leaf.row_shape, size.depth, rng, scale, size.convolutions)
                self.images[str(index)] = image
        self.vector_dim = sum(
            sum(leaf.sizes) if leaf.kind == "index" else math.prod(leaf.row_shape)
            for leaf in others
        )
        self.vector: VectorEncoder | None = None
        if others:
            self.vector = VectorEncoder(self.vector_dim, size.units, size.layers, rng)
        self.embedding_dim = sum(image.embedding_dim for _, image in _images(self))
        if self.vector is not None:
            self.embedding_dim += self.vector.embedding_dim

    def forward(self, obs: Tensor) -> Tensor:
        """Embed rows `[S, B, W]`, giving `[S, B, E]`."""
        images, vector = images_and_vector(self.parts, obs)
        features = [self.images[key](image) for key, image in images.items()]
        return torch.cat(features if self.vector is None else [*features, self.vector(vector)], -1)


def images_and_vector(parts: ObservationSpec, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the images of rows `[..., W]` by number, and the rest as vectors `[..., I]`."""
    values, images, rest = split(parts, rows), {}, [rows.new_zeros((*rows.shape[:-1], 0)).float()]
    for index, leaf in enumerate(parts.leaves):
        if leaf.kind == "image":
            images[str(index)] = values[leaf.name]
        else:
            rest.append(_as_vector(leaf, values[leaf.name]))
    return images, torch.cat(rest, -1)


def _as_vector(leaf: LeafSpec, value: Tensor) -> Tensor:
    """Return a part `[..., *row_shape]` as a vector; whole numbers are one-hot."""
    if leaf.kind != "index":
        return value.flatten(value.ndim - len(leaf.row_shape))
    # Not PyTorch's `one_hot`, which reads the largest number back to size its result.
    columns = [
        value[..., entry, None] == torch.arange(size, device=value.device)
        for entry, size in enumerate(leaf.sizes)
    ]
    return torch.cat(columns, -1).to(torch.float32)


class PartsDecoder(nn.Module):
    """Decoders of the images of a row and of the rest; a prediction has them behind each other."""

    def __init__(self, encoder: PartsEncoder, size: DreamerSize, latent: int, rng: Rng) -> None:
        super().__init__()
        self._parts = encoder.parts
        self.images = nn.ModuleDict(
            {key: image_decoder(image, size, latent, rng) for key, image in _images(encoder)}
        )
        self.vector: VectorDecoder | None = None
        if encoder.vector is not None:
            self.vector = VectorDecoder(
                size.deter + latent, size.units, size.layers, encoder.vector_dim, rng
            )

    def forward(self, features: Tensor) -> Tensor:
        """Predict `[S, B, P]` from `[S, B, F]`, in the units of `target`."""
        images = [image(features).flatten(2) for image in self.images.values()]
        return torch.cat(images if self.vector is None else [*images, self.vector(features)], -1)

    def target(self, obs: Tensor) -> Tensor:
        """Return what a prediction is compared with, `[..., P]` of rows `[..., W]`."""
        images, vector = images_and_vector(self._parts, obs)
        wanted = [
            decoder.target(images[key]).flatten(obs.ndim - 1)
            for key, decoder in self.images.items()
            if isinstance(decoder, ImageDecoder)
        ]
        return torch.cat(
            wanted if self.vector is None else [*wanted, self.vector.target(vector)], -1
        )

    def pictures(self, prediction: Tensor) -> Tensor | None:
        """Return the first image of predictions `[..., P]`, `[..., C, H, W]`; None without one."""
        leaves = self._parts.leaves
        shape = next((leaf.row_shape for leaf in leaves if leaf.kind == "image"), None)
        if shape is None:
            return None
        return prediction[..., : math.prod(shape)].reshape(*prediction.shape[:-1], *shape)

    def loss(self, prediction: Tensor, obs: Tensor) -> Tensor:
        """The losses of all parts together, `[S, B]`."""
        return (prediction - self.target(obs)).square().sum(-1)


def _images(encoder: PartsEncoder) -> Iterator[tuple[str, ImageEncoder]]:
    """Yield the encoders of images by name."""
    for key, image in encoder.images.items():
        assert isinstance(image, ImageEncoder)
        yield key, image


def make_latent(kind: LatentKind, size: DreamerSize) -> Latent:
    """Build the stochastic part of the state."""
    if kind == "gaussian":
        return GaussianLatent(size.gaussians)
    return CategoricalLatent(size.groups, size.classes, UNIFORM_MIX)


def two_hot_head(inputs: int, hidden: Sequence[int], bins: TwoHot, rng: Rng) -> NormedMLP:
    """Build a head whose output `[S, B, K]` begins as a distribution of mean 0 for every input."""
    head = NormedMLP((inputs, *hidden, bins.num_bins), rng, output_scale=0.0)
    with torch.no_grad():
        head.output.bias.copy_(bins.start_logits())
    return head


class WorldModel(nn.Module):
    """Encoder, recurrent state-space model, and heads for observation, reward and continuation."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        action_dim: int,
        size: DreamerSize = SIZES["tiny"],
        *,
        obs_scale: float = 1 / 255,
        parts: ObservationSpec | None = None,
        latents: LatentKind = "categorical",
        num_bins: int = 255,
        rng: Rng | None = None,
    ) -> None:
        """Build the networks.

        Args:
            obs_shape: `[I]` or `[C, H, W]`.
            action_dim: A.
            size: Widths.
            obs_scale: Factor on the pixels of an image.
            parts: What a row holds, where observations are rows of images and vectors.
            latents: Kind of the stochastic state.
            num_bins: K, of the reward's distribution.
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        latent = make_latent(latents, size)
        self.feature_dim = size.deter + latent.size
        hidden = [size.units] * size.head_layers
        self.encoder: ImageEncoder | VectorEncoder | PartsEncoder
        self.decoder: ImageDecoder | VectorDecoder | PartsDecoder
        if parts is not None:
            rows = PartsEncoder(parts, size, rng)
            self.encoder, self.decoder = rows, PartsDecoder(rows, size, latent.size, rng)
        elif len(obs_shape) == 3:
            images = ImageEncoder(obs_shape, size.depth, rng, obs_scale, size.convolutions)
            self.encoder, self.decoder = images, image_decoder(images, size, latent.size, rng)
        else:
            self.encoder = VectorEncoder(obs_shape[0], size.units, size.layers, rng)
            self.decoder = VectorDecoder(
                self.feature_dim, size.units, size.layers, obs_shape[0], rng
            )
        self.rssm = RSSM(
            latent,
            deter=size.deter,
            hidden=size.hidden,
            embedding=self.encoder.embedding_dim,
            action=action_dim,
            blocks=size.blocks,
            prior_layers=size.prior_layers,
            rng=rng,
        )
        self.reward_bins = TwoHot(num_bins, device=rng.device)
        self.reward_head = two_hot_head(self.feature_dim, hidden, self.reward_bins, rng)
        self.continue_head = NormedMLP((self.feature_dim, *hidden, 1), rng)

    def observe(
        self,
        obs: Tensor,
        action: Tensor,
        is_first: Tensor,
        rng: Rng,
        start: RSSMState | None = None,
    ) -> RSSMSequence:
        """Follow sequences of observations `[S, B, T, ...]` and the actions before them.

        Args:
            obs: The observations.
            action: What led to each.
            is_first: Where the past is unknown or of another episode, `[S, B, T]`.
            rng: Source of the latents.
            start: What is believed before, `[S, B, ...]`; None is nothing.
        """
        batch, steps = is_first.shape[1:]
        embedding: Tensor = self.encoder(obs.flatten(1, 2)).unflatten(1, (batch, steps))
        noise = self.rssm.latent.draw_noise(rng, batch, steps)
        return self.rssm.observe(embedding, action, is_first, noise, start)

    def reward(self, features: Tensor) -> Tensor:
        """Return the expected reward of arriving at states `[S, B, F]`, `[S, B]`."""
        return self.reward_bins.mean(self.reward_head(features))

    def continuation(self, features: Tensor) -> Tensor:
        """Return the probability `[S, B]` that states are not terminal."""
        return torch.sigmoid(self.continue_head(features).squeeze(-1))


def normal_moments(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Mean in [-1, 1] and deviation `[..., A]` of a continuous policy from outputs `[..., 2 A]`."""
    mean, spread = raw.chunk(2, -1)
    std = LEAST_STD + (LARGEST_STD - LEAST_STD) * torch.sigmoid(spread + 2)
    return torch.tanh(mean), std


def drawn_action(raw: Tensor, noise: Tensor, *, discrete: bool) -> Tensor:
    """Draw actions as vectors `[..., A]` from the outputs of a policy."""
    if discrete:
        return one_hot_argmax(mixed_log_probs(raw, UNIFORM_MIX) - noise)
    mean, std = normal_moments(raw)
    return torch.addcmul(mean, std, noise)


def executed_action(action: Tensor, *, discrete: bool) -> Tensor:
    """Return what a task makes of an action: continuous ones end at their bounds."""
    return action if discrete else action.clamp(-1, 1)


class DreamerActor(nn.Module):
    """Policy on states of the world model: categorical, or normal around a squashed mean."""

    def __init__(
        self,
        feature_dim: int,
        action_dim: int,
        size: DreamerSize = SIZES["tiny"],
        *,
        discrete: bool,
        rng: Rng | None = None,
    ) -> None:
        super().__init__()
        self.discrete, self.action_dim = discrete, action_dim
        outputs = action_dim if discrete else 2 * action_dim
        hidden = [size.units] * size.layers
        rng = rng or Rng((0,), "model")
        self.layers = NormedMLP((feature_dim, *hidden, outputs), rng, output_scale=0.01)

    def draw_noise(self, rng: Rng, *shape: int) -> Tensor:
        """Draw what `sample` takes, `[S, *shape, A]`."""
        size = (*shape, self.action_dim)
        return rng.exponential(*size).log_() if self.discrete else rng.normal(*size)

    def mode(self, features: Tensor) -> Tensor:
        """Return the most likely action as a vector `[S, B, A]`."""
        if self.discrete:
            return one_hot_argmax(self.layers(features))
        return normal_moments(self.layers(features))[0]

    def sample(self, features: Tensor, noise: Tensor) -> Tensor:
        """Draw an action as a vector `[S, B, A]`."""
        return drawn_action(self.layers(features), noise, discrete=self.discrete)

    def executed(self, action: Tensor) -> Tensor:
        """Return what a task makes of an action: continuous ones end at their bounds."""
        return executed_action(action, discrete=self.discrete)

    def log_prob_entropy(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log density of actions `[S, B, A]` and entropy, each `[S, B]`."""
        if self.discrete:
            log_probs = mixed_log_probs(self.layers(features), UNIFORM_MIX)
            return (log_probs * action).sum(-1), -(log_probs.exp() * log_probs).sum(-1)
        mean, std = normal_moments(self.layers(features))
        log_std = std.log()
        entropy = (log_std + 0.5 + LOG_SQRT_2PI).sum(-1)
        return gaussian_log_prob((action - mean) / std, log_std), entropy


class DreamerCritic(nn.Module):
    """Distribution of the return on states of the world model."""

    def __init__(
        self,
        feature_dim: int,
        size: DreamerSize = SIZES["tiny"],
        *,
        num_bins: int = 255,
        rng: Rng | None = None,
    ) -> None:
        super().__init__()
        hidden = [size.units] * size.layers
        rng = rng or Rng((0,), "model")
        self.bins = TwoHot(num_bins, device=rng.device)
        self.layers = two_hot_head(feature_dim, hidden, self.bins, rng)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits `[S, B, K]`."""
        logits: Tensor = self.layers(features)
        return logits

    def value(self, features: Tensor) -> Tensor:
        """Return the expected return `[S, B]`."""
        return self.bins.mean(self(features))


@dataclass(frozen=True)
class Imagine:
    """A step without an observation: (h, z) and noise of action and latent to (h, z).

    The policy acts on (h, z); gives the actions it drew.
    """

    latent: Latent
    discrete: bool
    prior_layers: int

    def __call__(
        self, state: Tensors, inputs: Tensors, weights: Tensors
    ) -> tuple[Tensors, Tensors]:
        """See `Step`."""
        (deter, latent), (action_noise, latent_noise) = state, inputs
        left = iter(weights)
        recurrent = RecurrentWeights(*islice(left, len(RecurrentWeights._fields)))
        acting = ActionWeights(*islice(left, len(ActionWeights._fields)))
        prior = tuple(islice(left, 3 * self.prior_layers + 2))
        raw = normed_mlp(torch.cat((deter, latent), -1), tuple(left))
        action = drawn_action(raw, action_noise, discrete=self.discrete)
        acted = action_share(executed_action(action, discrete=self.discrete), acting)
        deter = recur(deter, latent, acted, recurrent)
        latent = self.latent.sample(normed_mlp(deter, prior), latent_noise)
        return (deter, latent), (action,)


@torch.no_grad()
def follow_policy(
    rssm: RSSM, actor: DreamerActor, start: RSSMState, action_noise: Tensor, latent_noise: Tensor
) -> Scanned:
    """Imagine what comes of a policy; no gradient flows through the steps.

    Args:
        rssm: The world.
        actor: The policy.
        start: Where to begin, `[S, N, ...]`.
        action_noise: Of the actions, `[S, H, N, ...]`.
        latent_noise: Of the latents, `[S, H, N, ...]`.

    Returns:
        States and actions, `[H, S, N, ...]`.
    """
    recurrent, acting = rssm.recurrent_weights()
    step = Imagine(rssm.latent, actor.discrete, len(rssm.prior.layers))
    inputs = (action_noise.transpose(0, 1), latent_noise.transpose(0, 1))
    weights = (*recurrent, *acting, *rssm.prior.operands(), *actor.layers.operands())
    return scan(step, tuple(start), inputs, weights)

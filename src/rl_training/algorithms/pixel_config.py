"""Settings of learners that take images too, and the encoder that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from rl_training.algorithms.config import part_of
from rl_training.algorithms.own_encoders import OwnEncoder, encoder_of, own_encoder
from rl_training.envs.spec import EnvSpec
from rl_training.models.encoders import (
    EncoderName,
    EncoderOptions,
    MLPEncoder,
    PixelEncoder,
    make_encoder,
)
from rl_training.models.layers import ActivationName
from rl_training.models.own_encoder import EncodedFeatures, StackedEncoder
from rl_training.rng import Rng
from rl_training.validation import PositiveInt, Settings, Sizes

_BUILT_IN: dict[str, EncoderName] = {name: name for name in get_args(EncoderName)}


class PixelConfig(Settings):
    """How images become features; vectors have `hidden_sizes` instead."""

    hidden_sizes: Sizes = (64, 64)
    """Widths of the hidden layers for vector observations; images use the settings below."""
    encoder: EncoderName | OwnEncoder = "auto"
    """Convolutions for images: `nature`, `impala`, `small`, or `auto`, which goes by their size; or
    `module:function`, which makes the features of images or vectors."""
    features_dim: PositiveInt | None = 512
    """Width of the layer after the convolutions; null has none, so that a head reads them."""
    head_hidden_sizes: Sizes = ()
    """Hidden layers between the features of an image and the outputs."""

    @property
    def features(self) -> tuple[int, ...]:
        """Widths of the layers that belong to the features of an image."""
        return () if self.features_dim is None else (self.features_dim,)


def encoder_for(
    env: EnvSpec,
    config: Settings,
    rng: Rng,
    *,
    features: Sequence[int] | None = None,
    more: Sequence[int] = (),
    activation: ActivationName = "relu",
    noisy: bool = False,
    orthogonal_init: bool = False,
    layer_norm: bool = False,
) -> MLPEncoder | PixelEncoder | EncodedFeatures:
    """Build the encoder of a task: the user's own and the hidden layers after it, or the built-in.

    Args:
        env: The task.
        config: The settings, `PixelConfig` among their parts.
        rng: Source of the initial weights.
        features: Layers after the convolutions; None has those of the settings.
        more: Hidden layers after the features of an image.
        activation: What follows each hidden layer.
        noisy: Let the hidden layers carry learned noise.
        orthogonal_init: Draw orthogonal weights.
        layer_norm: Normalise before each activation, but within an encoder of the user's own.
    """
    images, own = part_of(config, PixelConfig), encoder_of(config)
    if own is not None:
        sizes = images.hidden_sizes if len(env.obs_shape) == 1 else more
        return own_features(
            env, own, sizes, rng, activation=activation, noisy=noisy, layer_norm=layer_norm
        )
    options = EncoderOptions(
        hidden_sizes=images.hidden_sizes,
        pixel_sizes=(*(images.features if features is None else features), *more),
        kind=_BUILT_IN[images.encoder],
        activation=activation,
        noisy=noisy,
        orthogonal_init=orthogonal_init,
        layer_norm=layer_norm,
    )
    return make_encoder(env.obs_shape, env.obs_dtype, options, rng)


def own_features(
    env: EnvSpec,
    name: str,
    sizes: Sequence[int],
    rng: Rng,
    *,
    activation: ActivationName,
    noisy: bool = False,
    layer_norm: bool = False,
) -> EncodedFeatures:
    """Build the user's encoder `name` and hidden layers of these sizes after it."""
    first = own_encoder(env, name, rng)
    layers = MLPEncoder(
        first.embedding_dim,
        sizes,
        rng,
        activation=activation,
        noisy=noisy,
        layer_norm=layer_norm,
    )
    return EncodedFeatures(first, layers, layers.embedding_dim)


def shared_encoder(
    env: EnvSpec, config: Settings, rng: Rng, activation: ActivationName
) -> PixelEncoder | StackedEncoder | None:
    """Build what a policy's networks share; None where they read vectors as they are.

    Args:
        env: The task.
        config: The settings, `PixelConfig` among their parts.
        rng: Source of the initial weights.
        activation: What follows each layer after convolutions.
    """
    own = encoder_of(config)
    if own is not None:
        return own_encoder(env, own, rng)
    if len(env.obs_shape) == 1:
        return None
    encoder = encoder_for(env, config, rng, activation=activation, orthogonal_init=True)
    assert isinstance(encoder, PixelEncoder)
    return encoder

"""Settings of learners that take images too, and the encoder that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from rl_training.algorithms.config import part_of
from rl_training.algorithms.own_encoders import OwnEncoder, encoder_of, own_encoder
from rl_training.envs.spec import EnvSpec
from rl_training.models.encoders import (
    EncoderName,
    EncoderOptions,
    MLPEncoder,
    PartsEncoder,
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
    """Convolutions for images: `nature`, `impala`, `small`, or `auto`, chosen by their size; or
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
        kind=built_in(images.encoder),
        activation=activation,
        noisy=noisy,
        orthogonal_init=orthogonal_init,
        layer_norm=layer_norm,
    )
    if reads_parts(env):
        assert env.observation is not None
        alone = replace(options, pixel_sizes=images.features if features is None else features)
        return _with_layers(
            PartsEncoder(env.observation, alone, rng), images.hidden_sizes, rng, options
        )
    return make_encoder(env.obs_shape, env.obs_dtype, options, rng)


def features_encoder(
    env: EnvSpec,
    kind: EncoderName,
    sizes: Sequence[int],
    rng: Rng,
    *,
    orthogonal_init: bool = False,
) -> PartsEncoder | PixelEncoder | MLPEncoder:
    """Build what makes features of images, and of observations of several parts, alone.

    Args:
        env: The task.
        kind: Convolutions for images.
        sizes: Layers after the convolutions.
        rng: Source of the initial weights.
        orthogonal_init: Draw orthogonal weights.
    """
    options = EncoderOptions(
        hidden_sizes=(), pixel_sizes=sizes, kind=kind, orthogonal_init=orthogonal_init
    )
    if reads_parts(env):
        assert env.observation is not None
        return PartsEncoder(env.observation, options, rng)
    return make_encoder(env.obs_shape, env.obs_dtype, options, rng)


def built_in(name: str | None) -> EncoderName:
    """Return the name of built-in convolutions; None leaves it to the size of the image."""
    return _BUILT_IN[name or "auto"]


def reads_parts(env: EnvSpec) -> bool:
    """Whether networks take a task's observations apart, as they are more than a vector."""
    return env.observation is not None and env.observation.needs_encoder


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
    options = EncoderOptions(
        hidden_sizes=sizes,
        pixel_sizes=(),
        activation=activation,
        noisy=noisy,
        layer_norm=layer_norm,
    )
    return _with_layers(own_encoder(env, name, rng), sizes, rng, options)


def _with_layers(
    first: StackedEncoder | PartsEncoder, sizes: Sequence[int], rng: Rng, options: EncoderOptions
) -> EncodedFeatures:
    """Put hidden layers of these sizes behind an encoder."""
    layers = MLPEncoder(
        first.embedding_dim,
        sizes,
        rng,
        activation=options.activation,
        noisy=options.noisy,
        layer_norm=options.layer_norm,
    )
    return EncodedFeatures(first, layers, layers.embedding_dim)


def shared_encoder(
    env: EnvSpec, config: Settings, rng: Rng, activation: ActivationName
) -> PixelEncoder | PartsEncoder | StackedEncoder | None:
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
    if reads_parts(env):
        images = part_of(config, PixelConfig)
        kind = built_in(images.encoder)
        parts = features_encoder(env, kind, images.features, rng, orthogonal_init=True)
        assert isinstance(parts, PartsEncoder)
        return parts
    if len(env.obs_shape) == 1:
        return None
    encoder = encoder_for(env, config, rng, activation=activation, orthogonal_init=True)
    assert isinstance(encoder, PixelEncoder)
    return encoder

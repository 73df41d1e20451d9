"""Settings of learners that take images too, and the encoder that they ask for."""

from __future__ import annotations

from collections.abc import Sequence

from rl_training.algorithms.config import part_of
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.encoders import (
    EncoderName,
    EncoderOptions,
    MLPEncoder,
    PixelEncoder,
    make_encoder,
)
from rl_training.models.layers import ActivationName
from rl_training.rng import Rng
from rl_training.validation import PositiveInt, Settings, Sizes


class PixelConfig(Settings):
    """How images become features; vectors have `hidden_sizes` instead."""

    hidden_sizes: Sizes = (64, 64)
    """Widths of the hidden layers for vector observations; images use the settings below."""
    encoder: EncoderName = "auto"
    """Convolutions for images: `nature`, `impala`, `small`, or `auto`, which goes by their size."""
    features_dim: PositiveInt | None = 512
    """Width of the layer after the convolutions; null has none, so that a head reads them."""
    head_hidden_sizes: Sizes = ()
    """Hidden layers between the features of an image and the outputs."""

    @property
    def features(self) -> tuple[int, ...]:
        """Widths of the layers that belong to the features of an image."""
        return () if self.features_dim is None else (self.features_dim,)


def refuse_standardized(env: EnvSpec, key: str, asked_for: bool) -> None:
    """Refuse to standardise images.

    Raises:
        ConfigError: When the setting `key` asks for it.
    """
    if asked_for:
        raise ConfigError(
            f"algo_kwargs.{key} is true, but {env.env_id} gives images, which are scaled "
            "to [0, 1] as they are; set it to false"
        )


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
) -> MLPEncoder | PixelEncoder:
    """Build the encoder of a task.

    Args:
        env: The task.
        config: The settings, `PixelConfig` among their parts.
        rng: Source of the initial weights.
        features: Layers after the convolutions; None has those of the settings.
        more: Hidden layers after the features of an image.
        activation: What follows each hidden layer.
        noisy: Let the hidden layers carry learned noise.
        orthogonal_init: Draw orthogonal weights.
    """
    images = part_of(config, PixelConfig)
    options = EncoderOptions(
        hidden_sizes=images.hidden_sizes,
        pixel_sizes=(*(images.features if features is None else features), *more),
        kind=images.encoder,
        activation=activation,
        noisy=noisy,
        orthogonal_init=orthogonal_init,
    )
    return make_encoder(env.obs_shape, env.obs_dtype, options, rng)

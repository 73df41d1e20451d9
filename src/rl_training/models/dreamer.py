"""The networks of Dreamer: world model, actor and critic, for S seeds, in named sizes.

Actions go through the networks as vectors `[..., A]`: one-hot for discrete ones.
Shapes: S seeds, B batch, T steps, A action, F features of a state, K bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from rl_training.models.heads import LOG_SQRT_2PI, gaussian_log_prob
from rl_training.models.latents import (
    CategoricalLatent,
    GaussianLatent,
    Latent,
    mixed_log_probs,
    one_hot_argmax,
)
from rl_training.models.normed import NormedMLP
from rl_training.models.rssm import RSSM, RSSMSequence
from rl_training.models.symlog import TwoHot
from rl_training.models.world_encoders import (
    ImageDecoder,
    ImageEncoder,
    VectorDecoder,
    VectorEncoder,
)
from rl_training.rng import Rng

LatentKind: TypeAlias = Literal["categorical", "gaussian"]
SizeName: TypeAlias = Literal["tiny", "small", "medium"]
UNIFORM_MIX = 0.01
"""Share of the uniform distribution in every categorical one."""
LEAST_STD, LARGEST_STD = 0.1, 1.0
"""Deviations of a policy over continuous actions."""


@dataclass(frozen=True, kw_only=True)
class DreamerSize:
    """Widths of all networks."""

    deter: int
    """Deterministic state D."""
    hidden: int
    """Layers inside the recurrent model."""
    units: int
    """Layers of the heads, of actor and critic, and of the encoder of vectors."""
    layers: int
    """How many of them."""
    depth: int
    """Channels of the first convolution."""
    groups: int
    """Categorical variables of the stochastic state."""
    classes: int
    """Classes of each."""
    gaussians: int = 30
    """Normal variables in their place, where they are asked for."""


SIZES: dict[str, DreamerSize] = {
    "tiny": DreamerSize(
        deter=128, hidden=64, units=64, layers=2, depth=8, groups=16, classes=8, gaussians=16
    ),
    "small": DreamerSize(
        deter=512, hidden=256, units=256, layers=2, depth=16, groups=32, classes=16
    ),
    "medium": DreamerSize(
        deter=1024, hidden=512, units=512, layers=3, depth=32, groups=32, classes=32
    ),
}


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
            latents: Kind of the stochastic state.
            num_bins: K, of the reward's distribution.
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        latent = make_latent(latents, size)
        self.feature_dim = size.deter + latent.size
        hidden = [size.units] * size.layers
        self.encoder: ImageEncoder | VectorEncoder
        self.decoder: ImageDecoder | VectorDecoder
        if len(obs_shape) == 3:
            images = ImageEncoder(obs_shape, size.depth, rng, obs_scale)
            self.encoder = images
            self.decoder = ImageDecoder(images, obs_shape[0], self.feature_dim, rng)
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
            rng=rng,
        )
        self.reward_bins = TwoHot(num_bins, device=rng.device)
        self.reward_head = two_hot_head(self.feature_dim, hidden, self.reward_bins, rng)
        self.continue_head = NormedMLP((self.feature_dim, *hidden, 1), rng)

    def observe(self, obs: Tensor, action: Tensor, is_first: Tensor, rng: Rng) -> RSSMSequence:
        """Follow sequences of observations `[S, B, T, ...]` and the actions before them."""
        batch, steps = is_first.shape[1:]
        embedding: Tensor = self.encoder(obs.flatten(1, 2)).unflatten(1, (batch, steps))
        noise = self.rssm.latent.draw_noise(rng, batch, steps)
        return self.rssm.observe(embedding, action, is_first, noise)

    def reward(self, features: Tensor) -> Tensor:
        """Return the expected reward of arriving at states `[S, B, F]`, `[S, B]`."""
        return self.reward_bins.mean(self.reward_head(features))

    def continuation(self, features: Tensor) -> Tensor:
        """Return the probability `[S, B]` that states are not terminal."""
        return torch.sigmoid(self.continue_head(features).squeeze(-1))


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

    def _normal(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean in [-1, 1] and deviation `[S, B, A]` of a continuous policy."""
        mean, spread = self.layers(features).chunk(2, -1)
        std = LEAST_STD + (LARGEST_STD - LEAST_STD) * torch.sigmoid(spread + 2)
        return torch.tanh(mean), std

    def mode(self, features: Tensor) -> Tensor:
        """Return the most likely action as a vector `[S, B, A]`."""
        if self.discrete:
            return one_hot_argmax(self.layers(features))
        return self._normal(features)[0]

    def sample(self, features: Tensor, noise: Tensor) -> Tensor:
        """Draw an action as a vector `[S, B, A]`."""
        if self.discrete:
            log_probs = mixed_log_probs(self.layers(features), UNIFORM_MIX)
            return one_hot_argmax(log_probs - noise)
        mean, std = self._normal(features)
        return torch.addcmul(mean, std, noise)

    def executed(self, action: Tensor) -> Tensor:
        """Return what a task makes of an action: continuous ones end at their bounds."""
        return action if self.discrete else action.clamp(-1, 1)

    def log_prob_entropy(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log density of actions `[S, B, A]` and entropy, each `[S, B]`."""
        if self.discrete:
            log_probs = mixed_log_probs(self.layers(features), UNIFORM_MIX)
            return (log_probs * action).sum(-1), -(log_probs.exp() * log_probs).sum(-1)
        mean, std = self._normal(features)
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

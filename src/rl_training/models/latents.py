"""Stochastic parts of a recurrent state-space model: what is drawn, and how far two beliefs differ.

A network gives raw outputs `[..., P]`; a latent makes a flat sample `[..., Z]` of them, through
which gradients flow, and the divergence KL(q || p) `[...]` of two of them.
Shapes: G groups, C classes of each.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rl_training.rng import Rng


class Latent(Protocol):
    """A kind of stochastic state."""

    size: int
    """Z: entries of a sample."""
    outputs: int
    """P: numbers that a network must give."""

    def draw_noise(self, rng: Rng, *shape: int) -> Tensor:
        """Draw what `sample` takes, `[S, *shape, ...]`."""
        ...

    def sample(self, raw: Tensor, noise: Tensor) -> Tensor:
        """Return a sample `[..., Z]` of the distribution of `raw` `[..., P]`."""
        ...

    def kl(self, raw: Tensor, other: Tensor) -> Tensor:
        """Return KL(raw || other) in nats, summed over the latent, `[...]`."""
        ...


def mixed_probs(logits: Tensor, mix: float) -> Tensor:
    """Return `(1 - mix) softmax(logits) + mix uniform`, over the last axis.

    The share of the uniform distribution keeps probabilities off 0, so that divergences and policy
    gradients stay bounded ("unimix" in arXiv:2301.04104).
    """
    return (1 - mix) * torch.softmax(logits, -1) + mix / logits.shape[-1]


def mixed_log_probs(logits: Tensor, mix: float) -> Tensor:
    """Return the logarithm of `mixed_probs`."""
    if mix == 0.0:
        return functional.log_softmax(logits, -1)
    return torch.log(mixed_probs(logits, mix))


def one_hot_draw(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw from probabilities `[..., C]` by one uniform number `[...]` each, as one-hot vectors.

    The class in whose share of [0, 1) the number falls; one number where the Gumbel trick takes C.
    """
    passed = (probs.cumsum(-1) <= noise.unsqueeze(-1)).sum(-1, keepdim=True)
    classes = torch.arange(probs.shape[-1], device=probs.device)
    # Shares may add up to a little less than 1.
    return (passed.clamp(max=probs.shape[-1] - 1) == classes).to(probs.dtype)


def one_hot_argmax(scores: Tensor) -> Tensor:
    """One at the largest of the last axis, 0 elsewhere; reads nothing on the host."""
    classes = torch.arange(scores.shape[-1], device=scores.device)
    return (scores.argmax(-1, keepdim=True) == classes).to(scores.dtype)


def straight_through(sample: Tensor, probs: Tensor) -> Tensor:
    """Return `sample` with the gradient of `probs` (Bengio et al., 2013)."""
    return sample + (probs - probs.detach())


class CategoricalLatent:
    """G categorical variables of C classes with a share of the uniform distribution (V2, V3)."""

    def __init__(self, groups: int, classes: int, mix: float = 0.01) -> None:
        self.groups, self.classes, self.mix = groups, classes, mix
        self.size = self.outputs = groups * classes

    def _grouped(self, raw: Tensor) -> Tensor:
        return raw.view(*raw.shape[:-1], self.groups, self.classes)

    def _log_probs(self, raw: Tensor) -> Tensor:
        """Log probabilities `[..., G, C]`."""
        return mixed_log_probs(self._grouped(raw), self.mix)

    def draw_noise(self, rng: Rng, *shape: int) -> Tensor:
        """Draw a uniform number for each group, `[S, *shape, G]`."""
        return rng.uniform(*shape, self.groups)

    def sample(self, raw: Tensor, noise: Tensor) -> Tensor:
        """Draw one-hot vectors `[..., G C]` with the gradient of their probabilities."""
        probs = mixed_probs(self._grouped(raw), self.mix)
        return straight_through(one_hot_draw(probs.detach(), noise), probs).flatten(-2)

    def kl(self, raw: Tensor, other: Tensor) -> Tensor:
        """Sum of `q (log q - log p)` over groups and classes, `[...]`."""
        ours, theirs = self._log_probs(raw), self._log_probs(other)
        return (ours.exp() * (ours - theirs)).sum((-2, -1))


class GaussianLatent:
    """Z independent normal variables with learned mean and deviation (V1, arXiv:1912.01603)."""

    def __init__(self, size: int, least_std: float = 0.1) -> None:
        self.size, self.outputs, self.least_std = size, 2 * size, least_std

    def moments(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation `[..., Z]`."""
        mean, spread = raw.chunk(2, -1)
        return mean, functional.softplus(spread) + self.least_std

    def draw_noise(self, rng: Rng, *shape: int) -> Tensor:
        """Draw standard normal noise `[S, *shape, Z]`."""
        return rng.normal(*shape, self.size)

    def sample(self, raw: Tensor, noise: Tensor) -> Tensor:
        """Draw `mean + std noise`, `[..., Z]` (the reparameterisation trick)."""
        mean, std = self.moments(raw)
        return torch.addcmul(mean, std, noise)

    def kl(self, raw: Tensor, other: Tensor) -> Tensor:
        """Sum of `log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2`, `[...]`."""
        (mean, std), (other_mean, other_std) = self.moments(raw), self.moments(other)
        ratio = (std.square() + (mean - other_mean).square()) / (2 * other_std.square())
        return (torch.log(other_std / std) + ratio - 0.5).sum(-1)

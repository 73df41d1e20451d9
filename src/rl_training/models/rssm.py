"""The recurrent state-space model: a deterministic and a stochastic part, moved on step by step.

    h_t = f(h_{t-1}, z_{t-1}, a_{t-1})      recurrent, deterministic
    z_t ~ q(z_t | h_t, x_t)                 posterior, when an observation is seen
    z_t ~ p(z_t | h_t)                      prior, when it is imagined

(World model learning in arXiv:2301.04104; Section 3 of arXiv:1912.01603.)  The kinds of z are
`CategoricalLatent` and `GaussianLatent`: a network gives raw outputs `[..., P]`; a latent makes a
flat sample `[..., Z]` of them, through which gradients flow, and the divergence KL(q || p) `[...]`
of two of them.  Nothing passes a
reset: where an episode begins h, z and a are 0.  What does not depend on the step before is
computed for a whole sequence at once, outside the loop over time: the shares of actions and
observations, and the priors.
Shapes: S seeds, B batch, T steps, D deterministic, Z stochastic, E embedding, A action,
G groups of a categorical latent, C classes of each.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.layers import NormedMLP, StackedLinear, StackedRMSNorm, scaled_init
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


class RSSMState(NamedTuple):
    """Where the model stands: h `[..., D]` and z `[..., Z]`."""

    deter: Tensor
    latent: Tensor

    @property
    def features(self) -> Tensor:
        """What the heads read, `[..., D + Z]`."""
        return torch.cat((self.deter, self.latent), -1)

    def detach(self) -> RSSMState:
        """The same without gradients."""
        return RSSMState(self.deter.detach(), self.latent.detach())


class RSSMSequence(NamedTuple):
    """A sequence of posterior states and the raw outputs of both beliefs, `[S, B, T, ...]`."""

    state: RSSMState
    posterior: Tensor
    prior: Tensor


class RSSM(nn.Module):
    """A GRU with RMS normalisation around latents of any kind."""

    def __init__(
        self,
        latent: Latent,
        *,
        deter: int,
        hidden: int,
        embedding: int,
        action: int,
        rng: Rng,
    ) -> None:
        """Build the layers.

        Args:
            latent: Kind of the stochastic part.
            deter: D.
            hidden: Width of the layers between.
            embedding: E.
            action: A; discrete actions are one-hot.
            rng: Source of the initial weights.
        """
        super().__init__()

        def linear(inputs: int, outputs: int) -> StackedLinear:
            return StackedLinear(inputs, outputs, rng, (), scaled_init(1.0))

        self.latent, self.deter_size = latent, deter
        self.from_latent, self.from_action = linear(latent.size, hidden), linear(action, hidden)
        self.input_norm = StackedRMSNorm(hidden, rng)
        self.gates = linear(hidden + deter, 3 * deter)
        self.gates_norm = StackedRMSNorm(3 * deter, rng)
        self.from_deter, self.from_embedding = linear(deter, hidden), linear(embedding, hidden)
        self.posterior_norm = StackedRMSNorm(hidden, rng)
        self.posterior = linear(hidden, latent.outputs)
        self.prior = NormedMLP((deter, hidden, latent.outputs), rng)

    def initial(self, num_seeds: int, rows: int, device: torch.device) -> RSSMState:
        """Return the state before the first step, `[S, rows, ...]`: zeros."""
        return RSSMState(
            torch.zeros(num_seeds, rows, self.deter_size, device=device),
            torch.zeros(num_seeds, rows, self.latent.size, device=device),
        )

    def recur(self, state: RSSMState, action_share: Tensor) -> Tensor:
        """Return h_t `[S, B, D]` from the state before and `from_action(a_{t-1})` `[S, B, .]`.

        r, u = sigmoid, c = tanh(r * candidate), h = u c + (1 - u) h: a GRU (Cho et al., 2014) whose
        update gate begins nearly closed, by the -1 of the authors' code.
        """
        x = functional.silu(self.input_norm(self.from_latent(state.latent) + action_share))
        joined = torch.cat((x, state.deter), -1)
        reset, candidate, update = self.gates_norm(self.gates(joined)).chunk(3, -1)
        change = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(state.deter, change, torch.sigmoid(update - 1))

    def believe(self, deter: Tensor, embedding_share: Tensor) -> Tensor:
        """Return raw outputs of q(z | h, x) from h and `from_embedding(e)`, `[S, B, P]`."""
        x = functional.silu(self.posterior_norm(self.from_deter(deter) + embedding_share))
        raw: Tensor = self.posterior(x)
        return raw.float()

    def observe(
        self, embedding: Tensor, action: Tensor, is_first: Tensor, noise: Tensor
    ) -> RSSMSequence:
        """Follow a sequence of observations.

        Args:
            embedding: `[S, B, T, E]`.
            action: Those that led to the observations, `[S, B, T, A]`.
            is_first: 1 where an episode begins, `[S, B, T]`; the past is forgotten there.
            noise: Of the posterior samples, `[S, B, T, ...]`.
        """
        seeds, batch, steps, _ = embedding.shape
        keep = (1 - is_first.to(torch.float32)).unsqueeze(-1)
        seen = self._over_time(self.from_embedding, embedding).unbind(2)
        acted = self._over_time(self.from_action, action * keep).unbind(2)
        keeps, noises = keep.unbind(2), noise.unbind(2)
        state = self.initial(seeds, batch, embedding.device)
        states, beliefs = [], []
        for step in range(steps):
            before = RSSMState(state.deter * keeps[step], state.latent * keeps[step])
            deter = self.recur(before, acted[step])
            raw = self.believe(deter, seen[step])
            state = RSSMState(deter, self.latent.sample(raw, noises[step]))
            states.append(state)
            beliefs.append(raw)
        deters = torch.stack([s.deter for s in states], 2)
        latents = torch.stack([s.latent for s in states], 2)
        prior = self._over_time(self.prior, deters)
        return RSSMSequence(RSSMState(deters, latents), torch.stack(beliefs, 2), prior)

    def observe_step(
        self, state: RSSMState, action: Tensor, embedding: Tensor, noise: Tensor
    ) -> RSSMState:
        """Move on by one observation; states `[S, B, ...]`, action `[S, B, A]`."""
        deter = self.recur(state, self.from_action(action))
        raw = self.believe(deter, self.from_embedding(embedding))
        return RSSMState(deter, self.latent.sample(raw, noise))

    def imagine_step(self, state: RSSMState, action: Tensor, noise: Tensor) -> RSSMState:
        """Move on by one action without an observation."""
        deter = self.recur(state, self.from_action(action))
        return RSSMState(deter, self.latent.sample(self.prior(deter), noise))

    @staticmethod
    def _over_time(layer: nn.Module, x: Tensor) -> Tensor:
        """Apply a layer to `[S, B, T, I]` at once."""
        out: Tensor = layer(x.flatten(1, 2))
        return out.view(*x.shape[:3], -1)

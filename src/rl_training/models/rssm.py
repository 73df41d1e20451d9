"""The recurrent state-space model: a deterministic and a stochastic part, moved on step by step.

    h_t = f(h_{t-1}, z_{t-1}, a_{t-1})      recurrent, deterministic
    z_t ~ q(z_t | h_t, x_t)                 posterior, when an observation is seen
    z_t ~ p(z_t | h_t)                      prior, when it is imagined

(World model learning in arXiv:2301.04104; Section 3 of arXiv:1912.01603.)  The kinds of z are
`CategoricalLatent` and `GaussianLatent`: a network gives raw outputs `[..., P]`; a latent makes a
flat sample `[..., Z]` of them, through which gradients flow, and the divergence KL(q || p) `[...]`
of two of them.  Nothing passes a reset: where an episode begins h, z and a are 0.

f is a GRU whose large products are cut into g blocks: entries of h meet those of other blocks only
through narrow layers that read all of h, z and a.  What does not depend on the step before is
computed for a whole sequence at once: the shares of actions and observations, and the priors.  What
does is a function of tensors (`Observe`, `follow`), which `scan` repeats.
Shapes: S seeds, B batch, T steps, D deterministic, Z stochastic, E embedding, A action, H hidden,
g blocks, G groups of a categorical latent, C classes of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.layers import (
    NormedMLP,
    StackedLinear,
    StackedRMSNorm,
    rms_norm,
    scaled_init,
)
from rl_training.models.scan import Tensors, scan
from rl_training.rng import Rng


class Latent(Protocol):
    """A kind of stochastic state."""

    @property
    def size(self) -> int:
        """Z: entries of a sample."""
        ...

    @property
    def outputs(self) -> int:
        """P: numbers that a network must give."""
        ...

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


@dataclass(frozen=True)
class CategoricalLatent:
    """G categorical variables of C classes with a share of the uniform distribution (V2, V3)."""

    groups: int
    classes: int
    mix: float = 0.01

    @property
    def size(self) -> int:
        """G C."""
        return self.groups * self.classes

    @property
    def outputs(self) -> int:
        """G C logits."""
        return self.groups * self.classes

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


@dataclass(frozen=True)
class GaussianLatent:
    """Z independent normal variables with learned mean and deviation (V1, arXiv:1912.01603)."""

    size: int
    least_std: float = 0.1

    @property
    def outputs(self) -> int:
        """A mean and a raw deviation of each."""
        return 2 * self.size

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
    """The state of the model: h `[..., D]` and z `[..., Z]`."""

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


# Layers as functions of tensors: what a step of `scan` is made of


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map `[S, B, I]` to `[S, B, O]` in the format of the weight."""
    return torch.baddbmm(bias, x.to(weight.dtype), weight)


def activated(x: Tensor, scale: Tensor) -> Tensor:
    """Normalise over the last axis, then SiLU, in single precision."""
    return functional.silu(rms_norm(x, scale))


def product_in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Map each block of `[S, B, g I]` by its own weight `[S, g, I, O]`, giving `[S, g, B, O]`."""
    seeds, blocks = weight.shape[:2]
    parts = x.to(weight.dtype).reshape(*x.shape[:-1], blocks, -1).transpose(1, 2)  # [S, g, B, I]
    out = torch.bmm(parts.flatten(0, 1), weight.flatten(0, 1))
    return out.view(seeds, blocks, *out.shape[1:])


def joined(x: Tensor) -> Tensor:
    """Put blocks `[S, g, B, O]` side by side, `[S, B, g O]`."""
    return x.transpose(1, 2).flatten(2)


class RecurrentWeights(NamedTuple):
    """What f is made of, without the share of the action."""

    deter: Tensor
    deter_bias: Tensor
    deter_scale: Tensor
    latent: Tensor
    latent_bias: Tensor
    latent_scale: Tensor
    block: Tensor
    """Of the hidden layer, for the block's own part of h, `[S, g, D / g, D / g]`."""
    shared: Tensor
    """The same for what all blocks read of h and z, `[S, 2 H, D]`."""
    hidden_scale: Tensor
    gates: Tensor
    """`[S, g, D / g, 3 D / g]`."""
    gates_bias: Tensor


class ActionWeights(NamedTuple):
    """What makes the share of an action in the hidden layer of f."""

    weight: Tensor
    bias: Tensor
    scale: Tensor
    shared: Tensor
    """`[S, H, D]`."""
    shared_bias: Tensor


class PosteriorWeights(NamedTuple):
    """What makes beliefs of h and the share of an observation."""

    deter: Tensor
    scale: Tensor
    output: Tensor
    output_bias: Tensor


def action_share(action: Tensor, weights: ActionWeights) -> Tensor:
    """Return what actions `[S, B, A]` add to the hidden layer of f, `[S, B, D]`."""
    x = activated(affine(action, weights.weight, weights.bias), weights.scale)
    return affine(x, weights.shared, weights.shared_bias).to(x.dtype)


def recur(deter: Tensor, latent: Tensor, acted: Tensor, weights: RecurrentWeights) -> Tensor:
    """Return h_t `[S, B, D]` from h_{t-1}, z_{t-1} and the share of a_{t-1}.

    r, u = sigmoid, c = tanh(r * candidate), h = u c + (1 - u) h: a GRU (Cho et al., 2014) whose
    update gate begins nearly closed, by the -1 of the authors' code.
    """
    x = torch.cat(
        (
            activated(affine(deter, weights.deter, weights.deter_bias), weights.deter_scale),
            activated(affine(latent, weights.latent, weights.latent_bias), weights.latent_scale),
        ),
        -1,
    )
    shared = torch.bmm(x.to(weights.shared.dtype), weights.shared)
    hidden = activated(
        joined(product_in_blocks(deter, weights.block)) + shared + acted, weights.hidden_scale
    )
    gates = (product_in_blocks(hidden, weights.gates) + weights.gates_bias).to(deter.dtype)
    reset, candidate, update = (joined(gate) for gate in gates.chunk(3, -1))
    change = torch.tanh(torch.sigmoid(reset) * candidate)
    return torch.lerp(deter, change, torch.sigmoid(update - 1))


def believe(deter: Tensor, observed: Tensor, weights: PosteriorWeights) -> Tensor:
    """Return raw outputs of q(z | h, x) from h and the share of an observation, `[S, B, P]`."""
    x = activated(torch.bmm(deter.to(weights.deter.dtype), weights.deter) + observed, weights.scale)
    return affine(x, weights.output, weights.output_bias).to(x.dtype)


def normed_mlp(x: Tensor, weights: Tensors) -> Tensor:
    """Apply what `NormedMLP.operands` gives, `[S, B, I]` to `[S, B, O]`."""
    *hidden, weight, bias = weights
    for index in range(0, len(hidden), 3):
        x = activated(affine(x, hidden[index], hidden[index + 1]), hidden[index + 2])
    return affine(x, weight, bias).to(x.dtype)


@dataclass(frozen=True)
class Observe:
    """A step with an observation: (h, z) and (share of a, share of x, keep, noise) to (h, z).

    Gives the raw outputs of the posterior.  Where `keep` is 0 the past is forgotten.
    """

    latent: Latent

    def __call__(
        self, state: Tensors, inputs: Tensors, weights: Tensors
    ) -> tuple[Tensors, Tensors]:
        """See `Step`."""
        (deter, latent), (acted, observed, keep, noise) = state, inputs
        count = len(RecurrentWeights._fields)
        own, belief = RecurrentWeights(*weights[:count]), PosteriorWeights(*weights[count:])
        deter = recur(deter * keep, latent * keep, acted, own)
        raw = believe(deter, observed, belief)
        return (deter, self.latent.sample(raw, noise)), (raw,)


class RSSM(nn.Module):
    """A GRU in blocks with RMS normalisation around latents of any kind."""

    def __init__(
        self,
        latent: Latent,
        *,
        deter: int,
        hidden: int,
        embedding: int,
        action: int,
        blocks: int = 1,
        prior_layers: int = 2,
        rng: Rng,
    ) -> None:
        """Build the layers.

        Args:
            latent: Kind of the stochastic part.
            deter: D, a multiple of `blocks`.
            hidden: H, width of the layers between.
            embedding: E.
            action: A; discrete actions are one-hot.
            blocks: g.
            prior_layers: Hidden layers of the prior.
            rng: Source of the initial weights.
        """
        super().__init__()

        def linear(inputs: int, outputs: int, members: tuple[int, ...] = ()) -> StackedLinear:
            return StackedLinear(inputs, outputs, rng, members, scaled_init(1.0))

        self.latent, self.deter_size, self.hidden_size = latent, deter, hidden
        self.blocks = blocks
        width = deter // blocks
        self.from_deter, self.deter_norm = linear(deter, hidden), StackedRMSNorm(hidden, rng)
        self.from_latent = linear(latent.size, hidden)
        self.latent_norm = StackedRMSNorm(hidden, rng)
        self.from_action, self.action_norm = linear(action, hidden), StackedRMSNorm(hidden, rng)
        # Inputs of a block: its own part of h, then what all blocks read of h, z and a.
        self.hidden = linear(width + 3 * hidden, width, (blocks,))
        self.hidden_norm = StackedRMSNorm(deter, rng)
        self.gates = linear(width, 3 * width, (blocks,))
        self.belief = linear(deter + embedding, hidden)
        self.belief_norm = StackedRMSNorm(hidden, rng)
        self.posterior = linear(hidden, latent.outputs)
        self.prior = NormedMLP((deter, *[hidden] * prior_layers, latent.outputs), rng)

    def initial(self, num_seeds: int, rows: int, device: torch.device) -> RSSMState:
        """Return the state before the first step, `[S, rows, ...]`: zeros."""
        return RSSMState(
            torch.zeros(num_seeds, rows, self.deter_size, device=device),
            torch.zeros(num_seeds, rows, self.latent.size, device=device),
        )

    def state_of(self, features: Tensor) -> RSSMState:
        """Return the state that has these features `[..., D + Z]`."""
        return RSSMState(features[..., : self.deter_size], features[..., self.deter_size :])

    def recurrent_weights(self) -> tuple[RecurrentWeights, ActionWeights]:
        """Return the weights of f in the format of products."""
        weight, bias = self.hidden.operands()  # [S, g, D / g + 3 H, D / g], [S, g, 1, D / g]
        block = weight[:, :, : weight.shape[-1]]
        shared = joined(weight[:, :, weight.shape[-1] :])  # [S, 3 H, D]
        for_action = shared[:, 2 * self.hidden_size :]
        own = RecurrentWeights(
            *self.from_deter.operands(),
            self.deter_norm.scale,
            *self.from_latent.operands(),
            self.latent_norm.scale,
            block,
            shared[:, : 2 * self.hidden_size],
            self.hidden_norm.scale,
            *self.gates.operands(),
        )
        return own, ActionWeights(
            *self.from_action.operands(), self.action_norm.scale, for_action, joined(bias)
        )

    def posterior_weights(self) -> tuple[PosteriorWeights, Tensors]:
        """Return the weights of the posterior, and those of the share of an observation."""
        weight, bias = self.belief.operands()
        deter, embedding = weight[:, : self.deter_size], weight[:, self.deter_size :]
        own = PosteriorWeights(deter, self.belief_norm.scale, *self.posterior.operands())
        return own, (embedding, bias)

    def observe(
        self,
        embedding: Tensor,
        action: Tensor,
        is_first: Tensor,
        noise: Tensor,
        start: RSSMState | None = None,
    ) -> RSSMSequence:
        """Follow a sequence of observations.

        Args:
            embedding: `[S, B, T, E]`.
            action: Those that led to the observations, `[S, B, T, A]`.
            is_first: 1 where an episode begins, `[S, B, T]`; the past is forgotten there.
            noise: Of the posterior samples, `[S, B, T, ...]`.
            start: The state before, `[S, B, ...]`; None is the initial one.
        """
        seeds, batch, steps, _ = embedding.shape
        keep = (1 - is_first.to(action.dtype)).unsqueeze(-1)
        recurrent, acting = self.recurrent_weights()
        belief, seeing = self.posterior_weights()
        acted = action_share(time_rows(action * keep), acting).view(seeds, steps, batch, -1)
        observed = affine(time_rows(embedding), *seeing).view(seeds, steps, batch, -1)
        if start is None:
            start = self.initial(seeds, batch, embedding.device)
        inputs = (acted, observed, *(part.transpose(1, 2) for part in (keep, noise)))
        outputs = scan(
            Observe(self.latent),
            tuple(start),
            tuple(part.transpose(0, 1) for part in inputs),
            (*recurrent, *belief),
        )
        deter, latent, raw = (
            part.permute(1, 2, 0, 3) for part in (*outputs.states, *outputs.outputs)
        )
        prior: Tensor = self.prior(deter.flatten(1, 2)).view(seeds, batch, steps, -1)
        return RSSMSequence(RSSMState(deter, latent), raw, prior)

    def observe_step(
        self, state: RSSMState, action: Tensor, embedding: Tensor, noise: Tensor
    ) -> RSSMState:
        """Move on by one observation; states `[S, B, ...]`, action `[S, B, A]`."""
        recurrent, acting = self.recurrent_weights()
        belief, seeing = self.posterior_weights()
        deter = recur(*state, action_share(action, acting), recurrent)
        raw = believe(deter, affine(embedding, *seeing), belief)
        return RSSMState(deter, self.latent.sample(raw, noise))

    def imagine_step(self, state: RSSMState, action: Tensor, noise: Tensor) -> RSSMState:
        """Move on by one action without an observation."""
        recurrent, acting = self.recurrent_weights()
        deter = recur(*state, action_share(action, acting), recurrent)
        return RSSMState(deter, self.latent.sample(self.prior(deter), noise))


def time_rows(x: Tensor) -> Tensor:
    """`[S, B, T, I]` as rows in the order of time, `[S, T B, I]`."""
    return x.transpose(1, 2).flatten(1, 2)

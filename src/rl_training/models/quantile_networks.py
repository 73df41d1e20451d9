"""Networks of return distributions: fixed, sampled and proposed quantile fractions.

Each is an encoder, which gives an embedding `[S, B, E]` and may be swapped, and a head on top.
Shapes: S seeds, B batch, E embedding, C cosines, A actions, N quantiles, T fractions asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_training.models.layers import ActivationName, StackedLinear, StackedMLP, linear_layer
from rl_training.models.mlp_q_network import Encoder, dueling_streams
from rl_training.rng import Rng


def cosine_features(tau: Tensor, count: int) -> Tensor:
    """Return cos(pi i tau), i = 1 .. count, `[..., count]` (Eq. 4 of arXiv:1806.06923).

    As in the authors' code; the paper's i = 0 is a constant, which the bias of the next layer is.
    """
    frequency = torch.arange(1, count + 1, device=tau.device, dtype=tau.dtype) * math.pi
    return torch.cos(tau.unsqueeze(-1) * frequency)


class QuantileNetwork(nn.Module):
    """`obs -> Z(s, .)`, N quantiles, or logits of N atoms, per action; dueling in each of them."""

    def __init__(
        self,
        encoder: Encoder,
        action_dim: int,
        num_quantiles: int,
        *,
        dueling: bool = False,
        noisy: bool = False,
        rng: Rng,
    ) -> None:
        super().__init__()
        self.encoder, self.obs_dim = encoder, encoder.obs_dim
        self.action_dim, self.num_quantiles, self.dueling = action_dim, num_quantiles, dueling
        outputs = (action_dim + int(dueling)) * num_quantiles
        self.head = linear_layer(encoder.embedding_dim, outputs, rng, noisy)

    def forward(self, obs: Tensor) -> Tensor:
        """Return the quantiles of every action, `[S, B, A, N]`."""
        flat = self.head.forward(self.encoder(obs)).float()
        out = flat.view(*flat.shape[:2], -1, self.num_quantiles)
        return dueling_streams(out, -2) if self.dueling else out


class ImplicitQuantileNetwork(nn.Module):
    """`(obs, tau) -> F^-1(tau)` of every action: the embedding times that of the fractions."""

    def __init__(
        self,
        encoder: Encoder,
        action_dim: int,
        embedding_dim: int = 64,
        head_hidden_sizes: Sequence[int] = (),
        *,
        activation: ActivationName = "relu",
        dueling: bool = False,
        noisy: bool = False,
        rng: Rng,
    ) -> None:
        """Build the network.

        Args:
            encoder: Gives the embedding of observations.
            action_dim: Number of actions.
            embedding_dim: Number of cosines that fractions are embedded by.
            head_hidden_sizes: Hidden layers between the product of embeddings and the quantiles.
            activation: What follows each of those.
            dueling: Split the head into a value and an advantage stream.
            noisy: Let the layers here carry learned noise; the encoder has its own say.
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        width = encoder.embedding_dim
        self.encoder, self.obs_dim = encoder, encoder.obs_dim
        self.action_dim, self.embedding_dim, self.dueling = action_dim, embedding_dim, dueling
        self.cosine_layer = linear_layer(embedding_dim, width, rng, noisy)
        sizes = (width, *head_hidden_sizes, action_dim + int(dueling))
        self.head = StackedMLP(sizes, rng, activation=activation, noisy=noisy)

    def embed(self, obs: Tensor) -> Tensor:
        """Embed observations, `[S, B, E]`; once per state, however many fractions are asked for."""
        embedding: Tensor = self.encoder(obs)
        return embedding

    def quantiles(self, embedding: Tensor, tau: Tensor) -> Tensor:
        """Return F^-1 at `tau` `[S, B, T]`, or `[S, 1, T]` for all states, as `[S, B, A, T]`."""
        S, B, _ = embedding.shape
        joint = embedding.unsqueeze(2) * self._embed_fractions(tau)  # [S, B, T, E]
        flat = self.head.forward(joint.flatten(1, 2))
        out = flat.view(S, B, tau.shape[-1], flat.shape[-1])
        return (dueling_streams(out) if self.dueling else out).mT

    def mean(self, embedding: Tensor, tau: Tensor, widths: Tensor | None = None) -> Tensor:
        """Return the mean over `tau` of every action `[S, B, A]`.

        Args:
            embedding: Of the states.
            tau: Fractions `[S, B, T]`, or `[S, 1, T]` for all states.
            widths: Their weights `[S, B, T]`, which sum to 1; all the same without.
        """
        if len(self.head.layers) > 1:
            quantiles = self.quantiles(embedding, tau)
            if widths is None:
                return quantiles.mean(-1)
            return (quantiles * widths.unsqueeze(2)).sum(-1)
        # A head of one layer is linear, so that it may follow the mean: one row in place of T.
        of_tau = self._embed_fractions(tau)
        of_all = of_tau.mean(2) if widths is None else (of_tau * widths.unsqueeze(-1)).sum(2)
        out = self.head.forward(embedding * of_all)
        return dueling_streams(out) if self.dueling else out

    def _embed_fractions(self, tau: Tensor) -> Tensor:
        """Embed fractions `[S, B, T]` as `[S, B, T, E]`."""
        cosines = cosine_features(tau, self.embedding_dim).flatten(1, 2)  # [S, B T, C]
        flat = torch.relu(self.cosine_layer.forward(cosines).float())
        return flat.view(*tau.shape, flat.shape[-1])

    def forward(self, obs: Tensor, tau: Tensor) -> Tensor:
        """Return F^-1 of every action at `tau` `[S, B, T]`, as `[S, B, A, T]`."""
        return self.quantiles(self.embed(obs), tau)


class Fractions(NamedTuple):
    """Fractions proposed for a state; the same for all actions."""

    taus: Tensor
    """tau_0 = 0 < tau_1 < ... < tau_N = 1, `[S, B, N + 1]`; the proposal's gradient flows here."""
    tau_hats: Tensor
    """Midpoints `[S, B, N]`, without gradient."""
    entropy: Tensor
    """Entropy of the widths `[S, B]`, at most log N."""

    @property
    def widths(self) -> Tensor:
        """tau_{i+1} - tau_i, `[S, B, N]`, without gradient."""
        return self.taus.detach().diff(dim=-1)


class FQFOutput(NamedTuple):
    """What the network of FQF says about states; without the seed axis where the input has none."""

    quantile_hats: Tensor
    """F^-1 at the midpoints, `[S, B, A, N]`."""
    taus: Tensor
    """Fractions from 0 to 1, `[S, B, N + 1]`."""
    tau_hats: Tensor
    """Midpoints `[S, B, N]`."""
    quantiles_tau: Tensor
    """F^-1 at the inner fractions, `[S, B, A, N - 1]`."""


class FQFNetwork(nn.Module):
    """An implicit quantile network, and a layer that proposes the fractions it is asked for."""

    def __init__(
        self,
        quantile_network: ImplicitQuantileNetwork,
        num_quantiles: int,
        *,
        uniform_share: float = 0.02,
        rng: Rng,
    ) -> None:
        """Build the proposal on top of the quantile network.

        Args:
            quantile_network: Gives the embedding and the quantiles.
            num_quantiles: N.
            uniform_share: Share of equal widths in every proposal, so that no width is below
                `uniform_share / N`.
            rng: Source of the initial weights.
        """
        super().__init__()
        self.quantile_network, self.obs_dim = quantile_network, quantile_network.obs_dim
        self.action_dim, self.num_quantiles = quantile_network.action_dim, num_quantiles
        self.uniform_share = uniform_share
        width = quantile_network.encoder.embedding_dim
        self.fraction_layer = StackedLinear(width, num_quantiles, rng, init=_near_zero)

    def fractions(self, embedding: Tensor) -> Fractions:
        """Propose fractions from an embedding, which receives no gradient from here."""
        logits = self.fraction_layer.forward(embedding.detach()).float()
        equal = self.uniform_share / self.num_quantiles
        widths = (1 - self.uniform_share) * logits.softmax(-1) + equal  # [S, B, N]
        inner = widths.cumsum(-1)[..., :-1].clamp(max=1.0)
        ends = torch.zeros_like(widths[..., :1])
        taus = torch.cat((ends, inner, ends + 1), -1)
        middle = taus.detach()
        entropy = -(widths * widths.clamp(min=1e-12).log()).sum(-1)
        return Fractions(taus, (middle[..., 1:] + middle[..., :-1]) / 2, entropy)

    def forward(self, obs: Tensor) -> FQFOutput:
        """Return quantiles and fractions of states."""
        network = self.quantile_network
        embedding = network.embed(obs)
        taus, tau_hats, _ = self.fractions(embedding)
        hats = network.quantiles(embedding, tau_hats)
        inner = network.quantiles(embedding, taus.detach()[..., 1:-1])
        return FQFOutput(hats, taus, tau_hats, inner)


def _near_zero(rng: Rng, members: tuple[int, ...], outputs: int, inputs: int) -> Tensor:
    """Draw Glorot's uniform weights at a hundredth of their size: widths start almost equal."""
    limit = 0.01 * math.sqrt(6 / (inputs + outputs))
    return (rng.uniform(*members, inputs, outputs) * 2 - 1) * limit

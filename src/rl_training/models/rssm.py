"""The recurrent state-space model: a deterministic and a stochastic part, moved on step by step.

    h_t = f(h_{t-1}, z_{t-1}, a_{t-1})      recurrent, deterministic
    z_t ~ q(z_t | h_t, x_t)                 posterior, when an observation is seen
    z_t ~ p(z_t | h_t)                      prior, when it is imagined

(World model learning in arXiv:2301.04104; Section 3 of arXiv:1912.01603.)  Nothing passes a
reset: where an episode begins h, z and a are 0.  What does not depend on the step before is
computed for a whole sequence at once, outside the loop over time: the shares of actions and
observations, and the priors.
Shapes: S seeds, B batch, T steps, D deterministic, Z stochastic, E embedding, A action.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.latents import Latent
from rl_training.models.layers import StackedLinear
from rl_training.models.normed import NormedMLP, StackedRMSNorm, scaled_init
from rl_training.rng import Rng


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

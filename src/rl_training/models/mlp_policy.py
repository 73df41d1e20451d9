"""A policy alone: categorical over discrete actions, diagonal Gaussian over continuous ones.

Shapes: S seeds, B batch, A actions or action entries, K parts of an action, E embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from rl_training.models.heads import LOG_SQRT_2PI, Choices, gaussian_log_prob, only_allowed
from rl_training.models.layers import ActivationName, StackedMLP
from rl_training.models.mlp_q_network import Encoder
from rl_training.rng import Rng


class MLPPolicyModel(nn.Module):
    """Policy with orthogonal weights, for S seeds, on observations or an encoder's features.

    Everything but `embed` takes embedded observations, which vectors are already, and, where
    the task says which actions are allowed, that mask `[S, B, A]`.
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        discrete: bool,
        action_sizes: Sequence[int] = (),
        encoder: Encoder | None = None,
        head_inputs: int | None = None,
        activation: ActivationName = "tanh",
        initial_log_std: float = 0.0,
        rng: Rng | None = None,
    ) -> None:
        """Build the network.

        Args:
            obs_dim: Entries of an observation.
            action_dim: Number of discrete actions, or length of a continuous one.
            hidden_sizes: Widths of the hidden layers.
            discrete: Categorical policy when true, diagonal Gaussian otherwise.
            action_sizes: Numbers of values of the parts of a multi-discrete action, `action_dim`
                together; each part has a categorical policy of its own.
            encoder: What makes features of observations; None lets the layers read them.
            head_inputs: Entries of what the layers read in place of that, such as a memory's.
            activation: Name of the activation.
            initial_log_std: Start of the Gaussian's log standard deviation (a free parameter).
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        self.obs_dim, self.action_dim, self.discrete = obs_dim, action_dim, discrete
        self.choices = Choices(action_dim, action_sizes)
        self.embedding_dim = obs_dim if encoder is None else encoder.embedding_dim
        self.head_inputs = self.embedding_dim if head_inputs is None else head_inputs
        # A small last layer makes the first policy nearly uniform (Andrychowicz et al., 2020).
        self.actor = StackedMLP(
            (self.head_inputs, *hidden_sizes, action_dim),
            rng,
            activation=activation,
            orthogonal=0.01,
        )
        if not discrete:
            shape = (rng.num_seeds, 1, action_dim)
            self.log_std = nn.Parameter(torch.full(shape, initial_log_std, device=rng.device))
        self.encoder = encoder

    def embed(self, obs: Tensor) -> Tensor:
        """Return what the networks read, `[S, B, E]`."""
        if self.encoder is None:
            return obs
        embedding: Tensor = self.encoder(obs)
        return embedding

    def mode_parameters(self) -> Iterator[nn.Parameter]:
        """Yield what the mode depends on: the policy's layers and the encoder below them."""
        yield from self.actor.parameters()
        if self.encoder is not None:
            yield from self.encoder.parameters()

    def logits(self, obs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the logits of a categorical policy, `[S, B, A]`."""
        return only_allowed(self.actor.forward(obs), allowed)

    def mode(self, obs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the most likely action."""
        if self.discrete:
            return self.choices.mode(self.logits(obs, allowed))
        return self.actor.forward(obs)

    def sample(self, obs: Tensor, noise: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Sample an action; `noise` is log-exponential when discrete, else normal."""
        if self.discrete:
            return self.choices.sample(self.logits(obs, allowed), noise)
        return torch.addcmul(self.actor.forward(obs), self.log_std.exp(), noise)

    def draw_noise(self, rng: Rng, *shape: int) -> Tensor:
        """Draw the noise that `sample` takes, `[S, *shape, A]`."""
        size = (*shape, self.action_dim)
        return rng.exponential(*size).log_() if self.discrete else rng.normal(*size)

    def log_prob_entropy(
        self, obs: Tensor, action: Tensor, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log density and entropy of the policy, each `[S, B]`."""
        if self.discrete:
            return self.choices.log_prob_entropy(self.logits(obs, allowed), action)
        noise = (action - self.actor.forward(obs)) * torch.exp(-self.log_std)
        log_prob = gaussian_log_prob(noise, self.log_std)
        entropy = (self.log_std + 0.5 + LOG_SQRT_2PI).sum(-1).expand_as(log_prob)
        return log_prob, entropy

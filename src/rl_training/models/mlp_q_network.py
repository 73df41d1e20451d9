"""Q-networks over discrete actions, plain or dueling: an MLP, or a head on any encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rl_training.models.layers import ActivationName, StackedMLP, linear_layer
from rl_training.rng import Rng

Encoder = Any  # a module `[S, B, ...] -> [S, B, E]` with `obs_dim` and `embedding_dim`


class MLPQNetwork(nn.Module):
    """`obs -> Q(s, .)` for S seeds; dueling: Q = V + A - mean A (Wang et al., 2016, Eq. 9)."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        activation: ActivationName = "relu",
        dueling: bool = False,
        noisy: bool = False,
        rng: Rng | None = None,
    ) -> None:
        """Build the network.

        Args:
            obs_dim: Length of an observation.
            action_dim: Number of actions.
            hidden_sizes: Widths of the shared hidden layers.
            activation: What follows each of them.
            dueling: Split the head into a value and an advantage stream.
            noisy: Let every layer carry learned noise, to explore by.
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        self.obs_dim, self.action_dim, self.dueling = obs_dim, action_dim, dueling
        sizes = (obs_dim, *hidden_sizes, action_dim + int(dueling))
        self.layers = StackedMLP(sizes, rng, activation=activation, noisy=noisy)

    def forward(self, obs: Tensor) -> Tensor:
        """Return Q of every action, `[S, B, A]`."""
        out = self.layers.forward(obs)
        if not self.dueling:
            return out
        return dueling_streams(out)


class QNetwork(nn.Module):
    """`obs -> Q(s, .)` by an encoder, such as one of images, and a linear head."""

    def __init__(
        self,
        encoder: Encoder,
        action_dim: int,
        *,
        dueling: bool = False,
        noisy: bool = False,
        rng: Rng,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.obs_dim, self.action_dim, self.dueling = encoder.obs_dim, action_dim, dueling
        self.head = linear_layer(encoder.embedding_dim, action_dim + int(dueling), rng, noisy)

    def forward(self, obs: Tensor) -> Tensor:
        """Return Q of every action, `[S, B, A]`."""
        out = self.head.forward(self.encoder(obs)).float()
        return dueling_streams(out) if self.dueling else out


def dueling_streams(out: Tensor, dim: int = -1) -> Tensor:
    """Join advantages and, last along `dim`, the value: V + A - mean A."""
    advantage = out.narrow(dim, 0, out.shape[dim] - 1)
    value = out.narrow(dim, out.shape[dim] - 1, 1)
    return value + advantage - advantage.mean(dim, keepdim=True)

"""A recurrent layer on observations, and an MLP on its output: networks of replayed sequences.

The MLP reads rows that begin with what the layer remembers, so that one pass over sequences serves
every use of the network.  Shapes: S seeds, B batch, E features, H outputs of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.actor_with_critics import MLPSACModel
from rl_training.models.layers import StackedMLP
from rl_training.models.memory import Memory, MemoryName, Recurrent
from rl_training.models.mlp_q_network import Encoder, dueling_streams
from rl_training.models.own_encoder import EncodedMLP
from rl_training.rng import Rng


class RecurrentMLP(Recurrent, EncodedMLP):
    """`observations -> memory`, and `(what is remembered, vectors beside it) -> outputs`."""

    def __init__(
        self,
        encoder: Encoder | None,
        obs_dim: int,
        sizes: Sequence[int],
        rng: Rng,
        *,
        memory: MemoryName,
        memory_size: int,
        beside: int = 0,
        **options: Any,
    ) -> None:
        """Build the layers.

        Args:
            encoder: What the recurrent layer reads; None lets it read the observation.
            obs_dim: Entries of an observation.
            sizes: Hidden widths of the MLP, outputs.
            rng: Source of the initial weights; its number of seeds is S.
            memory: `gru` or `lstm`.
            memory_size: H.
            beside: Entries of inputs beside what is remembered.
            **options: As for `StackedMLP`.
        """
        inputs = obs_dim if encoder is None else encoder.embedding_dim
        layer = Memory(inputs, memory_size, rng, memory)
        layers = StackedMLP((beside + memory_size, *sizes), rng, **options)
        super().__init__(nn.Identity() if encoder is None else encoder, layers)
        self.obs_dim, self.memory = obs_dim, layer

    def embed(self, obs: Tensor) -> Tensor:
        """Return what the recurrent layer reads, `[S, B, E]`."""
        features: Tensor = self.encoder(obs)
        return features

    def forward(
        self, obs: Tensor, *beside: Tensor, members: Tensor | slice | None = None
    ) -> Tensor:
        """Map what is remembered `[S, B, H]` and vectors `[S, B, I]` to `[S, *members, B, O]`."""
        return self.layers.forward(torch.cat((obs, *beside), -1), members)


class RecurrentQNetwork(RecurrentMLP):
    """Q of every action for what is remembered, `[S, B, H]`; dueling as in `MLPQNetwork`."""

    def __init__(
        self,
        encoder: Encoder | None,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int],
        rng: Rng,
        *,
        dueling: bool = False,
        **options: Any,
    ) -> None:
        """Build the network; arguments as of `RecurrentMLP` and `MLPQNetwork`."""
        sizes = (*hidden_sizes, action_dim + int(dueling))
        super().__init__(encoder, obs_dim, sizes, rng, **options)
        self.action_dim, self.dueling = action_dim, dueling

    def forward(
        self, obs: Tensor, *beside: Tensor, members: Tensor | slice | None = None
    ) -> Tensor:
        """Return Q of every action, `[S, B, A]`."""
        out = super().forward(obs, *beside, members=members)
        return dueling_streams(out) if self.dueling else out


class RecurrentSACModel(MLPSACModel):
    """`MLPSACModel` on rows of what actor, critics and target critics remember, `[S, B, 3 H]`."""

    actor: RecurrentMLP
    critic: RecurrentMLP

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        memory: MemoryName = "lstm",
        memory_size: int = 128,
        **options: Any,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action.
            hidden_sizes: Widths of the hidden layers of every network that has none of its own.
            memory: `gru` or `lstm`.
            memory_size: H.
            **options: As for `ActorWithCritics`.
        """
        self._memory: dict[str, Any] = {"memory": memory, "memory_size": memory_size}
        super().__init__(obs_dim, action_dim, hidden_sizes, **options)

    def network(
        self,
        sizes: Sequence[int],
        rng: Rng,
        *,
        beside: int = 0,
        members: tuple[int, ...] = (),
        layer_norm: bool = False,
    ) -> RecurrentMLP:
        """Build a network with a memory of its own, which its members share; see the base."""
        return RecurrentMLP(
            None if self._make_encoder is None else self._make_encoder(rng),
            self.obs_dim,
            sizes,
            rng,
            beside=beside,
            members=members,
            activation=self.activation,
            layer_norm=layer_norm,
            weights=self._weights,
            **self._memory,
        )

    def _remembered(self, rows: Tensor, part: int) -> Tensor:
        size = self.actor.memory.output_dim
        return rows[..., part * size : (part + 1) * size]

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation before the tanh, each `[S, B, A]`."""
        return super().policy(self._remembered(obs, 0))

    def q_values(
        self,
        obs: Tensor,
        action: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Return Q of every member `[S, N, B]`, by the target critics where they are given."""
        own = critic is None or critic is self.critic
        return super().q_values(self._remembered(obs, 1 if own else 2), action, critic, members)

"""Actor-critic networks that remember: a policy and a value on what a recurrent layer gives.

Shapes: S seeds, H outputs of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from rl_training.models.memory import Memory, MemoryName, Recurrent
from rl_training.models.mlp_actor_critic import ActorCriticModel
from rl_training.models.mlp_q_network import Encoder
from rl_training.rng import Rng


class RecurrentActorCriticModel(Recurrent, ActorCriticModel):
    """An encoder, a recurrent layer on its features, and a policy and a value on its output."""

    def __init__(
        self,
        encoder: Encoder | None,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int],
        *,
        memory: MemoryName,
        memory_size: int,
        rng: Rng,
        **options: Any,
    ) -> None:
        """Build the networks.

        Args:
            encoder: What the recurrent layer reads; None lets it read the observation.
            obs_dim: Entries of an observation.
            action_dim: Number of discrete actions, or length of a continuous one.
            hidden_sizes: Widths of the policy's hidden layers, which are after the recurrent one.
            memory: `gru` or `lstm`.
            memory_size: H.
            rng: Source of the initial weights; its number of seeds is S.
            **options: As for `ActorCriticModel`.
        """
        super().__init__(
            encoder, obs_dim, action_dim, hidden_sizes, head_inputs=memory_size, rng=rng, **options
        )
        self.memory = Memory(self.embedding_dim, memory_size, rng, memory)

    def mode_parameters(self) -> Iterator[nn.Parameter]:
        """Yield what the mode depends on, the recurrent layer among it."""
        yield from super().mode_parameters()
        yield from self.memory.parameters()

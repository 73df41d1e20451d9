"""Encoders: modules that turn observations into an embedding `[S, B, E]` for a head to read.

Whatever has `embedding_dim` and maps `[S, B, ...]` to `[S, B, E]` will do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.models.layers import StackedMLP
from rl_training.rng import Rng


class MLPEncoder(nn.Module):
    """Hidden layers with relu after each; without any, the observation is its own embedding."""

    def __init__(
        self, obs_dim: int, hidden_sizes: Sequence[int], rng: Rng, *, noisy: bool = False
    ) -> None:
        super().__init__()
        self.embedding_dim = hidden_sizes[-1] if hidden_sizes else obs_dim
        self.layers = (
            StackedMLP((obs_dim, *hidden_sizes), rng, noisy=noisy) if hidden_sizes else None
        )

    def forward(self, obs: Tensor) -> Tensor:
        """Embed observations `[S, B, I]`, giving `[S, B, E]`."""
        return obs if self.layers is None else torch.relu(self.layers.forward(obs))

"""The network of IQN for vector observations."""

from __future__ import annotations

from collections.abc import Sequence

from rl_training.models.encoders import MLPEncoder
from rl_training.models.quantile_networks import ImplicitQuantileNetwork
from rl_training.rng import Rng


class MLPIQNNetwork(ImplicitQuantileNetwork):
    """`(obs [S, B, I], tau [S, B, T]) -> quantiles [S, B, A, T]` by an MLP."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (64, 64),
        embedding_dim: int = 64,
        *,
        head_hidden_sizes: Sequence[int] = (),
        dueling: bool = False,
        noisy: bool = False,
        rng: Rng | None = None,
    ) -> None:
        """Build the network; `embedding_dim` counts cosines, `rng` gives the initial weights."""
        rng = rng or Rng((0,), "model")
        super().__init__(
            MLPEncoder(obs_dim, hidden_sizes, rng, noisy=noisy),
            action_dim,
            embedding_dim,
            head_hidden_sizes,
            dueling=dueling,
            noisy=noisy,
            rng=rng,
        )

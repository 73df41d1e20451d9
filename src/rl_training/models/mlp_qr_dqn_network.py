"""The network of QR-DQN for vector observations."""

from __future__ import annotations

from collections.abc import Sequence

from rl_training.models.encoders import MLPEncoder
from rl_training.models.quantile_networks import QuantileNetwork
from rl_training.rng import Rng


class MLPQRDQNNetwork(QuantileNetwork):
    """`obs [S, B, I] -> quantiles [S, B, A, N]` by an MLP."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        num_quantiles: int = 200,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        dueling: bool = False,
        noisy: bool = False,
        rng: Rng | None = None,
    ) -> None:
        """Build the network; `rng` gives the initial weights and the number of seeds S."""
        rng = rng or Rng((0,), "model")
        encoder = MLPEncoder(obs_dim, hidden_sizes, rng, noisy=noisy)
        super().__init__(encoder, action_dim, num_quantiles, dueling=dueling, noisy=noisy, rng=rng)

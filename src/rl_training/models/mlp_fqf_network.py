"""The network of FQF for vector observations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rl_training.models.mlp_iqn_network import MLPIQNNetwork
from rl_training.models.quantile_networks import FQFNetwork, FQFOutput
from rl_training.rng import Rng


class MLPFQFNetwork(FQFNetwork):
    """`obs [S, B, I] -> FQFOutput` by an MLP; `[B, I]` will do for one seed."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        num_quantiles: int = 32,
        hidden_sizes: Sequence[int] = (64, 64),
        embedding_dim: int = 64,
        *,
        head_hidden_sizes: Sequence[int] = (),
        dueling: bool = False,
        noisy: bool = False,
        uniform_share: float = 0.02,
        rng: Rng | None = None,
    ) -> None:
        """Build the network; `embedding_dim` counts cosines, `rng` gives the initial weights."""
        rng = rng or Rng((0,), "model")
        network = MLPIQNNetwork(
            obs_dim,
            action_dim,
            hidden_sizes,
            embedding_dim,
            head_hidden_sizes=head_hidden_sizes,
            dueling=dueling,
            noisy=noisy,
            rng=rng,
        )
        super().__init__(network, num_quantiles, uniform_share=uniform_share, rng=rng)

    def forward(self, obs: Tensor) -> FQFOutput:
        """Return quantiles and fractions, with a seed axis where `obs` has one."""
        if obs.ndim == 3:
            return super().forward(obs)
        return FQFOutput(*(tensor.squeeze(0) for tensor in super().forward(obs.unsqueeze(0))))

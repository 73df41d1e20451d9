"""Networks of the deterministic actor-critic family: a tanh policy and an ensemble of critics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.models.layers import StackedMLP
from rl_training.rng import Rng


class MLPTD3Model(nn.Module):
    """Policy `obs -> action in (-1, 1)` and critics `(obs, action) -> Q`, for S seeds."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 2,
        use_layer_norm: bool = False,
        rng: Rng | None = None,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action.
            hidden_sizes: Widths of the hidden layers of policy and critics.
            num_critics: Members of the critic ensemble, N.
            use_layer_norm: Normalise the critics' hidden layers (never the policy's).
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        self.obs_dim, self.action_dim, self.num_critics = obs_dim, action_dim, num_critics
        self.actor = StackedMLP((obs_dim, *hidden_sizes, action_dim), rng)
        self.critic = StackedMLP(
            (obs_dim + action_dim, *hidden_sizes, 1),
            rng,
            members=(num_critics,),
            layer_norm=use_layer_norm,
        )

    def policy(self, obs: Tensor, actor: nn.Module | None = None) -> Tensor:
        """Return the action `[S, B, A]`, by `actor` (a target) or the model's own."""
        return torch.tanh((actor or self.actor).forward(obs))

    def q_values(self, obs: Tensor, action: Tensor, critic: nn.Module | None = None) -> Tensor:
        """Return Q of every member `[S, N, B]`, by `critic` (a target) or the model's own."""
        q: Tensor = (critic or self.critic).forward(torch.cat((obs, action), -1))
        return q.squeeze(-1)

"""Networks of IQL: a Gaussian policy around a tanh mean, critics, and a state value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.models.heads import gaussian_log_prob
from rl_training.models.layers import StackedMLP
from rl_training.rng import Rng

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class MLPIQLModel(nn.Module):
    """Policy, critics `(obs, action) -> Q` and value `obs -> V`, for S seeds."""

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
            hidden_sizes: Widths of the hidden layers of policy, critics and value.
            num_critics: Members of the critic ensemble, N.
            use_layer_norm: Normalise the critics' hidden layers (no other network's).
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        self.obs_dim, self.action_dim, self.num_critics = obs_dim, action_dim, num_critics
        self.actor = StackedMLP((obs_dim, *hidden_sizes, action_dim), rng)
        self.log_std = nn.Parameter(torch.zeros(rng.num_seeds, 1, action_dim, device=rng.device))
        self.critic = StackedMLP(
            (obs_dim + action_dim, *hidden_sizes, 1),
            rng,
            members=(num_critics,),
            layer_norm=use_layer_norm,
        )
        self.value_net = StackedMLP((obs_dim, *hidden_sizes, 1), rng)

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean `[S, B, A]` in (-1, 1) and log standard deviation `[S, 1, A]`."""
        mean = torch.tanh(self.actor.forward(obs))
        return mean, self.log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def log_prob(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the log density `[S, B]` of actions; the Gaussian itself is not squashed."""
        mean, log_std = self.policy(obs)
        return gaussian_log_prob((action - mean) * torch.exp(-log_std), log_std)

    def value(self, obs: Tensor) -> Tensor:
        """Return V(s), `[S, B]`."""
        return self.value_net.forward(obs).squeeze(-1)

    def q_values(self, obs: Tensor, action: Tensor, critic: nn.Module | None = None) -> Tensor:
        """Return Q of every member `[S, N, B]`, by `critic` (a target) or the model's own."""
        q: Tensor = (critic or self.critic).forward(torch.cat((obs, action), -1))
        return q.squeeze(-1)

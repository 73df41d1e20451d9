"""Networks of IQL: a Gaussian policy around a tanh mean, critics, and a state value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.models.actor_with_critics import ActorWithCritics
from rl_training.models.heads import gaussian_log_prob
from rl_training.models.layers import StackedMLP
from rl_training.rng import Rng

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class MLPIQLModel(ActorWithCritics):
    """Policy, critics `(obs, action) -> Q` and value `obs -> V`, for S seeds."""

    def build_more(self, hidden_sizes: Sequence[int], rng: Rng) -> None:
        """Build the value, and the deviation of the policy, which does not depend on the state."""
        deviation = torch.zeros(rng.num_seeds, 1, self.action_dim, device=rng.device)
        self.log_std = nn.Parameter(deviation)
        self.value_net = StackedMLP((self.obs_dim, *hidden_sizes, 1), rng)

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

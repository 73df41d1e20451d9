"""Networks of the deterministic actor-critic family: a tanh policy and an ensemble of critics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_training.models.actor_with_critics import ActorWithCritics


class MLPTD3Model(ActorWithCritics):
    """Policy `obs -> action in (-1, 1)` and critics `(obs, action) -> Q`, for S seeds."""

    def policy(self, obs: Tensor, actor: nn.Module | None = None) -> Tensor:
        """Return the action `[S, B, A]`, by `actor` (a target) or the model's own."""
        return torch.tanh((actor or self.actor).forward(obs))

"""What the networks of off-policy actor-critics share: an actor and an ensemble of critics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from rl_training.models.layers import StackedMLP
from rl_training.rng import Rng


class ActorWithCritics(nn.Module):
    """Actor on observations and critics `(obs, action) -> Q`, for S seeds.

    A subclass says how many numbers its policy needs per action dimension and what they mean.
    """

    outputs_per_action: ClassVar[int] = 1

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
            hidden_sizes: Widths of the hidden layers of every network.
            num_critics: Members of the critic ensemble, N.
            use_layer_norm: Normalise the critics' hidden layers (no other network's).
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        self.obs_dim, self.action_dim, self.num_critics = obs_dim, action_dim, num_critics
        self.actor = StackedMLP((obs_dim, *hidden_sizes, self.outputs_per_action * action_dim), rng)
        self.critic = StackedMLP(
            (obs_dim + action_dim, *hidden_sizes, 1),
            rng,
            members=(num_critics,),
            layer_norm=use_layer_norm,
        )
        self.build_more(hidden_sizes, rng)

    def build_more(self, hidden_sizes: Sequence[int], rng: Rng) -> None:
        """Build what a subclass has beside actor and critics."""

    def q_values(
        self,
        obs: Tensor,
        action: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Return Q of every member `[S, N, B]`, by `critic` (a target) or the model's own.

        Args:
            obs: Observations `[S, B, D]`.
            action: Actions `[S, B, A]`.
            critic: Another ensemble than the model's own.
            members: Which of them to evaluate, a slice or `[S, Z]` for each seed; None is all.
        """
        network, x = critic or self.critic, torch.cat((obs, action), -1)
        q: Tensor = network.forward(x) if members is None else network.forward(x, members)
        return q.squeeze(-1)

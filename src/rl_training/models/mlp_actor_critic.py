"""Actor-critic networks of on-policy methods: a policy and a value network that share nothing.

Shapes: S seeds, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rl_training.models.layers import StackedMLP
from rl_training.models.mlp_policy import MLPPolicyModel
from rl_training.rng import Rng


class MLPActorCriticModel(MLPPolicyModel):
    """Separate policy and value networks with orthogonal weights, for S seeds."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        discrete: bool,
        activation: str = "tanh",
        initial_log_std: float = 0.0,
        rng: Rng | None = None,
    ) -> None:
        """Build the networks; hidden layers of policy and value have the same widths.

        Args:
            obs_dim: Length of an observation.
            action_dim: Number of discrete actions, or length of a continuous one.
            hidden_sizes: Widths of the hidden layers, the same for policy and value.
            discrete: Categorical policy when true, diagonal Gaussian otherwise.
            activation: Name of the activation.
            initial_log_std: Start of the Gaussian's log standard deviation (a free parameter).
            rng: Source of the initial weights; its number of seeds is S.
        """
        rng = rng or Rng((0,), "model")
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            discrete=discrete,
            activation=activation,
            initial_log_std=initial_log_std,
            rng=rng,
        )
        self.critic = StackedMLP(
            (obs_dim, *hidden_sizes, 1), rng, activation=activation, orthogonal=1.0
        )

    def value(self, obs: Tensor) -> Tensor:
        """Return V(s), `[S, B]`."""
        return self.critic.forward(obs).squeeze(-1)

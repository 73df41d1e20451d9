"""Actor-critic networks of on-policy methods: a policy and a value, on observations or on features.

Shapes: S seeds, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rl_training.models.layers import ActivationName, StackedMLP
from rl_training.models.mlp_policy import MLPPolicyModel
from rl_training.models.mlp_q_network import Encoder
from rl_training.rng import Rng


class ActorCriticModel(MLPPolicyModel):
    """Policy and value networks with orthogonal weights, for S seeds, on what an encoder gives."""

    def __init__(
        self,
        encoder: Encoder | None,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int],
        *,
        critic_hidden_sizes: Sequence[int] | None = None,
        discrete: bool,
        action_sizes: Sequence[int] = (),
        head_inputs: int | None = None,
        activation: ActivationName = "tanh",
        initial_log_std: float = 0.0,
        rng: Rng,
    ) -> None:
        """Build the networks.

        Args:
            encoder: What policy and value share; None lets both read the observation.
            obs_dim: Entries of an observation.
            action_dim: Number of discrete actions, or length of a continuous one.
            hidden_sizes: Widths of the policy's hidden layers.
            critic_hidden_sizes: Widths of the value's; None is `hidden_sizes`.
            discrete: Categorical policy when true, diagonal Gaussian otherwise.
            action_sizes: As for `MLPPolicyModel`.
            head_inputs: As for `MLPPolicyModel`.
            activation: Name of the activation.
            initial_log_std: Start of the Gaussian's log standard deviation (a free parameter).
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            discrete=discrete,
            action_sizes=action_sizes,
            encoder=encoder,
            head_inputs=head_inputs,
            activation=activation,
            initial_log_std=initial_log_std,
            rng=rng,
        )
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = StackedMLP(
            (self.head_inputs, *sizes, 1), rng, activation=activation, orthogonal=1.0
        )

    def value(self, obs: Tensor) -> Tensor:
        """Return V(s), `[S, B]`."""
        return self.critic.forward(obs).squeeze(-1)


class MLPActorCriticModel(ActorCriticModel):
    """Separate policy and value networks on vectors."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        critic_hidden_sizes: Sequence[int] | None = None,
        discrete: bool,
        activation: ActivationName = "tanh",
        initial_log_std: float = 0.0,
        rng: Rng | None = None,
    ) -> None:
        """Build the networks; `rng` gives the initial weights and the number of seeds S."""
        super().__init__(
            None,
            obs_dim,
            action_dim,
            hidden_sizes,
            critic_hidden_sizes=critic_hidden_sizes,
            discrete=discrete,
            activation=activation,
            initial_log_std=initial_log_std,
            rng=rng or Rng((0,), "model"),
        )

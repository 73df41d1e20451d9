"""Critics that tell the distribution of the return over fixed atoms, and networks that have them.

`MLPFastTD3Model` has TD3's policy beside them, `MLPFastSACModel` SAC's; the hypersphere's networks
are in `hypersphere`.
Shapes: S seeds, N critics, B batch, A action, K atoms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.actor_with_critics import (
    ActorWithCritics,
    MLPTD3Model,
    SmoothSACModel,
    read_beside,
)
from rl_training.models.layers import StackedLinear
from rl_training.rng import Rng


class CategoricalCritics(ActorWithCritics):
    """Critics `(obs, action) -> K logits`, of the atoms between `v_min` and `v_max`."""

    atoms: Tensor

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_atoms: int = 101,
        v_min: float = -250.0,
        v_max: float = 250.0,
        rng: Rng | None = None,
        **options: Any,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action.
            hidden_sizes: Widths of the hidden layers of every network that has none of its own.
            num_atoms: Atoms of a return's distribution, K.
            v_min: Return of the first atom.
            v_max: Return of the last one.
            rng: Source of the initial weights; its number of seeds is S.
            **options: As for `ActorWithCritics`.
        """
        self.num_atoms = num_atoms
        rng = rng or Rng((0,), "model")
        super().__init__(obs_dim, action_dim, hidden_sizes, rng=rng, **options)
        atoms = torch.linspace(v_min, v_max, num_atoms, device=rng.device)
        # Not saved: a constant.
        self.register_buffer("atoms", atoms, persistent=False)

    @property
    def outputs_per_critic(self) -> int:
        """K."""
        return self.num_atoms

    def value_log_probs(
        self,
        obs: Tensor,
        action: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Return the log probability of every atom by every critic, `[S, N, B, K]`."""
        logits = read_beside(critic or self.critic, obs, action, members=members)
        return functional.log_softmax(logits, -1)

    def expected(self, log_probs: Tensor) -> Tensor:
        """Return the mean `[...]` of distributions `[..., K]`."""
        return (log_probs.exp() * self.atoms).sum(-1)

    def q_values(
        self,
        obs: Tensor,
        action: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Return the expected return by every critic, `[S, N, B]`; arguments as of the base."""
        return self.expected(self.value_log_probs(obs, action, critic, members))


class NearZero(CategoricalCritics):
    """A policy whose outputs are near 0 at first, in every state."""

    first_deviation: ClassVar[float] = 0.01
    """Deviation of the initial weights of the policy's last layer; its biases are 0."""

    def build_more(
        self,
        actor_sizes: Sequence[int],  # noqa: ARG002
        critic_sizes: Sequence[int],  # noqa: ARG002
        rng: Rng,
    ) -> None:
        """Draw the policy's last layer."""
        *_, last = (m for m in self.actor.modules() if isinstance(m, StackedLinear))
        with torch.no_grad():
            last.weight.copy_(self.first_deviation * rng.normal(*last.weight.shape[1:]))
            last.bias.zero_()


class MLPFastTD3Model(NearZero, MLPTD3Model):
    """TD3's policy and categorical critics."""


class MLPFastSACModel(NearZero, SmoothSACModel):
    """SAC's policy, with a bounded deviation and norms, and categorical critics."""

    log_std_range: ClassVar[tuple[float, float]] = (-5.0, 0.0)
    normalizes_actor: ClassVar[bool] = True

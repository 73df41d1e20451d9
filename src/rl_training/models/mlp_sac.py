"""Networks of the soft actor-critic family: a tanh-Gaussian policy and an ensemble of critics."""

from __future__ import annotations

from torch import Tensor

from rl_training.models.actor_with_critics import ActorWithCritics

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0


class MLPSACModel(ActorWithCritics):
    """Policy `obs -> (mean, log_std)` and critics `(obs, action) -> Q`, for S seeds."""

    outputs_per_action = 2

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation before the tanh, each `[S, B, A]`."""
        mean, log_std = self.actor.forward(obs).chunk(2, -1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

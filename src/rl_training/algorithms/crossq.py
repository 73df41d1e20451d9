"""CrossQ (Bhatt et al., 2024, arXiv:1902.05605): SAC with batch normalisation and no targets.

Wide critics are batch-normalised, and so is the actor.  Critics see (s, a) and (s', a') in one
batch, so that their statistics are of both, and the second half, without gradient, is the target:
there are no target critics (Fig. 3).  Normalisation is batch renormalisation (Ioffe, 2017), which
is plain batch normalisation while it warms up.

The actor's draws at s', acting, and the critics in the actor's loss normalise by running
statistics; the joint pass, and the actor in its own loss, by those of the batch, which moves them.

Overrides: regress, actor_loss, actor_delay.
Deviations, each from the authors' code: the warm-up counts batches of each network, as there, so
    the actor's lasts `policy_delay` times as long; d of the renormalisation is in units of
    sqrt(variance + epsilon), as in Ioffe's paper, there of sqrt(variance), whose gradient is not
    finite where a unit never fires; weights start from PyTorch's uniform distribution, not LeCun's;
    the temperature's loss is SAC's, linear in log(alpha), theirs is linear in alpha; squared errors
    are not halved.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.actor_critic import Loss, networks_of
from rl_training.algorithms.config import OptimizerChoice, OptimizerSettings
from rl_training.algorithms.sac import ACTOR_METRICS, DELAYED_METRICS, SAC, SACConfig
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPCrossQModel
from rl_training.models.batch_renorm import batch_statistics
from rl_training.models.layers import chosen_members
from rl_training.validation import NonNegativeInt, PositiveFloat, PositiveInt, Sizes


class CrossQConfig(SACConfig):
    """Settings of CrossQ; defaults are those of the authors' code."""

    policy_delay: PositiveInt = 3
    """Updates of the critics per update of the actor and the temperature."""
    renorm_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Share of the running statistics that each batch keeps; 0 takes those of the last batch."""
    renorm_warmup: NonNegativeInt = 100_000
    """Batches that a network normalises by their own statistics alone."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate of the critics, and of the actor unless it has its own."""
    learning_starts: NonNegativeInt = 5_000
    """Steps of uniformly random actions before the first update."""
    critic_hidden_sizes: Sizes | None = (2048, 2048)
    """Widths of the hidden layers of the critics; null uses `hidden_sizes`."""
    tau: Annotated[float, Field(ge=1, le=1)] = 1.0
    """Always 1: there are no target critics."""
    optimizer: OptimizerChoice = Field(default=OptimizerSettings(betas=(0.5, 0.999)))
    """Optimizer of the networks: a name, or a mapping `{type: sgd, momentum: 0.9}`; a temperature
    and other single numbers always have Adam, with the usual betas."""

    @classmethod
    def may_vary(cls) -> list[str]:
        """Return the numbers that a `grid` may hold: SAC's, but `tau`."""
        return [name for name in super().may_vary() if name != "tau"]


class CrossQ(SAC):
    """SAC whose critics are their own targets, with batch renormalisation."""

    config_class = CrossQConfig
    config: CrossQConfig
    model: MLPCrossQModel
    actor_metrics = ACTOR_METRICS
    has_target_critic: ClassVar[bool] = False

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per update of the actor."""
        return self.config.policy_delay

    def regress(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Squared error of Q(s, a) to the soft target by Q(s', a') of the same pass."""
        with torch.no_grad():
            next_action, log_prob = self.sample_action(batch.next_obs)
        obs = torch.cat((batch.obs, batch.next_obs), 1)  # [S, 2B, D]
        action = torch.cat((batch.action, next_action), 1)
        with batch_statistics(self.model.critic):
            q, next_q = self.model.q_values(obs, action).chunk(2, -1)  # [S, N, B] each
        next_q = chosen_members(next_q.detach(), self.target_members())
        target, metrics = self.soft_target(batch, next_q, log_prob)
        loss, td_error = self.squared_error(q, batch, target)
        return loss, metrics, td_error

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """SAC's loss, the actor normalised by the batch, the critics by running statistics."""
        with batch_statistics(self.model.actor):
            return super().actor_loss(batch)


SPEC = AlgorithmSpec(
    name="crossq",
    title="CrossQ",
    paper="arXiv:1902.05605",
    summary="off-policy; SAC with batch normalisation and no target critics; continuous actions",
    learner=CrossQ,
    networks=networks_of(MLPCrossQModel, "renorm_momentum", "renorm_warmup"),
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    obs_ndims=(1, 3),
    metrics=DELAYED_METRICS,
)

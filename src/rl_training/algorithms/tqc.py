"""TQC: Truncated Quantile Critics (Kuznetsov et al., 2020, arXiv:2005.04269).

SAC whose critics tell quantiles of the soft return.  The quantiles of all target critics at s' are
taken together and the largest of them left out, which holds overestimation down in steps as small
as one wishes (Sec. 4); the actor climbs the mean of what is told, of all critics and quantiles.

Overrides: td_target, critic_loss.
Deviations: the first `learning_starts` actions are uniformly random, in the authors' code the
    policy's; the actor's loss is taken after the critics' step, as in every actor-critic here, in
    the authors' code before it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.actor_critic import Loss, networks_of
from rl_training.algorithms.base import td_target, weighted_mean
from rl_training.algorithms.losses import midpoints, quantile_huber
from rl_training.algorithms.sac import SAC, SAC_METRICS, SACConfig
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPTQCModel
from rl_training.validation import LARGEST_INT, NonNegativeFloat, PositiveInt, Sizes, Whole


class TQCConfig(SACConfig):
    """Settings of TQC; defaults are the paper's, for Humanoid among others."""

    num_critics: PositiveInt = 5
    """Members of the critic ensemble."""
    num_quantiles: PositiveInt = 25
    """Quantiles of the return that each critic predicts."""
    quantiles_to_drop: Annotated[int, Field(ge=0, lt=LARGEST_INT), Whole] = 2
    """Largest quantiles left out of the target, per target critic; 0 keeps all. In the paper 5 for
    Hopper, 0 for HalfCheetah, else 2."""
    kappa: NonNegativeFloat = 1.0
    """Error below which the quantile loss is quadratic; 0 gives the plain quantile loss."""
    critic_hidden_sizes: Sizes | None = (512, 512, 512)
    """Widths of the hidden layers of the critics; null uses `hidden_sizes`."""
    actor_q: Literal["min", "mean"] = "mean"
    """What the actor maximises: the minimum of the critics' means, or the mean of all
    quantiles."""

    @model_validator(mode="after")
    def _some_quantiles_stay(self) -> TQCConfig:
        if self.quantiles_to_drop >= self.num_quantiles:
            raise ValueError(
                f"quantiles_to_drop must be < num_quantiles ({self.num_quantiles}), "
                f"got {self.quantiles_to_drop}"
            )
        return self


class TQC(SAC):
    """SAC with truncated mixtures of quantile critics."""

    config_class = TQCConfig
    config: TQCConfig
    model: MLPTQCModel

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Return the quantiles y_i = r + discount (z_(i)(s', a') - alpha log pi(a'|s')) (Eq. 11).

        z_(1) <= z_(2) <= ... are those of all target critics; the largest are left out.
        The target is `[S, B, K]`.
        """
        action, log_prob = self.sample_action(batch.next_obs)
        members = self.target_members()
        z = self.model.quantiles(batch.next_obs, action, self.target_critic, members)
        kept = z.shape[1] * (self.config.num_quantiles - self.config.quantiles_to_drop)
        smallest = z.transpose(1, 2).flatten(2).sort(-1).values[..., :kept]  # [S, B, K]
        entropy_term = self.entropy_term(log_prob)
        reward, discount = batch.reward.unsqueeze(-1), batch.discount.unsqueeze(-1)
        target = td_target(reward, discount, smallest + entropy_term.unsqueeze(-1))
        return target, {"target_q_mean": target.mean(-1), "entropy_term": entropy_term}

    def critic_loss(
        self, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Quantile Huber loss of every critic to the same target (Eqs. 12 and 13).

        The mean over critics; its value per sample `[S, B]` is the priority.
        """
        z = self.model.quantiles(batch.obs, batch.action)  # [S, N, B, M]
        count = self.config.num_quantiles
        tau = midpoints(count, self.device)
        each = quantile_huber(z, target.unsqueeze(1), tau, self.config.kappa)  # [S, N, B]
        each = each.mean(1) / count
        return weighted_mean(each, batch.weight), {}, each.detach()


SPEC = AlgorithmSpec(
    name="tqc",
    title="Truncated Quantile Critics",
    paper="arXiv:2005.04269",
    summary="off-policy; SAC with quantile critics, the largest cut off; continuous actions",
    learner=TQC,
    networks=networks_of(MLPTQCModel, "num_quantiles"),
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    obs_ndims=(1, 3),
    metrics=SAC_METRICS
    | {
        "critic_loss": "quantile Huber loss, mean over critics and quantiles",
        "actor_loss": "alpha log pi - Q (see `actor_q`)",
        "target_q_mean": "mean of the target's quantiles",
        "q_mean": "mean of that Q at the policy's actions",
    },
)

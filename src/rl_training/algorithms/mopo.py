"""MOPO: Model-based Offline Policy Optimization (Yu et al., 2020, arXiv:2005.13239).

An ensemble is fitted to the dataset once.  SAC then learns from short roll-outs of its policy in
the model, whose reward is lowered by how little the model knows there (Eq. 7, Algorithm 2):

    r~(s, a) = r^(s, a) - lambda u(s, a),    u(s, a) = max_i ||Sigma_i(s, a)||_F,

the largest norm of a member's predicted deviations; 5% of each batch are real transitions, whose
reward is not lowered.  The disagreement of the members' means is the paper's ablation.

Deviations: at most 5,000 rows are held out by default (theirs 1,000); rows after an imagined end
    are replaced by rows that count, so that refreshes have one size; batches are 5% real to the
    row.  The learning-rate schedule moves the policy's rates alone; a mix of datasets weighs the
    starts of roll-outs and the real rows of batches, not the fit of the model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from rl_training.algorithms.dynamics.loss import mopo_model_loss
from rl_training.algorithms.dynamics.rollout import Imagined, Penalty
from rl_training.algorithms.imagination_config import Times
from rl_training.algorithms.imagining import (
    IMAGINING_METRICS,
    Imagining,
    ImaginingConfig,
    imagining_networks,
)
from rl_training.algorithms.offline_config import OfflineConfig
from rl_training.algorithms.spec import AlgorithmSpec, Loop, Phase
from rl_training.validation import NonNegativeFloat, PositiveInt

__all__ = ["MOPO", "SPEC", "MOPOConfig", "mopo_model_loss"]


class MOPOConfig(ImaginingConfig, OfflineConfig):
    """Settings of MOPO."""

    penalty_coef: NonNegativeFloat = 1.0
    """Weight lambda of the penalty; 0 trusts the model everywhere."""
    penalty_kind: Literal["aleatoric", "disagreement"] = "aleatoric"
    """Largest norm of a member's predicted deviations, or deviation of the members' means."""
    rollout_refresh_interval: PositiveInt = 1_000
    """Updates between two refreshes of the imagined transitions."""

    @property
    def fit_times(self) -> Times:
        """Before the first update, once."""
        return Times(0, None)

    @property
    def refresh_times(self) -> Times:
        """Before the first update, then every `rollout_refresh_interval` updates."""
        return Times(0, self.rollout_refresh_interval)


class MOPO(Imagining):
    """SAC on penalised roll-outs in a model of the dataset."""

    config_class: ClassVar[type[MOPOConfig]] = MOPOConfig
    config: MOPOConfig
    loss_name = "mopo_model_loss"

    @property
    def penalty_kind(self) -> Penalty:
        """Which uncertainty lowers the reward."""
        return self.config.penalty_kind

    def imagined_reward(self, made: Imagined) -> Tensor:
        """Return r - lambda u, `[S, K]` (Eq. 7)."""
        return made.reward - self.config.penalty_coef * made.penalty


SPEC = AlgorithmSpec(
    name="mopo",
    title="Model-based Offline Policy Optimization",
    paper="arXiv:2005.13239",
    summary="offline; SAC on penalised roll-outs in a learned model; continuous actions",
    learner=MOPO,
    networks=imagining_networks,
    loop=Loop.OFFLINE,
    phases=(Phase.IMAGINATION,),
    action_kinds=("continuous",),
    metrics=IMAGINING_METRICS
    | {"mopo_model_loss": "loss of the model at its latest gradient step, summed over members"},
)

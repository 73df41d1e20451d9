"""MOPO: Model-based Offline Policy Optimization (Yu et al., 2020, arXiv:2005.13239).

An ensemble is fitted to the dataset once.  SAC then learns from short rollouts of its policy in
the model, whose reward is lowered by how little the model knows there (Eq. 7, Algorithm 2):

    r~(s, a) = r^(s, a) - lambda u(s, a),    u(s, a) = max_i ||Sigma_i(s, a)||_F,

the largest norm of a member's predicted deviations; 5% of each batch are real transitions, whose
reward is not lowered.  The paper's ablation has u(s, a) = max_i ||mu_i(s, a) - mean_j mu_j(s, a)||
of the observation (Sec. 5.3): `penalty_kind: mean_deviation`.

Deviations: those of the ensemble and its fit (`models.mlp_mopo`, `dynamics.fit`:
    standardised targets, another weight of errors, bounds of the log-variance per member, patience
    in gradient steps); at most 5,000 rows are held out by default (theirs 1,000); 5 refreshes are
    kept (theirs 5 epochs of 1,000 updates at one refresh each, up to a fixed capacity); the target
    entropy is -A where a preset names none (theirs -3 for HalfCheetah and Walker2d, -1 for Hopper,
    as in our presets); rows after an imagined end are replaced by rows that count, so that
    refreshes have one size; batches are 5% real to the row.  The learning-rate schedule moves the
    policy's rates alone; a mix of datasets weighs the starts of rollouts and the real rows of
    batches, not the fit of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from rl_training.algorithms.base import StepOutput, UpdateResult
from rl_training.algorithms.dynamics.fit import mopo_model_loss
from rl_training.algorithms.dynamics.imagination import (
    IMAGINING_METRICS,
    Imagination,
    ImaginationConfig,
    Imagined,
    Penalty,
    imagining_networks,
)
from rl_training.algorithms.sac import SAC, SACConfig
from rl_training.algorithms.sources import OfflineSettings
from rl_training.algorithms.spec import VECTOR_LEAVES, AlgorithmSpec, Loop, Phase
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPSACModel
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.validation import NonNegativeFloat

__all__ = ["MOPO", "SPEC", "MOPOConfig", "mopo_model_loss"]


class MOPOConfig(ImaginationConfig):
    """Settings of MOPO."""

    varying: ClassVar[frozenset[str]] = frozenset({"policy_learning_rate", "penalty_coef"})

    penalty_coef: NonNegativeFloat = 1.0
    """Weight lambda of the penalty; 0 trusts the model everywhere."""
    penalty_kind: Literal["aleatoric", "mean_deviation", "disagreement"] = "aleatoric"
    """`aleatoric` is the paper's; `mean_deviation`, the largest distance of a member's mean of the
    observation from that of all, is its ablation; `disagreement` is the standard deviation of the
    members' means, averaged over observation and reward."""


class PenalisedImagination(Imagination):
    """Rollouts whose reward is lowered by how little the model knows."""

    config: MOPOConfig
    coefficient: Callable[[], float | Tensor]
    """Returns lambda, a number or `[S, 1]` where it differs between members of a group."""

    @property
    def penalty_kind(self) -> Penalty:
        """Which uncertainty lowers the reward."""
        return self.config.penalty_kind

    def worth(self, imagined: Imagined) -> Tensor:
        """Return r - lambda u, `[S, K]` (Eq. 7)."""
        return imagined.reward - self.coefficient() * imagined.penalty


class MOPO(SAC):
    """SAC on penalised rollouts in a model of the dataset."""

    config_class = MOPOConfig
    parts = (SACConfig, OfflineSettings)
    network_names: ClassVar[tuple[str, ...]] = ("policy_model", "dynamics_model")
    critic_rate = "policy_learning_rate"
    policy_model: MLPSACModel
    dynamics_model: MLPMOPOEnsembleModel

    @property
    def model(self) -> MLPSACModel:  # type: ignore[override]  # read only, under SAC's name
        """The actor and the critics."""
        return self.policy_model

    def setup(self) -> None:
        """Add the model and what is imagined in it."""
        super().setup()
        self.imagination = PenalisedImagination(
            self.dynamics_model,
            self.part(MOPOConfig),
            self.seeds,
            loss_name="mopo_model_loss",
            adam_epsilon=self.config.adam_epsilon,
            optimizer=self.config.optimizer,
        )
        self.imagination.coefficient = partial(self.setting, "penalty_coef", 2)

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Do SAC's update; the model stays as it is."""
        output = super().step(batch)
        output.metrics |= self.imagination.metrics()
        return output

    def update_model(
        self, batch: TransitionBatch | Mapping[str, Tensor], *, per_member: bool = False
    ) -> UpdateResult:
        """Take one gradient step of the model on real transitions; see `Imagination.update`."""
        return self.imagination.update(batch, per_member=per_member)


SPEC = AlgorithmSpec(
    name="mopo",
    title="Model-based Offline Policy Optimization",
    paper="arXiv:2005.13239",
    summary="model-based, offline; SAC on penalised rollouts in a model; continuous actions",
    learner=MOPO,
    networks=imagining_networks,
    loop=Loop.OFFLINE,
    phases=(Phase.IMAGINATION,),
    action_kinds=("continuous",),
    leaf_kinds=VECTOR_LEAVES,
    metrics=IMAGINING_METRICS
    | {"mopo_model_loss": "loss of the model at its latest gradient step, summed over members"},
)

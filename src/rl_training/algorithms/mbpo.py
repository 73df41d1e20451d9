"""MBPO: Model-Based Policy Optimization (Janner et al., 2019, arXiv:1906.08253).

SAC that takes many updates per environment step, on transitions that an ensemble imagined in short
rollouts from states of the replay; rollouts grow longer as the ensemble gets better (Table 1).
Algorithm 2, line by line, and where each is done:

    1  policy, model p, empty D_env and D_model      `imagining_networks`; the loop's replay and
                                                     `SyntheticBuffer` (`data/replay/mixed.py`)
    2  every `model_train_frequency` steps:          `fit_times`
    3     fit p to D_env by maximum likelihood       `DynamicsTrainer.fit` (`dynamics/fit.py`)
    4  take an action of the policy, add to D_env    the off-policy loop (`runtime/loops.py`)
    5  every `rollout_refresh_interval` steps:       `refresh_times`
    6     states of D_env, uniformly, M of them      `ImaginationPhase.starts`, `rollout_batch_size`
    7     k steps of the policy in p, to D_model     `Imagination.rollout`, `MBPOConfig.horizon`
    8  G updates of the policy on D_model            `SAC.step`, `gradient_updates_per_step`; a
                                                     batch is 95% imagined (`SyntheticBuffer`)

When lines 2 to 7 are due is decided at one place, `ImaginationPhase.before_pass`
(`runtime/phases/imagination.py`); a step of SAC is `algorithms/sac.py`.

Deviations: those of the ensemble and its fit (`models/mlp_mopo.py`, `dynamics/fit.py`); rollouts
    are made 100,000 at once after each fit, where the paper makes 400 at each step; the schedule
    of the horizon counts steps, not epochs of 1,000; the first fit comes after `learning_starts`
    random steps; rows after an imagined end are replaced by rows that count, so that refreshes
    have one size; batches are 5% real to the row.  The learning-rate schedule moves the policy's
    rates alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import StepOutput, UpdateResult
from rl_training.algorithms.dynamics.fit import mopo_model_loss
from rl_training.algorithms.dynamics.imagination import (
    IMAGINING_METRICS,
    HorizonSchedule,
    Imagination,
    ImaginationConfig,
    Times,
    imagining_networks,
)
from rl_training.algorithms.sac import SAC, SACConfig
from rl_training.algorithms.sources import TransitionReplay
from rl_training.algorithms.spec import VECTOR_LEAVES, AlgorithmSpec, Loop, Phase
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPSACModel
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.validation import LARGEST_INT, PositiveInt

TwoOrMore = Annotated[int, Field(ge=2, le=LARGEST_INT)]
"""Rows that can be split: one to fit to, one to hold out."""


class MBPOConfig(ImaginationConfig):
    """Settings of MBPO; defaults are the paper's for Hopper but for the horizon's schedule."""

    buffer_capacity: TwoOrMore = 1_000_000
    """Transitions kept; the oldest are overwritten."""
    learning_starts: TwoOrMore = 5_000
    """Steps of uniformly random actions before the first fit and the first update."""
    gradient_updates_per_step: PositiveInt = 20
    """Updates of the policy per round; 40 for HalfCheetah, 10 for InvertedPendulum in the paper."""
    rollout_batch_size: PositiveInt = 100_000
    """Rollouts per refresh, each from a real state; 400 per environment step in the paper."""
    rollout_horizon: PositiveInt = 1
    """Imagined steps of a rollout, where there is no `rollout_schedule`."""
    rollout_schedule: HorizonSchedule | None = None
    """Horizon `[step0, step1, k0, k1]`: k0 until step0, k1 from step1 on, linear between."""
    rollouts_kept: PositiveInt = 4
    """Refreshes whose imagined transitions are learned from; four are the paper's 1,000 steps."""
    model_train_frequency: PositiveInt = 250
    """Environment steps between two fits of the model."""
    rollout_refresh_interval: PositiveInt | None = None
    """Environment steps between two refreshes; null makes one after each fit."""

    @property
    def fit_times(self) -> Times:
        """After the random steps, then every `model_train_frequency` steps."""
        return Times(self.learning_starts, self.model_train_frequency)

    @property
    def refresh_times(self) -> Times:
        """After the random steps, then every `rollout_refresh_interval` steps."""
        every = self.rollout_refresh_interval or self.model_train_frequency
        return Times(self.learning_starts, every)

    @property
    def largest_horizon(self) -> int:
        """Return the most steps a rollout can have during a run."""
        return max(self.rollout_schedule[2:]) if self.rollout_schedule else self.rollout_horizon

    def horizon(self, step: int) -> int:
        """Return the steps of a rollout made at `step`: k0 + share (k1 - k0), rounded down."""
        if self.rollout_schedule is None:
            return self.rollout_horizon
        first, last, start, end = self.rollout_schedule
        share = min(max((step - first) / (last - first), 0.0), 1.0)
        return int(start + share * (end - start))

    @model_validator(mode="after")
    def _schedule_goes_forward(self) -> MBPOConfig:
        schedule = self.rollout_schedule
        if schedule is not None and schedule[1] <= schedule[0]:
            raise ValueError(
                f"rollout_schedule [step0, step1, k0, k1] must have step0 < step1, got "
                f"{list(schedule)}; for one horizon throughout set rollout_horizon"
            )
        return self

    @model_validator(mode="after")
    def _first_fit_has_rows(self) -> MBPOConfig:
        rows = min(self.learning_starts, self.buffer_capacity)
        if int(rows * self.model_holdout_ratio) < 1:
            raise ValueError(
                f"learning_starts and buffer_capacity must leave a row to hold out at the first "
                f"fit: {rows} rows x model_holdout_ratio {self.model_holdout_ratio} is less than "
                f"1; raise learning_starts"
            )
        return self


class MBPO(SAC):
    """SAC on short rollouts in a model of the replay."""

    config_class = MBPOConfig
    parts = (SACConfig, TransitionReplay)
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
        self.imagination = Imagination(
            self.dynamics_model,
            self.part(MBPOConfig),
            self.seeds,
            loss_name="mbpo_model_loss",
            adam_epsilon=self.config.adam_epsilon,
            optimizer=self.config.optimizer,
        )

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


def mbpo_model_loss(model: MLPMOPOEnsembleModel, rows: Tensor) -> dict[str, Tensor]:
    """Compute the loss of the ensemble, which is MOPO's; see `mopo_model_loss`."""
    losses = mopo_model_loss(model, rows)
    return {"mbpo_model_loss": losses.pop("mopo_model_loss")} | losses


SPEC = AlgorithmSpec(
    name="mbpo",
    title="Model-Based Policy Optimization",
    paper="arXiv:1906.08253",
    summary="model-based, off-policy; SAC on short rollouts in a learned model; continuous actions",
    learner=MBPO,
    networks=imagining_networks,
    loop=Loop.OFF_POLICY,
    phases=(Phase.IMAGINATION,),
    action_kinds=("continuous",),
    leaf_kinds=VECTOR_LEAVES,
    metrics=IMAGINING_METRICS
    | {"mbpo_model_loss": "loss of the model at its latest gradient step, summed over members"},
)

"""COMBO: Conservative Offline Model-Based Policy Optimization (Yu et al., 2021, arXiv:2102.08363).

MOPO's loop without a measure of what the model does not know.  In its place the critics are
conservative as in CQL: pushed down at rho(s, a), up at the data (Eq. 2),

    beta (E_rho[Q(s, a)] - E_data[Q(s, a)]) + TD error on real and imagined rows,

where rho(s, a) has states of imagined rows, or of all rows, and actions of the policy.  As in CQL
the worst case over actions is taken, log sum_a exp Q(s, a) (Eq. 4 of arXiv:2006.04779), by the same
estimate (`conservative.py`).

Deviations: those of the ensemble, its fit and its rollouts (see `mopo.py`).  The actor follows the
    critics after their step and the temperature moves last.  The weight is a setting of its own for
    each task, and has no Lagrange form.  The experiments on images are not here.  The learning-rate
    schedule moves the critics' rate too (a known reproduction: a cosine for the actor alone).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl_training.algorithms.base import StepOutput
from rl_training.algorithms.conservative import proposals, q_of_several, soft_maximum
from rl_training.algorithms.dynamics.imagination import (
    IMAGINING_METRICS,
    Imagination,
    ImaginationConfig,
    Imagined,
    Policy,
    Rules,
    imagining_networks,
)
from rl_training.algorithms.sac import SAC, SACConfig
from rl_training.algorithms.sources import OfflineSettings
from rl_training.algorithms.spec import VECTOR_LEAVES, AlgorithmSpec, Loop, Phase
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError
from rl_training.models.actor_with_critics import MLPSACModel
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.rng import Rng
from rl_training.validation import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt


class COMBOConfig(ImaginationConfig):
    """Settings of COMBO."""

    varying: ClassVar[frozenset[str]] = frozenset({"cql_weight"})

    actor_learning_rate: PositiveFloat | None = 1e-4
    """Learning rate of the actor, and of a learned temperature; null uses that of the critics."""
    synthetic_batch_ratio: Fraction = 0.5
    """Share of every batch that is imagined; 0 is CQL, and some rows must be real."""
    cql_weight: NonNegativeFloat = 1.0
    """Weight beta of the conservative penalty; 0 trusts the model everywhere."""
    num_cql_samples: PositiveInt = 10
    """Actions per state drawn uniformly, from pi(.|s) and from pi(.|s'): three times this many."""
    cql_temperature: PositiveFloat = 1.0
    """Temperature of the log-sum-exp."""
    penalty_states: Literal["mixed", "imagined"] = "mixed"
    """States of rho, at which Q is pushed down: those of all rows, or of imagined ones alone."""
    rollout_policy: Literal["current", "uniform"] = "current"
    """What acts in the model: the policy, or uniformly random actions."""
    backup: Literal["deterministic", "entropy"] = "deterministic"
    """Target: min Q, or min Q with the entropy term of SAC."""


class COMBOImagination(Imagination):
    """Rollouts of the policy, or of uniformly random actions."""

    config: COMBOConfig

    def rollout(
        self, policy: Policy, rng: Rng, obs: Tensor, horizon: int, rules: Rules
    ) -> Imagined:
        """Follow a policy from `obs` `[S, B, D]` inside the model."""
        if self.config.rollout_policy == "uniform":
            shape = obs.shape[1], self.model.action_dim
            return super().rollout(lambda _: rng.uniform(*shape) * 2 - 1, rng, obs, horizon, rules)
        return super().rollout(policy, rng, obs, horizon, rules)


class COMBO(SAC):
    """SAC in a model of the dataset, with critics that are conservative where the model leads."""

    config_class = COMBOConfig
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
        """Add the model and what is imagined in it.

        Raises:
            ConfigError: When batches lack rows at which Q is pushed up or down.
        """
        super().setup()
        self.settings = self.part(COMBOConfig)
        rows = self.part(OfflineSettings).batch_size
        real = self.settings.real_rows(rows)
        if real == 0 or (real == rows and self.settings.penalty_states == "imagined"):
            raise ConfigError(
                f"synthetic_batch_ratio {self.settings.synthetic_batch_ratio} leaves "
                f"{real} of {rows} rows of a batch real; combo pushes Q up at real rows and, with "
                f"penalty_states {self.settings.penalty_states}, down at "
                f"{self.settings.penalty_states} ones: choose a ratio between 0 and 1"
            )
        self.imagination = COMBOImagination(
            self.dynamics_model,
            self.settings,
            self.seeds,
            loss_name="combo_model_loss",
            adam_epsilon=self.config.adam_epsilon,
            optimizer=self.config.optimizer,
        )

    def critic_loss(
        self, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """TD error plus the weighted penalty, summed over critics (Eq. 2)."""
        q = self.model.q_values(batch.obs, batch.action)  # [S, N, B]
        td_loss, td_error = self.squared_error(q, batch, target)
        gap = self.penalty(batch, q)  # [S, N]
        loss = td_loss + self.setting("cql_weight") * gap.sum(1)
        return loss, {"cql_penalty": gap.detach().mean(1), "td_loss": td_loss.detach()}, td_error

    def penalty(self, batch: TransitionBatch, data_q: Tensor) -> Tensor:
        """Return E_rho[log sum_a exp Q(s, a)] - E_data[Q(s, a)] of every critic, `[S, N]`.

        Q of all rows at their own actions is given, `data_q` `[S, N, B]`; real rows come first.
        Nothing is drawn where the penalty has no weight.
        """
        config = self.settings
        if config.cql_weight == 0 and "cql_weight" not in self.varied:
            return torch.zeros_like(data_q[..., 0])
        real = config.real_rows(batch.reward.shape[1])
        first = real if config.penalty_states == "imagined" else 0
        obs, next_obs = batch.obs[:, first:], batch.next_obs[:, first:]
        with torch.no_grad():
            actions, log_density = proposals(
                self.model, self.rng, obs, next_obs, config.num_cql_samples
            )
        q = q_of_several(self.model, obs, actions)  # [S, N, B, 3n]
        pushed_down = soft_maximum(q, log_density, config.cql_temperature).mean(-1)
        return pushed_down - data_q[..., :real].mean(-1)

    def entropy_term(self, log_prob: Tensor) -> Tensor:
        """Return -alpha log pi, `[S, B]`; 0 with a deterministic backup."""
        if self.settings.backup == "entropy":
            return super().entropy_term(log_prob)
        return torch.zeros_like(log_prob)

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Do the update; the model stays as it is."""
        output = super().step(batch)
        output.metrics |= self.imagination.metrics()
        return output


SPEC = AlgorithmSpec(
    name="combo",
    title="Conservative Offline Model-Based Policy Optimization",
    paper="arXiv:2102.08363",
    summary="model-based, offline; CQL on data and on rollouts in a model; continuous actions",
    learner=COMBO,
    networks=imagining_networks,
    loop=Loop.OFFLINE,
    phases=(Phase.IMAGINATION,),
    action_kinds=("continuous",),
    leaf_kinds=VECTOR_LEAVES,
    metrics=IMAGINING_METRICS
    | {
        "critic_loss": "TD error plus weighted penalty, summed over critics",
        "cql_penalty": "log-sum-exp of Q minus Q of the data, mean over critics",
        "td_loss": "squared TD error, summed over critics",
        "combo_model_loss": "loss of the model at its latest gradient step, summed over members",
    },
)

"""MOBILE: Model-Bellman Inconsistency (Sun et al., ICML 2023, PMLR 202, sun23q).

MOPO's loop with another penalty.  A member i of the ensemble has a Bellman estimate of its own,

    T_i Q(s, a) = r(s, a) + gamma E[min_k Q_k(s', a')],   s' ~ T_i(.|s, a), a' ~ pi(.|s'),

with the target critics Q_k.  Where these estimates differ, the model cannot be trusted with what
counts, the value, and the TD target of an imagined transition is lowered by how much they do:

    y = r + gamma min_k Q_k(s', a') - beta u(s, a),   u(s, a) = Std_i E[min_k Q_k(s'_i, a'_i)].

The expectation is a mean over `num_penalty_samples` draws of s' and a'; the members are the elites.
Real rows, 5% of each batch, are not lowered.

As in the authors' code: u leaves out gamma, the members' rewards and imagined ends, and is the
deviation of a sample, divided by members - 1; a smaller learning rate of the actor.

Deviations: those of the ensemble, its fit and its rollouts (see `mopo.py`).  The actor follows the
    critics after their step, and the temperature moves last and is not bounded by 1.  Losses are
    summed over critics (theirs: averaged).  The learning-rate schedule moves the critics' rate too
    (theirs: a cosine for the actor alone).  The backup has no entropy term by default (a switch in
    the authors' code).  Their targets are never below 0, which suits tasks whose rewards are
    positive; here that is `lowest_target`, set by the presets of such tasks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl_training.algorithms.actor_critic import Loss
from rl_training.algorithms.base import StepOutput
from rl_training.algorithms.dynamics.imagination import (
    IMAGINING_METRICS,
    Imagination,
    ImaginationConfig,
    imagining_networks,
)
from rl_training.algorithms.sac import SAC, SACConfig
from rl_training.algorithms.sources import OfflineSettings
from rl_training.algorithms.spec import VECTOR_LEAVES, AlgorithmSpec, Loop, Phase
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPSACModel
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.validation import NonNegativeFloat, Number, PositiveFloat, PositiveInt


class MOBILEConfig(ImaginationConfig):
    """Settings of MOBILE."""

    varying: ClassVar[frozenset[str]] = frozenset({"penalty_coef"})

    actor_learning_rate: PositiveFloat | None = 1e-4
    """Learning rate of the actor, and of a learned temperature; null uses that of the critics."""
    penalty_coef: NonNegativeFloat = 1.0
    """Weight beta of the inconsistency; 0 trusts the model everywhere."""
    num_penalty_samples: PositiveInt = 10
    """Next states, each with an action, that a member's Bellman estimate is the mean of; an update
    evaluates the critics at so many times the elites times the imagined rows of a batch."""
    backup: Literal["deterministic", "entropy"] = "deterministic"
    """Target: min Q, or min Q with the entropy term of SAC."""
    lowest_target: Number | None = None
    """Targets below this are raised to it: 0, the authors', where rewards are positive; null leaves
    targets as they are."""


class MOBILE(SAC):
    """SAC in a model of the dataset, pessimistic where the members disagree about values."""

    config_class = MOBILEConfig
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
        self.settings = self.part(MOBILEConfig)
        self.imagination = Imagination(
            self.dynamics_model,
            self.settings,
            self.seeds,
            loss_name="mobile_model_loss",
            adam_epsilon=self.config.adam_epsilon,
            optimizer=self.config.optimizer,
        )

    def learn(self, batch: TransitionBatch) -> StepOutput:
        """Lower the reward of imagined rows by beta u, then do SAC's update.

        The model reads observations as they are, so this comes before they are standardised.
        """
        doubt = self.inconsistency(batch)  # [S, B]
        lowered = batch.reward - self.setting("penalty_coef", 2) * doubt
        output = super().learn(replace(batch, reward=lowered))
        output.metrics["bellman_inconsistency"] = doubt
        return output

    @torch.no_grad()
    def inconsistency(self, batch: TransitionBatch) -> Tensor:
        """Return Std_i E[min_k Q_k(s'_i, a'_i)] of every row `[S, B]`, 0 for real ones.

        Nothing is drawn where it has no effect: with a weight of 0, or a single elite.
        """
        real = self.settings.real_rows(batch.reward.shape[1])
        doubt = torch.zeros_like(batch.reward)
        weightless = self.settings.penalty_coef == 0 and "penalty_coef" not in self.varied
        if weightless or self.dynamics_model.num_elites == 1 or real == doubt.shape[1]:
            return doubt
        spread = self.estimates(batch.obs[:, real:], batch.action[:, real:]).std(1)
        return torch.cat((doubt[:, :real], spread), 1)

    def estimates(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return each elite's mean of min_k Q_k(s', a') over n draws of s' and a', `[S, E, B]`."""
        model, samples = self.dynamics_model, self.settings.num_penalty_samples
        predicted = model.elite_members()(torch.cat((obs, action), -1).unsqueeze(1))
        mean, logvar = (x[..., : model.obs_dim].unsqueeze(1) for x in predicted[:2])
        noise = self.rng.normal(samples, *mean.shape[2:])  # [S, n, E, B, D]
        drawn = model.next_obs(obs[:, None, None], torch.addcmul(mean, (0.5 * logvar).exp(), noise))
        next_obs = self.normalize(drawn.flatten(1, 3))
        next_action, _ = self.sample_action(next_obs)
        members = self.target_members()
        q = self.model.q_values(next_obs, next_action, self.target_critic, members)  # [S, N, nEB]
        return q.amin(1).view(drawn.shape[:-1]).mean(1)

    def entropy_term(self, log_prob: Tensor) -> Tensor:
        """Return -alpha log pi, `[S, B]`; 0 with a deterministic backup."""
        if self.settings.backup == "entropy":
            return super().entropy_term(log_prob)
        return torch.zeros_like(log_prob)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Regression target `[S, B]` of rows whose reward was lowered, not below the bound."""
        target, metrics = super().td_target(batch)
        if self.settings.lowest_target is None:
            return target, metrics
        target = target.clamp(min=self.settings.lowest_target)
        return target, metrics | {"target_q_mean": target}

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Do SAC's update; the model stays as it is."""
        output = super().step(batch)
        output.metrics |= self.imagination.metrics()
        return output


SPEC = AlgorithmSpec(
    name="mobile",
    title="Model-Bellman Inconsistency",
    paper="PMLR:v202/sun23q.html",
    summary="model-based, offline; MOPO, penalised where values are in doubt; continuous actions",
    learner=MOBILE,
    networks=imagining_networks,
    loop=Loop.OFFLINE,
    phases=(Phase.IMAGINATION,),
    action_kinds=("continuous",),
    leaf_kinds=VECTOR_LEAVES,
    metrics=IMAGINING_METRICS
    | {
        "bellman_inconsistency": "deviation of the members' Bellman estimates, 0 for real rows",
        "mobile_model_loss": "loss of the model at its latest gradient step, summed over members",
    },
)

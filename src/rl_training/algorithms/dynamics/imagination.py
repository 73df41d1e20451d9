"""A model of the dynamics beside a policy: fitted to real transitions, rolled out for more.

MBPO, MOPO, MOBILE and COMBO are SAC on transitions that an ensemble imagined.  They hold an
`Imagination`, which fits the ensemble (`fit.py`), rolls a policy out in it (`ModelEnv`) and says
what an imagined transition is worth.  The loop decides when (`runtime/phases/imagination.py`).

Rollouts are the trajectory sampling of PETS (Chua et al., 2018, Sec. 5.1 of arXiv:1805.12114): TS1
draws a new elite for each row at each step, TSinf keeps one per row.  Where no penalty is asked
for, only the elite of a row runs, a fraction 1 / elites of the work; a penalty runs all members.
Shapes: S seeds, B starts, H steps, K = H B imagined rows, D observation, A action, M members, O
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import AnyLearner, Metrics, UpdateResult
from rl_training.algorithms.config import OptimizerSettings, part_of
from rl_training.algorithms.dynamics.fit import DynamicsConfig, DynamicsTrainer, dynamics_network
from rl_training.algorithms.sac import SACConfig, sac_networks
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.mlp_mopo import (
    Assignment,
    Members,
    MLPMOPOEnsembleModel,
    Prediction,
    max_aleatoric,
    max_mean_deviation,
    mean_disagreement,
    sample_gaussian,
    take_rows,
)
from rl_training.rng import Rng
from rl_training.state import Stateful
from rl_training.validation import Fraction, NonNegativeInt, PositiveFloat, PositiveInt

Policy = Callable[[Tensor], Tensor]
"""Observations `[S, B, D]` to actions `[S, B, A]` in learner units."""
TransitionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of `obs [S, B, D], action [S, B, A], next_obs [S, B, D]` in learner units; gives `[S, B]`."""
Sampling = Literal["ts1", "tsinf"]
Penalty = Literal["aleatoric", "mean_deviation", "disagreement", "none"]


def uncertainty(kind: Penalty, predicted: Prediction, obs_dim: int) -> Tensor:
    """Return how little is known `[S, B]`, from the predictions of all members `[S, M, B, O]`."""
    if kind == "aleatoric":
        return max_aleatoric(predicted.logvar)
    if kind == "mean_deviation":
        return max_mean_deviation(predicted.mean[..., :obs_dim])
    return mean_disagreement(predicted.mean)


@dataclass(frozen=True, kw_only=True)
class Imagined:
    """Imagined transitions `[S, K, ...]`; of a rollout K = H B, step after step."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    """Without any penalty."""
    next_obs: Tensor
    terminated: Tensor
    """The episode ends here, `bool`; the end of a rollout is none."""
    valid: Tensor
    """The row counts, `bool`: false after an imagined end, and where a number is not finite."""
    penalty: Tensor
    member: Tensor
    """Which member made the row, `int64`."""

    def valid_first(self) -> tuple[Imagined, Tensor]:
        """Sort the rows that count to the front, in order; also returns how many, `[S]`."""
        order = (~self.valid).to(torch.int8).argsort(dim=1, stable=True)
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: take_rows(part, order) if part.ndim == 3 else part.gather(1, order)
            for name, part in parts.items()
        }
        return Imagined(**moved), self.valid.sum(1)


class ModelEnv:
    """The ensemble as an environment for many rows at once."""

    def __init__(
        self,
        model: MLPMOPOEnsembleModel,
        rng: Rng,
        *,
        sampling: Sampling = "ts1",
        penalty: Penalty = "none",
        termination: TransitionFunction | None = None,
        reward: TransitionFunction | None = None,
    ) -> None:
        """Take the parts together.

        Args:
            model: The ensemble; every rollout reads its weights.
            rng: Source of the randomness, usually the learner's.
            sampling: A new elite each step, or one per row for the whole rollout.
            penalty: See `uncertainty`; `none` is 0.
            termination: When episodes end; None is the model's own head, or never without one.
            reward: A known reward in place of the learned one.

        Raises:
            ConfigError: When the reward is neither known nor learned.
        """
        if reward is None and not model.learn_reward:
            raise ConfigError(
                "the dynamics ensemble does not learn the reward (model_learn_reward is false), "
                "and none is known; set reward_function, or let it learn the reward"
            )
        self.model, self.rng, self.sampling, self.penalty = model, rng, sampling, penalty
        self.termination, self.reward = termination, reward

    def members(self) -> Members:
        """Take the weights that `step` needs: all members for a penalty, else the elites."""
        return self.model.elite_members() if self.penalty == "none" else self.model.members()

    def assign(self, rows: int) -> Assignment:
        """Draw an elite for each row."""
        return Assignment.draw(self.rng, rows, self.model.num_elites)

    @torch.no_grad()
    def step(
        self, obs: Tensor, action: Tensor, assignment: Assignment, members: Members
    ) -> Imagined:
        """Draw one transition of every row `[S, B, ...]`."""
        x = torch.cat((obs, action), -1)
        elite = self.model.elites.gather(1, assignment.slot)  # [S, B]
        predicted, penalty = self._predict(x, elite, assignment, members)
        drawn = sample_gaussian(predicted, self.rng)
        next_obs = self.model.next_obs(obs, drawn)
        # Without a known reward the model has one.
        known = self.reward
        reward = drawn[..., -1] if known is None else known(obs, action, next_obs)
        finite = torch.isfinite(next_obs).all(-1) & torch.isfinite(reward)
        return Imagined(
            obs=obs,
            action=action,
            reward=reward,
            next_obs=next_obs,
            terminated=self._ends(obs, action, next_obs, predicted),
            valid=finite,
            penalty=penalty,
            member=elite,
        )

    def _predict(
        self, x: Tensor, elite: Tensor, assignment: Assignment, members: Members
    ) -> tuple[Prediction, Tensor]:
        if self.penalty == "none":
            return assignment(members, x), x.new_zeros(x.shape[:2])
        everyone = members(x.unsqueeze(1))
        whom = Assignment(assignment.order, assignment.place, elite, members.count)
        return whom.pick(everyone), uncertainty(self.penalty, everyone, self.model.obs_dim)

    def _ends(self, obs: Tensor, action: Tensor, next_obs: Tensor, predicted: Prediction) -> Tensor:
        if self.termination is not None:
            return self.termination(obs, action, next_obs)
        if predicted.terminal is not None:
            return predicted.terminal > 0
        return torch.zeros(obs.shape[:2], dtype=torch.bool, device=obs.device)

    @torch.no_grad()
    def rollout(self, obs: Tensor, policy: Policy, horizon: int) -> Imagined:
        """Follow `policy` from `obs` `[S, B, D]` for `horizon` steps; nothing is read back.

        A row that ended keeps its place, standing still and not `valid`, so that shapes are fixed.
        """
        members, assignment = self.members(), self.assign(obs.shape[1])
        alive = torch.ones(obs.shape[:2], dtype=torch.bool, device=obs.device)
        steps: list[Imagined] = []
        for index in range(horizon):
            if index and self.sampling == "ts1":
                assignment = self.assign(obs.shape[1])
            imagined = self.step(obs, policy(obs), assignment, members)
            alive = alive & imagined.valid
            parts = {field.name: getattr(imagined, field.name) for field in fields(imagined)}
            steps.append(Imagined(**parts | {"valid": alive}))
            alive = alive & ~imagined.terminated
            obs = torch.where(alive.unsqueeze(-1), imagined.next_obs, obs)
        return Imagined(
            **{
                field.name: torch.cat([getattr(step, field.name) for step in steps], 1)
                for field in fields(Imagined)
            }
        )


HorizonSchedule = Annotated[
    tuple[NonNegativeInt, NonNegativeInt, PositiveInt, PositiveInt],
    BeforeValidator(
        lambda value: tuple(value) if isinstance(value, list) else value,
        json_schema_input_type=Annotated[list[NonNegativeInt], Field(min_length=4, max_length=4)],
    ),
]


class Times(NamedTuple):
    """Steps at which something is done: `first`, then every multiple of `every` after it."""

    first: int
    every: int | None
    """None is once only."""

    def due(self, step: int) -> int:
        """Return how often it is to have been done when `step` steps have been taken."""
        if step < self.first:
            return 0
        return 1 if self.every is None else 1 + step // self.every - self.first // self.every

    def next_after(self, step: int) -> int | None:
        """Return the first of the times after `step`."""
        if step < self.first:
            return self.first
        return None if self.every is None else (step // self.every + 1) * self.every


class ImaginationConfig(DynamicsConfig):
    """How much is imagined, and how it is mixed with real transitions."""

    varying: ClassVar[frozenset[str]] = frozenset({"policy_learning_rate"})

    policy_learning_rate: PositiveFloat = 3e-4
    """Learning rate of the critics, and of the actor unless it has its own."""
    model_updates: PositiveInt | None = None
    """Gradient steps of each fit of the model; null fits until the hold-out error stays."""
    rollout_batch_size: PositiveInt = 50_000
    """Rollouts per refresh, each from a real state."""
    rollout_horizon: PositiveInt = 5
    """Imagined steps of a rollout."""
    rollout_sampling: Literal["ts1", "tsinf"] = "ts1"
    """`ts1` draws a new elite at each imagined step, `tsinf` one per rollout."""
    rollouts_kept: PositiveInt = 5
    """Refreshes whose imagined transitions are learned from; older ones are dropped."""
    rollout_refresh_interval: PositiveInt | None = 1_000
    """Updates between two refreshes of the imagined transitions; null makes one, before the first
    update."""
    synthetic_buffer_capacity: PositiveInt | None = None
    """Most imagined transitions kept; null is room for `rollouts_kept` refreshes."""
    synthetic_batch_ratio: Fraction = 0.95
    """Share of every batch that is imagined; 0 learns from real transitions alone."""
    termination_function: str = "auto"
    """Where imagined episodes end: the task's own rule, `never`, or `module:function`."""
    reward_function: str | None = None
    """Known reward, `auto` for the task's own or `module:function`; null takes the model's."""

    @property
    def fit_times(self) -> Times:
        """When the model is fitted: to a dataset once, before the first update."""
        return Times(0, None)

    @property
    def refresh_times(self) -> Times:
        """When rollouts are made: before the first update, then at the interval."""
        return Times(0, self.rollout_refresh_interval)

    @property
    def largest_horizon(self) -> int:
        """Return the most steps a rollout can have during a run."""
        return self.rollout_horizon

    def horizon(self, step: int) -> int:  # noqa: ARG002 - the same at every step here
        """Return the steps of a rollout that is made at `step`."""
        return self.rollout_horizon

    def real_rows(self, batch_size: int) -> int:
        """Return how many rows of a batch are real; they come before those that are imagined."""
        return round(batch_size * (1 - self.synthetic_batch_ratio))

    @property
    def synthetic_capacity(self) -> int:
        """Imagined transitions for which there is room."""
        if self.synthetic_buffer_capacity is not None:
            return self.synthetic_buffer_capacity
        return self.rollouts_kept * self.largest_horizon * self.rollout_batch_size

    def kept_at(self, step: int) -> int:
        """Return how many imagined transitions are learned from after the refresh at `step`."""
        asked = self.rollouts_kept * self.horizon(step) * self.rollout_batch_size
        return min(asked, self.synthetic_capacity)

    @model_validator(mode="after")
    def _capacity_holds_a_refresh(self) -> ImaginationConfig:
        least = self.largest_horizon * self.rollout_batch_size
        if self.synthetic_capacity < least:
            raise ValueError(
                f"synthetic_buffer_capacity must hold one refresh, rollout_batch_size x horizon = "
                f"{least}, got {self.synthetic_capacity}; raise it, or leave it out"
            )
        return self


@dataclass(frozen=True)
class Rules:
    """What is known of a task beside its data."""

    termination: TransitionFunction | None = None
    """Where episodes end; None is the model's own head, or never without one."""
    reward: TransitionFunction | None = None
    """Reward on the scale of the data; None takes the model's."""


class Imagination(Stateful):
    """An ensemble, how it is fitted, and what a policy imagines in it."""

    def __init__(
        self,
        model: MLPMOPOEnsembleModel,
        config: ImaginationConfig,
        seeds: Sequence[int],
        *,
        loss_name: str,
        adam_epsilon: float,
        optimizer: OptimizerSettings | None = None,
    ) -> None:
        """Create the trainer of the model, which has an optimizer and randomness of its own.

        Args:
            model: The ensemble.
            config: How it is fitted and rolled out.
            seeds: One per seed of the model.
            loss_name: The method's name for the loss of the model.
            adam_epsilon: See `AlgoConfig`.
            optimizer: Which optimizer the model has; None is Adam.
        """
        self.config, self.loss_name, self.seeds = config, loss_name, tuple(seeds)
        self.trainer = DynamicsTrainer(
            model, config, seeds, adam_epsilon=adam_epsilon, optimizer=optimizer
        )
        self.latest_loss = torch.zeros_like(self.trainer.best_error[:, 0])
        """Of the latest gradient step of the model, `[S]`."""

    @property
    def model(self) -> MLPMOPOEnsembleModel:
        """The ensemble."""
        return self.trainer.model

    @property
    def device(self) -> torch.device:
        """Where it learns."""
        return self.latest_loss.device

    @property
    def penalty_kind(self) -> Penalty:
        """Which uncertainty rollouts measure."""
        return "none"

    def worth(self, imagined: Imagined) -> Tensor:
        """Return what imagined transitions are worth to the policy, `[S, K]`."""
        return imagined.reward

    def update(
        self, batch: TransitionBatch | Mapping[str, Tensor], *, per_member: bool = False
    ) -> UpdateResult:
        """Take one gradient step of the model on real transitions; see `DynamicsTrainer.update`."""
        metrics = self.trainer.update(batch, per_member=per_member).metrics.tensors
        return UpdateResult(metrics=Metrics(self._named(metrics)))

    def fit(
        self, rows: Tensor, on_epoch: Callable[[DynamicsTrainer], None] | None = None
    ) -> dict[str, Tensor]:
        """Fit the model to the table `rows` as the settings say; see `DynamicsTrainer.fit`."""
        return self._named(self.trainer.fit(rows, on_epoch, self.config.model_updates))

    def _named(self, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.latest_loss.copy_(metrics["mopo_model_loss"])
        return {self.loss_name if n == "mopo_model_loss" else n: v for n, v in metrics.items()}

    def metrics(self) -> dict[str, Tensor]:
        """Return the latest loss of the model, for the metrics of the policy's update."""
        return {self.loss_name: self.latest_loss.clone()}

    @torch.no_grad()
    def rollout(
        self, policy: Policy, rng: Rng, obs: Tensor, horizon: int, rules: Rules
    ) -> Imagined:
        """Follow a policy from `obs` `[S, B, D]` inside the model."""
        env = ModelEnv(
            self.model,
            rng,
            sampling=self.config.rollout_sampling,
            penalty=self.penalty_kind,
            termination=rules.termination,
            reward=rules.reward,
        )
        return env.rollout(obs, policy, horizon)


def imagination_of(learner: AnyLearner) -> Imagination | None:
    """Return what a learner imagines with; None where it has no model."""
    held: Imagination | None = getattr(learner, "imagination", None)
    return held


def rows_that_count(imagined: Imagined) -> Imagined:
    """Replace rows that do not count by ones that do, each about equally often; reads nothing back.

    Every seed then has the same number of rows, whenever its rollouts ended.
    """
    order = (~imagined.valid).to(torch.int8).argsort(dim=1, stable=True)  # those that count first
    count = imagined.valid.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(order.shape[1], device=order.device) % count
    index = order.gather(1, place)
    parts = {field.name: getattr(imagined, field.name) for field in fields(imagined)}
    return Imagined(
        **{
            name: take_rows(part, index) if part.ndim == 3 else part.gather(1, index)
            for name, part in parts.items()
        }
    )


def imagining_networks(env: EnvSpec, config: SACConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build actor and critics, and the ensemble."""
    ensemble = dynamics_network(env, part_of(config, DynamicsConfig), rng)
    return {"policy_model": sac_networks(env, config, rng)["model"], "dynamics_model": ensemble}


IMAGINING_METRICS = {
    "critic_loss": "squared TD error, summed over critics",
    "actor_loss": "alpha log pi - min Q",
    "target_q_mean": "mean regression target",
    "entropy_term": "mean of -alpha log pi(a'|s') in the target",
    "q_mean": "mean of min Q at the policy's actions",
    "alpha": "temperature",
    "entropy": "policy entropy, estimated on the batch",
}
"""Of the policy's update; a method adds the loss of its model."""

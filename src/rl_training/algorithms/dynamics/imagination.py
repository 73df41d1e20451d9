"""A model of the dynamics beside a policy: fitted to real transitions, rolled out for more.

MBPO and MOPO are SAC on transitions that an ensemble imagined.  They hold an `Imagination`, which
fits the ensemble (`fit.py`) and rolls a policy out in it (`rollout.py`); it says what an imagined
transition is worth.  The loop decides when (`runtime/imagining.py`).
Shapes: S seeds, B starts, K imagined rows, D observation.
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
from rl_training.algorithms.dynamics.config import DynamicsConfig, dynamics_network
from rl_training.algorithms.dynamics.fit import DynamicsTrainer
from rl_training.algorithms.dynamics.rollout import (
    Imagined,
    ModelEnv,
    Penalty,
    Policy,
    TransitionFunction,
)
from rl_training.algorithms.sac import SACConfig, sac_networks
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.dynamics import take_rows
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.rng import Rng
from rl_training.state import Stateful
from rl_training.validation import Fraction, NonNegativeInt, PositiveFloat, PositiveInt

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
    """Step size of the critics, and of the actor unless it has its own."""
    model_updates: PositiveInt | None = None
    """Gradient steps of each fit of the model; null goes on until its hold-out error stays."""
    rollout_batch_size: PositiveInt = 50_000
    """Roll-outs per refresh, each from a real state."""
    rollout_horizon: PositiveInt = 5
    """Imagined steps of a roll-out."""
    rollout_sampling: Literal["ts1", "tsinf"] = "ts1"
    """`ts1` draws a new elite at each imagined step, `tsinf` one per roll-out."""
    rollouts_kept: PositiveInt = 5
    """Refreshes whose imagined transitions are learned from; older ones are dropped."""
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
        """When the model is fitted."""
        raise NotImplementedError

    @property
    def refresh_times(self) -> Times:
        """When roll-outs are made."""
        raise NotImplementedError

    @property
    def largest_horizon(self) -> int:
        """Return the most steps a roll-out can have during a run."""
        return self.rollout_horizon

    def horizon(self, step: int) -> int:  # noqa: ARG002 - the same at every step here
        """Return the steps of a roll-out that is made at `step`."""
        return self.rollout_horizon

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
        """Which uncertainty roll-outs measure."""
        return "none"

    def worth(self, made: Imagined) -> Tensor:
        """Return what imagined transitions are worth to the policy, `[S, K]`."""
        return made.reward

    def update(
        self, batch: TransitionBatch | Mapping[str, Tensor], *, per_member: bool = False
    ) -> UpdateResult:
        """Take one gradient step of the model on real transitions; see `DynamicsTrainer.update`."""
        found = self.trainer.update(batch, per_member=per_member).metrics.tensors
        return UpdateResult(metrics=Metrics(self._named(found)))

    def fit(
        self, rows: Tensor, on_epoch: Callable[[DynamicsTrainer], None] | None = None
    ) -> dict[str, Tensor]:
        """Fit the model to the table `rows` as the settings say; see `DynamicsTrainer.fit`."""
        return self._named(self.trainer.fit(rows, on_epoch, self.config.model_updates))

    def _named(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.latest_loss.copy_(found["mopo_model_loss"])
        return {self.loss_name if n == "mopo_model_loss" else n: v for n, v in found.items()}

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


def rows_that_count(made: Imagined) -> Imagined:
    """Replace rows that do not count by ones that do, each about equally often; reads nothing back.

    Every seed then has the same number of rows, whenever its roll-outs ended.
    """
    order = (~made.valid).to(torch.int8).argsort(dim=1, stable=True)  # those that count first
    count = made.valid.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(order.shape[1], device=order.device) % count
    index = order.gather(1, place)
    parts = {field.name: getattr(made, field.name) for field in fields(made)}
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

"""Settings of learners that learn from roll-outs in a model of the dynamics."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from rl_training.algorithms.dynamics.config import DynamicsConfig
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
    """Adam step size of the critics, and of the actor unless it has its own."""
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

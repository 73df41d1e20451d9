"""Settings of learners that learn from a replay of their own experience."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rl_training.algorithms.config import AlgoConfig
from rl_training.validation import (
    LARGEST_INT,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveInt,
)


class ReplaySettings(AlgoConfig):
    """How experience is kept and paced; units are environment steps per seed."""

    buffer_capacity: PositiveInt = 1_000_000
    """Transitions kept; the oldest are overwritten."""
    batch_size: PositiveInt = 256
    """Transitions per gradient step and seed."""
    learning_starts: NonNegativeInt = 1_000
    """Steps of uniformly random actions before the first update."""
    train_frequency: PositiveInt = 1
    """Environment steps between two rounds of updates."""

    @property
    def random_steps(self) -> int:
        """Steps of uniformly random actions."""
        return self.learning_starts

    @property
    def updates_per_round(self) -> int:
        """Updates every `train_frequency` steps."""
        raise NotImplementedError

    @property
    def rows_per_update(self) -> int:
        """Transitions drawn for an update, per seed."""
        return self.batch_size

    @property
    def steps_per_update(self) -> int:
        """Steps learned from in an update, per seed."""
        return self.rows_per_update

    def updates_by(self, step: int) -> int:
        """Updates that belong to the steps up to `step`, were there no `learning_starts`."""
        return step // self.train_frequency * self.updates_per_round

    @model_validator(mode="after")
    def _capacity_holds_a_batch(self) -> ReplaySettings:
        if self.buffer_capacity < self.batch_size:
            raise ValueError(
                f"buffer_capacity must be >= batch_size ({self.batch_size}), "
                f"got {self.buffer_capacity}"
            )
        return self


class SequenceSettings(ReplaySettings):
    """How experience is kept, drawn and paced by a learner with a memory."""

    batch_size: PositiveInt = 16
    """Sequences per gradient step and seed."""
    batch_length: Annotated[int, Field(ge=2, le=LARGEST_INT)] = 64
    """Steps of a sequence; what was before them is not known."""
    gradient_updates_per_step: PositiveInt = 1
    """Updates per round; a round is every `train_frequency` steps."""
    train_ratio: PositiveInt | None = None
    """Steps learned from per environment step, in place of `train_frequency` and
    `gradient_updates_per_step`; with 16 sequences of 64, 512 is an update every second step."""

    @property
    def updates_per_round(self) -> int:
        """Updates every `train_frequency` steps."""
        return self.gradient_updates_per_step

    @property
    def steps_per_update(self) -> int:
        """Steps learned from in an update, per seed."""
        return self.batch_size * self.batch_length

    def updates_by(self, step: int) -> int:
        """Updates that belong to the steps up to `step`, were there no `learning_starts`."""
        if self.train_ratio is None:
            return super().updates_by(step)
        # A whole number of the step alone: what is owed needs no account of its own.
        return step * self.train_ratio // self.steps_per_update

    @model_validator(mode="after")
    def _capacity_holds_a_sequence(self) -> SequenceSettings:
        if self.buffer_capacity < self.batch_length:
            raise ValueError(
                f"buffer_capacity must be >= batch_length ({self.batch_length}), "
                f"got {self.buffer_capacity}"
            )
        return self


class ReplayConfig(ReplaySettings):
    """How experience is kept, drawn and paced by a learner of values."""

    gradient_updates_per_step: PositiveInt = 1
    """Updates per round; with `train_frequency` 1 this is the update-to-data ratio."""
    n_step: PositiveInt = 1
    """Rewards summed before bootstrapping; stops at the end of an episode."""
    prioritized: bool = False
    """Draw transitions by their last TD error (Schaul et al., 2016) instead of uniformly."""
    priority_exponent: NonNegativeFloat = 0.6
    """Exponent of the priorities; 0 draws uniformly."""
    importance_exponent: Fraction = 0.4
    """Exponent of the importance weights at the start; it reaches 1 at the end of the run."""
    reward_scale: Number = 1.0
    """Factor on every reward that is learned from; returns are reported without it."""
    reward_shift: Number = 0.0
    """Added to every reward after scaling."""

    @property
    def updates_per_round(self) -> int:
        """Updates every `train_frequency` steps."""
        return self.gradient_updates_per_step

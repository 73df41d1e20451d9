"""Settings of PETS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from rl_training.algorithms.config import AlgoConfig
from rl_training.algorithms.dynamics.imagination import Sampling
from rl_training.algorithms.pets.planners import PlannerName, PlannerSettings
from rl_training.validation import (
    LARGEST_FLOAT,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Sizes,
    Whole,
)

MOST_IMAGINED = 2**23
"""Steps that an iteration of a search may imagine, beyond which memory and time run out."""


class PETSConfig(AlgoConfig):
    """Settings of PETS."""

    varying: ClassVar[frozenset[str]] = frozenset({"model_learning_rate"})
    why_not: ClassVar[Mapping[str, str]] = {
        "encoder": "its model predicts the observation itself, not features of it",
        "normalize_observations": "its model standardises what it is given by the whole replay",
        "normalize_rewards": "its model predicts the task's own rewards",
    }

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of imagined rewards; 1 adds them up, as the paper does."""
    buffer_capacity: PositiveInt = 100_000
    """Transitions kept; the oldest are overwritten."""
    batch_size: PositiveInt = 256
    """Transitions per gradient step, seed and member of the ensemble."""
    learning_starts: NonNegativeInt = 200
    """Steps before the first update of the model."""
    model_updates_per_step: PositiveInt = 1
    """Updates of the model per round; a round is every `train_frequency` steps."""
    initial_random_steps: NonNegativeInt = 200
    """Steps of uniformly random actions; afterwards actions are planned."""
    model_hidden_sizes: Sizes = (200, 200, 200)
    """Widths of the hidden layers of each member."""
    num_ensembles: Annotated[int, Field(ge=1, le=1_000), Whole] = 5
    """Members of the ensemble."""
    planner: PlannerName = "cem"
    """`cem` is the paper's; `icem` draws coloured noise and keeps elites, `mppi` weights all
    candidates by their return."""
    planning_horizon: Annotated[int, Field(ge=1, le=10_000), Whole] = 25
    """Steps a plan looks ahead."""
    planning_candidates: Annotated[int, Field(ge=1, le=1_000_000), Whole] = 400
    """Plans evaluated per iteration."""
    planning_topk: Annotated[int, Field(ge=1, le=1_000_000), Whole] = 40
    """Best plans that the next iteration is drawn around (not used by `mppi`)."""
    planning_iterations: Annotated[int, Field(ge=1, le=1_000), Whole] = 5
    """Iterations of a search."""
    planning_particles: Annotated[int, Field(ge=1, le=100_000), Whole] = 20
    """Imagined trajectories per plan, a multiple of `num_ensembles`."""
    trajectory_sampling: Sampling = "tsinf"
    """`tsinf` keeps a particle's member for the whole plan, `ts1` changes it at each step."""
    planning_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the old mean and variance that an iteration keeps (`cem`, `icem`)."""
    planning_spread: PositiveFloat = 0.25
    """Initial deviation of a search, as a share of the range of actions (`cem`, `icem`)."""
    planning_epsilon: NonNegativeFloat = 1e-3
    """Largest variance of a plan at which its search stops (`cem`, `icem`)."""
    planning_noise_exponent: NonNegativeFloat = 2.0
    """Exponent of the noise's spectrum (`icem`); 0 is white, larger is smoother."""
    planning_keep_fraction: Fraction = 0.3
    """Share of the elites tried again in the next iteration and step (`icem`)."""
    planning_population_decay: Annotated[float, Field(ge=1, le=LARGEST_FLOAT)] = 1.25
    """Factor by which the number of candidates shrinks per iteration (`icem`); 1 keeps it."""
    planning_temperature: PositiveFloat = 1.0
    """Difference of returns that changes a candidate's weight by the factor e (`mppi`)."""
    planning_noise_scale: PositiveFloat = 0.5
    """Deviation of the candidates as a share of half the range of actions (`mppi`)."""
    reward_function: str = "auto"
    """Reward of imagined steps: `auto` is the task's own where that is known, else learned;
    `learned`, or `module:function`."""
    value_function: str | None = None
    """Value beyond a plan: `module:function`, whose value of the last imagined step is added to
    the return of a plan that has not ended; null adds nothing."""
    termination_function: str = "auto"
    """Ends of imagined episodes: `auto` is the task's own rule where that is known, else learned
    with `model_learn_terminations`, else none; `never`, or `module:function`."""

    @model_validator(mode="before")
    @classmethod
    def _short_name_of_the_rate(cls, values: Any) -> Any:
        # A learner built by hand has one rate: `PETS(dynamics_model=..., learning_rate=...)`.
        if isinstance(values, dict) and "learning_rate" in values:
            if "model_learning_rate" in values:
                raise ValueError("learning_rate and model_learning_rate are the same: give one")
            values = dict(values)
            values["model_learning_rate"] = values.pop("learning_rate")
        return values

    @model_validator(mode="after")
    def _sizes_fit(self) -> PETSConfig:
        check_planning(self.planner_settings(), self.planning_particles, self.num_ensembles)
        imagined = self.planning_candidates * self.planning_particles * self.planning_horizon
        if imagined > MOST_IMAGINED:
            raise ValueError(
                "planning_candidates x planning_particles x planning_horizon must be <= "
                f"{MOST_IMAGINED}, as they are imagined at once, got {imagined}"
            )
        return self

    @property
    def random_steps(self) -> int:
        """Steps of uniformly random actions."""
        return self.initial_random_steps

    @property
    def updates_per_round(self) -> int:
        """Updates every `train_frequency` steps."""
        return self.model_updates_per_step

    @property
    def rows_per_update(self) -> int:
        """Transitions drawn for an update: each member has a batch of its own."""
        return self.batch_size * self.num_ensembles

    def planner_settings(self) -> PlannerSettings:
        """Return the planner's part of the settings."""
        return PlannerSettings(
            name=self.planner,
            candidates=self.planning_candidates,
            topk=self.planning_topk,
            iterations=self.planning_iterations,
            momentum=self.planning_momentum,
            epsilon=self.planning_epsilon,
            spread=self.planning_spread,
            noise_exponent=self.planning_noise_exponent,
            keep_fraction=self.planning_keep_fraction,
            population_decay=self.planning_population_decay,
            temperature=self.planning_temperature,
            noise_scale=self.planning_noise_scale,
        )


def check_planning(settings: PlannerSettings, particles: int, members: int) -> None:
    """Refuse sizes that do not go together.

    Raises:
        ValueError: Naming the setting, its value and what is allowed.
    """
    if settings.topk > settings.candidates:
        raise ValueError(
            f"planning_topk must be <= planning_candidates ({settings.candidates}), "
            f"got {settings.topk}"
        )
    if particles % members:
        near = members * max(1, round(particles / members))
        raise ValueError(
            f"planning_particles must be a multiple of num_ensembles ({members}), so that each "
            f"member has as many, got {particles}; use {near}"
        )

"""SimBa (Lee et al., 2024, arXiv:2410.09754): SAC with networks biased towards simplicity.

Observations are standardised by running statistics, actor and critics are residual networks whose
branches are normalised, and weights decay (Sec. 4).  Everything else is SAC.

Overrides: none; it is SAC with other networks and settings.
Deviations: critics move before policy and temperature, as in every actor-critic here, where the
    authors' code moves the policy first; the temperature's loss is linear in log(alpha), as SAC's
    is here.  Standardised observations are clipped to +-10 deviations, which they are not there.
    `gamma` is a setting, 0.99 unless a preset says otherwise; the authors derive it from the length
    of episodes, min(1 - 5 / T, 0.995).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rl_training.algorithms.actor_critic import networks_of
from rl_training.algorithms.config import OptimizerChoice, OptimizerSettings
from rl_training.algorithms.sac import SAC, SAC_METRICS, SACConfig
from rl_training.algorithms.spec import VECTOR_LEAVES, AlgorithmSpec, Loop
from rl_training.models.residual import SimBaModel
from rl_training.validation import (
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Sizes,
    never,
)


def require_one_width(config: SACConfig) -> None:
    """Refuse blocks of several widths.

    Raises:
        ValueError: Naming the setting, and what it could be.
    """
    for name in ("hidden_sizes", "actor_hidden_sizes", "critic_hidden_sizes"):
        sizes = getattr(config, name)
        if sizes is not None and len(set(sizes)) > 1:
            raise ValueError(
                f"{name} must hold the same width for every block, such as "
                f"{[sizes[0]] * len(sizes)}, got {list(sizes)}"
            )


class SimBaConfig(SACConfig):
    """Settings of SimBa; defaults are those of the authors' code."""

    learning_rate: PositiveFloat = 1e-4
    """Learning rate of the critics, and of the actor unless it has its own."""
    optimizer: OptimizerChoice = Field(default=OptimizerSettings(type="adamw", weight_decay=0.01))
    """Optimizer of the networks: a name, or a mapping `{type: sgd, momentum: 0.9}`; a temperature
    and other single numbers always have Adam."""
    gradient_updates_per_step: PositiveInt = 2
    """Gradient steps per environment step, of actor and critics alike."""
    learning_starts: NonNegativeInt = 5_000
    """Steps of uniformly random actions before the first update."""
    normalize_observations: bool = True
    """Standardise observations by the running mean and deviation of all observations so far;
    the replay keeps raw ones, and the statistics are in the checkpoint."""
    hidden_sizes: Sizes = (512, 512)
    """Width of the critics' blocks, one number for each, all the same."""
    actor_hidden_sizes: Sizes | None = (128,)
    """Width of the actor's blocks, one number for each, all the same."""
    initial_alpha: PositiveFloat = Field(default=0.01)
    """Start of a learned temperature."""
    target_entropy: Number | None = None
    """Entropy a learned temperature aims at; null means -A/2."""
    # What the blocks are made of is the method.
    activation: Literal["relu"] = "relu"
    """What follows the hidden layer of each block."""
    encoder: None = None
    """Always null: the first layer reads observations as they are."""
    features_dim: None = None
    """Always null: there are no convolutions."""
    use_layer_norm: Annotated[
        bool, Field(json_schema_extra={"const": False}), never("blocks are normalised already")
    ] = False
    """Always false: blocks are normalised already."""
    weight_init: Literal["orthogonal"] = "orthogonal"
    """How the first and the last weights are drawn; those of blocks are He's."""

    @model_validator(mode="after")
    def _blocks_have_one_width(self) -> SimBaConfig:
        require_one_width(self)
        return self


class SimBa(SAC):
    """SAC with residual networks."""

    config_class = SimBaConfig
    config: SimBaConfig
    model: SimBaModel
    entropy_per_entry = -0.5


SPEC = AlgorithmSpec(
    name="simba",
    title="SimBa",
    paper="arXiv:2410.09754",
    summary="off-policy; SAC with residual networks; continuous actions",
    learner=SimBa,
    networks=networks_of(SimBaModel),
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    leaf_kinds=VECTOR_LEAVES,
    metrics=SAC_METRICS,
)

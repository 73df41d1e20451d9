"""Settings of Dreamer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from rl_training.algorithms.config import AlgoConfig, LRSchedule, OptimizerChoice, OptimizerSettings
from rl_training.models.dreamer import SIZES, ConvKind, DreamerSize, LatentKind, SizeName
from rl_training.validation import (
    LARGEST_INT,
    Discount,
    Fraction,
    LayerCount,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Whole,
)

MOST_BLOCKS = 64


class DreamerConfig(AlgoConfig):
    """Settings of Dreamer."""

    varying: ClassVar[frozenset[str]] = frozenset(
        {
            "world_model_learning_rate",
            "actor_learning_rate",
            "critic_learning_rate",
            "entropy_coef",
        }
    )

    compiles_on_cpu: ClassVar[bool] = False  # the compiler takes minutes
    why_not: ClassVar[Mapping[str, str]] = {
        "encoder": "its world model learns its own by predicting what it encodes",
        "normalize_observations": "its world model takes symlogs of vectors, which have no scale",
        "normalize_rewards": "it learns symlogs of rewards and divides returns by their range",
        "activation": "its networks have SiLU and normalised layers as one recipe",
    }

    gamma: Discount = 0.997
    """Discount per environment step."""
    buffer_capacity: Annotated[int, Field(ge=2, le=LARGEST_INT), Whole] = 200_000
    """Steps kept; the oldest are overwritten."""
    world_model_learning_rate: PositiveFloat = 4e-5
    """Learning rate of the world model; where this and the following two are the same, the
    optimizers do what a single one would."""
    actor_learning_rate: PositiveFloat = 4e-5
    """Learning rate of the policy."""
    critic_learning_rate: PositiveFloat = 4e-5
    """Learning rate of the value."""
    optimizer: OptimizerChoice = Field(default=OptimizerSettings(type="laprop"))
    """Optimizer of the networks: a name, or a mapping `{type: adam, eps: 1.0e-8}`."""
    adam_epsilon: PositiveFloat = 1e-20
    """What the optimizer adds to the root of the mean squared gradient before it divides by it."""
    warmup_updates: NonNegativeInt = 1_000
    """Updates over which the learning rates grow from 0."""
    adaptive_clip: PositiveFloat = 0.3
    """Largest gradient of a tensor as a share of the tensor's norm."""
    size: SizeName = "12m"
    """Widths of the networks: `tiny` for a CPU, the others are the authors' by their number of
    weights; the following settings change single widths."""
    deter_size: PositiveInt | None = None
    """Width of the recurrent state; null is set by `size`, here and below."""
    model_hidden_size: PositiveInt | None = None
    """Width of the layers inside the recurrent model."""
    units: PositiveInt | None = None
    """Width of the layers of heads, policy, value and of the encoder of vectors."""
    mlp_layers: LayerCount | None = None
    """Hidden layers of policy and value, and of encoder and decoder of vectors."""
    head_layers: LayerCount | None = None
    """Hidden layers of the heads for reward and continuation."""
    prior_layers: LayerCount | None = None
    """Hidden layers of the prior."""
    recurrent_blocks: Annotated[int, Field(ge=1, le=MOST_BLOCKS)] | None = None
    """Blocks of the recurrent model's large products; 1 is a plain GRU."""
    cnn_depth: PositiveInt | None = None
    """Channels of the convolutions; each layer has a multiple of it."""
    convolutions: ConvKind | None = None
    """How images are halved: `pooled` (kernel 5, maximum over 2 x 2), or `strided` (kernel 4,
    stride 2), which takes a tenth of the compute."""
    latent_groups: PositiveInt | None = None
    """Categorical variables of the stochastic state."""
    latent_classes: Annotated[int, Field(ge=2, le=LARGEST_INT), Whole] | None = None
    """Classes of each."""
    latents: LatentKind = "categorical"
    """Kind of the stochastic state; `gaussian` is that of the first Dreamer."""
    num_bins: Annotated[
        int, Field(ge=3, lt=LARGEST_INT, json_schema_extra={"not": {"multipleOf": 2}})
    ] = 255
    """Bins of the distributions of reward and value; odd."""
    free_nats: NonNegativeFloat = 1.0
    """Divergence of posterior and prior that costs nothing."""
    dynamics_scale: NonNegativeFloat = 1.0
    """Weight of the divergence that teaches the prior."""
    representation_scale: NonNegativeFloat = 0.1
    """Weight of the divergence that teaches the posterior."""
    discounted_continuation: bool = True
    """Let the continuation head predict the discount too: `gamma` where an episode continues."""
    imagination_horizon: PositiveInt = 15
    """Steps imagined from every state of a batch."""
    return_lambda: Fraction = 0.95
    """Lambda of the returns; 0 bootstraps after one step, 1 only at the horizon."""
    entropy_coef: NonNegativeFloat = 3e-4
    """Weight of the policy's entropy."""
    entropy_coef_schedule: LRSchedule = Field(default=LRSchedule())
    """Schedule of `entropy_coef`: a factor, like that of learning rates."""
    return_range_rate: Fraction = 0.01
    """Share of the newest returns in the range that advantages are divided by."""
    target_critic_rate: Fraction = 0.02
    """Share of the critic in its average per update; predictions are pulled towards those of
    the average."""
    target_critic_scale: NonNegativeFloat = 1.0
    """Weight of that pull."""
    replay_value_scale: NonNegativeFloat = 0.3
    """Weight of the critic's loss on returns with real rewards; it teaches the world model too."""

    watch_model: bool = True
    """Predict real sequences from their actions alone at every evaluation: errors in the log,
    and for images a video in the run's folder `videos`."""

    @model_validator(mode="after")
    def _bins_have_a_middle(self) -> DreamerConfig:
        if self.num_bins % 2 == 0:
            raise ValueError(f"num_bins must be an odd number, got {self.num_bins}")
        return self

    def widths(self) -> DreamerSize:
        """Return the widths of all networks."""
        names: dict[str, Any] = {
            "deter": self.deter_size,
            "hidden": self.model_hidden_size,
            "units": self.units,
            "layers": self.mlp_layers,
            "head_layers": self.head_layers,
            "prior_layers": self.prior_layers,
            "blocks": self.recurrent_blocks,
            "depth": self.cnn_depth,
            "convolutions": self.convolutions,
            "groups": self.latent_groups,
            "classes": self.latent_classes,
        }
        given = {name: value for name, value in names.items() if value is not None}
        return replace(SIZES[self.size], **given)

    @model_validator(mode="after")
    def _blocks_are_equal(self) -> DreamerConfig:
        size = self.widths()
        if size.deter % size.blocks:
            raise ValueError(
                f"deter_size must be a multiple of recurrent_blocks ({size.blocks}), "
                f"got {size.deter}"
            )
        return self

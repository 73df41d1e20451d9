"""Settings of GAIL."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from rl_training.algorithms.gail.losses import RewardForm
from rl_training.algorithms.ppo import PPOConfig
from rl_training.validation import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Sizes,
    never,
)


class GAILConfig(PPOConfig):
    """Settings of GAIL: PPO's, and those of the discriminator."""

    varying: ClassVar[frozenset[str]] = frozenset(
        {"discriminator_learning_rate", "gradient_penalty"}
    )

    reward_form: RewardForm = "airl"
    """`softplus` is -log(1 - D) >= 0, `log_d` is log D <= 0, `airl` is log D - log(1 - D),
    `conditional` is `airl` minus its mean over the policy's actions in the same state."""
    discriminator_learning_rate: PositiveFloat = 3e-4
    """Learning rate of the discriminator."""
    discriminator_adam_epsilon: PositiveFloat = 1e-8
    """`adam_epsilon` of the discriminator."""
    discriminator_updates: PositiveInt = 8
    """Discriminator steps per rollout."""
    discriminator_batch_size: PositiveInt = 256
    """Expert pairs, and the same number of policy pairs, per discriminator step and seed."""
    discriminator_hidden_sizes: Sizes = (64, 64)
    """Widths of the discriminator's hidden layers for vector observations."""
    discriminator_features_dim: PositiveInt | None = 256
    """Width of the layer after the discriminator's own convolutions; null has none."""
    discriminator_head_hidden_sizes: Sizes = (64,)
    """Hidden layers between an image's features with the action and the logit; without any, the
    contributions of state and action only add up."""
    discriminator_rollouts: PositiveInt = 1
    """Number of recent rollouts that the policy's pairs are drawn from; 1 is the current one
    alone."""
    normalize_discriminator_obs: bool = True
    """Standardise its observations by running statistics of both sides; images are only scaled."""
    gradient_penalty: NonNegativeFloat = 0.0
    """Weight of the penalty on the logit's gradient between expert and policy, at the features
    for images; 0 has none."""
    gradient_penalty_norm: NonNegativeFloat = 1.0
    """Norm that the penalty pulls the gradient towards."""
    spectral_norm: bool = False
    """Divide each weight of the discriminator's MLP by its largest singular value."""
    label_smoothing: Fraction = 0.0
    """Expert pairs are labelled 1 minus this; 0 does not smooth."""
    normalize_rewards: Annotated[
        bool,
        Field(json_schema_extra={"const": False}),
        never(
            "GAIL does not learn from the task's rewards; set normalize_reward, "
            "which scales the discriminator's"
        ),
    ] = False
    """Of the task, which GAIL does not learn from; the discriminator's are `normalize_reward`."""
    normalize_reward: bool = False
    """Divide rewards by their running standard deviation; their sign stays."""
    absorbing_states: bool = False
    """Continue after a termination in an absorbing state, whose reward is learned too."""
    bc_warmup_updates: NonNegativeInt = 0
    """Steps of behaviour cloning before the first rollout; 0 skips it."""
    bc_warmup_learning_rate: PositiveFloat = 1e-3
    """Adam learning rate of that cloning."""

    @property
    def discriminator_features(self) -> tuple[int, ...]:
        """Widths of the layers that belong to the discriminator's features of an image."""
        width = self.discriminator_features_dim
        return () if width is None else (width,)

    @model_validator(mode="after")
    def _absorbing_states_end(self) -> GAILConfig:
        if self.absorbing_states and self.gamma == 1:
            raise ValueError("absorbing_states needs gamma < 1: what comes after has no end")
        if self.absorbing_states and self.reward_form == "conditional":
            raise ValueError(
                "reward_form conditional pays for actions alone and there are none in absorbing "
                "states; leave absorbing_states out, or take reward_form airl"
            )
        return self

"""Settings of the dynamics ensemble, and how it is built for a task."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rl_training.algorithms.dynamics.loss import BETA
from rl_training.envs.spec import EnvSpec
from rl_training.errors import SpecMismatch
from rl_training.models.mlp_mopo import WEIGHT_DECAY, MLPMOPOEnsembleModel
from rl_training.rng import Rng
from rl_training.validation import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from rl_training.validation import Sizes as LayerSizes

Decays = Annotated[
    tuple[NonNegativeFloat, ...],
    Field(min_length=1),
    BeforeValidator(
        lambda value: tuple(value) if isinstance(value, list) else value,
        json_schema_input_type=Annotated[list[NonNegativeFloat], Field(min_length=1)],
    ),
]

Entries = Annotated[
    tuple[NonNegativeInt, ...],
    BeforeValidator(
        lambda value: tuple(value) if isinstance(value, list) else value,
        json_schema_input_type=list[NonNegativeInt],
    ),
]
"""Numbers of entries of the observation, from 0."""


class EnsembleConfig(Settings):
    """Settings of the dynamics ensemble."""

    model_hidden_sizes: LayerSizes = (200, 200, 200, 200)
    """Widths of the hidden layers of each member."""
    num_ensembles: PositiveInt = 7
    """Members of the ensemble."""
    model_learning_rate: PositiveFloat = 1e-3
    """Step size of the ensemble."""
    model_weight_decay: Decays = WEIGHT_DECAY
    """L2 penalty of each layer's weights; stretched to the number of layers where that differs."""
    model_nll_beta: Fraction = BETA
    """Exponent of the predicted variance that weighs errors of the mean; 0 is the likelihood, 1
    least squares."""
    model_learn_logvar_bounds: bool = True
    """Learn the bounds of the log-variance of standardised targets; false keeps -10 and 0.5."""
    model_learn_terminations: bool = False
    """Learn when episodes end, for tasks whose termination function is not known."""
    model_learn_reward: bool = True
    """Learn the reward; false needs a known `reward_function`."""
    model_angles: Entries = ()
    """Entries of the observation that the model sees as sine and cosine."""
    model_hidden: Entries = ()
    """Entries of the observation that the model does not see, such as the place of a runner."""
    model_no_delta: Entries = ()
    """Entries of the observation whose next value is predicted in place of their change."""


class DynamicsConfig(EnsembleConfig):
    """Settings of the dynamics ensemble and of fitting it."""

    num_elites: PositiveInt | None = None
    """Members of least hold-out error that roll-outs draw from; null is 5, or all of fewer."""
    model_batch_size: PositiveInt = 256
    """Transitions per gradient step and member."""
    model_bootstrap: Literal["replacement", "shuffle"] = "replacement"
    """`replacement` gives each member rows drawn with replacement once per fit, `shuffle` all rows
    in an order of its own."""
    model_holdout_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the rows held out from fitting, to stop and to choose elites by."""
    model_holdout_max: PositiveInt = 5_000
    """Most rows held out."""
    model_patience: PositiveInt = 5
    """Epochs without a gain in hold-out error after which a fit ends."""
    model_patience_updates: PositiveInt = 300
    """Gradient steps without a gain that a fit waits for as well: few rows make short epochs."""
    model_min_improvement: Fraction = 0.01
    """Least relative gain in the members' mean hold-out error for which a fit goes on."""
    model_min_gain: NonNegativeFloat = 5e-4
    """The same as a share of the targets' variance: without noise in the data, relative gains never
    end."""
    model_max_epochs: PositiveInt | None = None
    """Most epochs of one fit; null leaves it to the patience."""


def dynamics_network(env: EnvSpec, config: EnsembleConfig, rng: Rng) -> MLPMOPOEnsembleModel:
    """Build the ensemble for a task; without a hold-out set to choose by, all are elites.

    Raises:
        SpecMismatch: For discrete actions, or observations that are not vectors.
    """
    if env.action_kind != "continuous":
        raise SpecMismatch(
            f"environment {env.env_id}: the dynamics ensemble takes continuous actions, got "
            f"{env.num_actions} discrete ones; use a task with a Box of actions, or a method for "
            "discrete actions such as dqn"
        )
    if len(env.obs_shape) != 1 or env.obs_dtype == "uint8":
        raise SpecMismatch(
            f"environment {env.env_id}: the dynamics ensemble takes observations that are vectors "
            f"of numbers, got shape {env.obs_shape} of {env.obs_dtype}; remove the pixel wrapper, "
            "or flatten the observations with gymnasium.wrappers.FlattenObservation"
        )
    return MLPMOPOEnsembleModel(
        env.obs_dim,
        env.action_dim,
        config.model_hidden_sizes,
        config.num_ensembles,
        num_elites=config.num_elites
        if isinstance(config, DynamicsConfig)
        else config.num_ensembles,
        learn_logvar_bounds=config.model_learn_logvar_bounds,
        learn_terminations=config.model_learn_terminations,
        learn_reward=config.model_learn_reward,
        angles=config.model_angles,
        hidden=config.model_hidden,
        no_delta=config.model_no_delta,
        weight_decay=config.model_weight_decay,
        rng=rng,
    )

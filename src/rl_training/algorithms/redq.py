"""REDQ: Randomized Ensembled Double Q-learning (Chen et al., 2021, arXiv:2101.05982).

SAC with ten critics and twenty updates per environment step.  Targets take the least of two target
critics, drawn at random for each update, which holds the bias of so many updates near zero; the
actor climbs the mean of all critics, once per environment step (Algorithm 1).

Overrides: actor_delay; everything else is settings of SAC.
Deviations: the actor's loss is taken after the critics' step of the same update, as in every
    actor-critic here, in the authors' code before it; `target_entropy: null` means -A, the authors
    have a number per task, which the presets name.
"""

from __future__ import annotations

from typing import Literal

from rl_training.algorithms.sac import ACTOR_METRICS, DELAYED_METRICS, SAC, SACConfig, sac_networks
from rl_training.algorithms.sources import TransitionReplay
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.models.layers import WeightsName
from rl_training.validation import NonNegativeInt, PositiveInt


class REDQConfig(SACConfig):
    """Settings of REDQ; defaults are those of the authors' code."""

    learning_starts: NonNegativeInt = 5_000
    """Steps of uniformly random actions before the first update."""
    gradient_updates_per_step: PositiveInt = 20
    """Updates of the critics per round, the last of which moves the actor and the temperature."""
    num_critics: PositiveInt = 10
    """Members of the critic ensemble."""
    num_target_critics: PositiveInt | None = 2
    """Target critics, drawn at random for each update, whose minimum is the target; null takes
    all of them."""
    actor_q: Literal["min", "mean"] = "mean"
    """What the actor maximises: the minimum of the critics, or their mean."""
    weight_init: WeightsName = "glorot"
    """How initial weights are drawn: `uniform` is PyTorch's own, `orthogonal` that of many JAX
    codes, `glorot` that of the authors; the last two have zero biases."""


class REDQ(SAC):
    """SAC with an ensemble of critics and many updates per step."""

    config_class = REDQConfig
    actor_metrics = ACTOR_METRICS

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per round: the actor moves in the last."""
        return self.part(TransitionReplay).gradient_updates_per_step


SPEC = AlgorithmSpec(
    name="redq",
    title="Randomized Ensembled Double Q-Learning",
    paper="arXiv:2101.05982",
    summary="off-policy; SAC with an ensemble and many updates a step; continuous actions",
    learner=REDQ,
    networks=sac_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    obs_ndims=(1, 3),
    metrics=DELAYED_METRICS,
)

"""RLPD: Reinforcement Learning with Prior Data (Ball et al., 2023, arXiv:2302.02948).

SAC that has recorded data at hand: half of every batch comes from it and half from the run's own
experience (symmetric sampling, Sec. 4.1).  Critics are an ensemble with layer normalisation, which
bounds what they say about unseen actions (Sec. 4.2), and learn many times per environment step
against the least of a random subset of their targets (Sec. 4.3, Algorithm 1).

Deviations: each update draws its own batch, where the authors draw one large batch per environment
    step and slice it: rows are drawn with replacement either way; weights start from the package's
    uniform distribution, not Glorot's; the temperature's loss is SAC's, linear in log(alpha), the
    authors' is linear in alpha.  Updates of `offline_pretrain_updates` (0 in the paper) are
    made on prior rows alone and count as updates of the critics.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.sac import (
    ACTOR_METRICS,
    DELAYED_METRICS,
    SAC,
    SACConfig,
    sac_loss,
    sac_networks,
)
from rl_training.algorithms.sources import PriorSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop, Phase
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPSACModel
from rl_training.validation import NonNegativeInt, Number, PositiveInt

PRETRAINING = 2
"""Added to the phase while only prior rows are drawn: such batches are not compiled for."""


class RLPDConfig(SACConfig):
    """Settings of RLPD; defaults are the paper's for locomotion."""

    learning_starts: NonNegativeInt = 5_000
    """Steps of uniformly random actions before the first update on own experience."""
    gradient_updates_per_step: PositiveInt = 20
    """Updates of the critics per round, the last of which moves the actor and the temperature."""
    num_critics: PositiveInt = 10
    """Members of the critic ensemble."""
    num_target_critics: PositiveInt | None = 2
    """Target critics, drawn at random for each update, whose minimum is the target; null takes
    all of them (Algorithm 1, lines 8 to 12)."""
    actor_q: Literal["min", "mean"] = "mean"
    """What the actor maximises: the least critic, or the mean of all (Algorithm 1, line 16)."""
    use_layer_norm: bool = True
    """Normalise the critics' hidden layers."""
    backup_entropy: bool = True
    """Keep SAC's entropy term in the target; the paper drops it where rewards are sparse."""
    target_entropy: Number | None = None
    """Entropy a learned temperature aims at; null means -A/2."""


class RLPD(SAC):
    """SAC with prior data, a normalised ensemble and many updates per step."""

    config_class = RLPDConfig
    parts = (LearningRate, PriorSettings)
    config: RLPDConfig
    model: MLPSACModel
    actor_metrics = ACTOR_METRICS
    entropy_per_entry = -0.5  # App. C

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per round: the actor moves in the last."""
        return self.config.gradient_updates_per_step

    @property
    def is_pretraining(self) -> bool:
        """Whether the next update is made before there is any own experience."""
        return self.num_updates.value < self.part(PriorSettings).offline_pretrain_updates

    def moves_actor(self) -> bool:
        """Whether the next update ends a round; the count starts again after pretraining."""
        before = self.part(PriorSettings).offline_pretrain_updates
        first = 0 if self.is_pretraining else before
        return (self.num_updates.value - first + 1) % self.actor_delay == 0

    def phase(self) -> int:
        """Tell whether the next update ends a round, and whether it is one of pretraining."""
        return super().phase() + (PRETRAINING if self.is_pretraining else 0)

    def next_value(self, q: Tensor, entropy_term: Tensor) -> Tensor:
        """Least of the drawn target critics (Algorithm 1, lines 9 to 12)."""
        value = q.amin(1)
        return value + entropy_term if self.config.backup_entropy else value


def rlpd_loss(learner: RLPD, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute RLPD's losses and metrics at the current parameters without changing them."""
    return sac_loss(learner, learner.normalized(batch))


SPEC = AlgorithmSpec(
    name="rlpd",
    title="RL with Prior Data",
    paper="arXiv:2302.02948",
    summary="off-policy; SAC on recorded data and own experience at once; continuous actions",
    learner=RLPD,
    networks=sac_networks,
    loop=Loop.OFF_POLICY,
    phases=(Phase.PRIOR_DATA,),
    action_kinds=("continuous",),
    metrics=DELAYED_METRICS
    | {"entropy_term": "mean of -alpha log pi(a'|s'), in the target with `backup_entropy`"},
)

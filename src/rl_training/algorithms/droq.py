"""DroQ: dropout Q-functions for doubly efficient RL (Hiraoka et al., 2022, arXiv:2110.02034).

REDQ with two critics in place of ten: dropout and layer normalisation in the critics make of each a
whole ensemble (Sec. 3.2).  Every evaluation of a critic in an update drops units of its own, the
target critics' among them (Algorithm 2): in the target, in the TD error, in the actor's loss.

Overrides: actor_delay, td_target, critic_loss, actor_loss.
Deviations: the actor's step takes the last batch of its round, after the critics have moved and
    before their targets do; the authors draw a batch for it.  `target_entropy: null` means -A, the
    authors have a number per task, which the presets name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import Loss
from rl_training.algorithms.sac import ACTOR_METRICS, DELAYED_METRICS, SAC, SACConfig, sac_networks
from rl_training.algorithms.sources import TransitionReplay
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.layers import WeightsName, dropout
from rl_training.validation import NonNegativeInt, PositiveInt


class DroQConfig(SACConfig):
    """Settings of DroQ; defaults are those of the authors' code."""

    critic_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the critics' hidden outputs that are dropped in an update; 0 drops none."""
    use_layer_norm: bool = True
    """Normalise the critics' hidden layers, after the dropout."""
    learning_starts: NonNegativeInt = 5_000
    """Steps of uniformly random actions before the first update."""
    gradient_updates_per_step: PositiveInt = 20
    """Updates of the critics per round, the last of which moves the actor and the temperature."""
    actor_q: Literal["min", "mean"] = "mean"
    """What the actor maximises: the minimum of the critics, or their mean."""
    weight_init: WeightsName = "glorot"
    """How initial weights are drawn: `uniform` is PyTorch's own, `orthogonal` that of many JAX
    codes, `glorot` that of the authors; the last two have zero biases."""


class DroQ(SAC):
    """SAC with dropout in normalised critics and many updates per step."""

    config_class = DroQConfig
    config: DroQConfig
    actor_metrics = ACTOR_METRICS

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per round: the actor moves in the last."""
        return self.part(TransitionReplay).gradient_updates_per_step

    def dropping(self, critic: nn.Module, batch: TransitionBatch) -> AbstractContextManager[None]:
        """Let critics drop units, drawn now, while they are shown a batch."""
        return dropout(critic, self.config.critic_dropout, batch.obs.shape[1], self.rng)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """SAC's target by critics that drop units (Algorithm 2)."""
        with self.dropping(self.target_critic, batch):
            return super().td_target(batch)

    def critic_loss(
        self, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """SAC's loss of critics that drop units."""
        with self.dropping(self.model.critic, batch):
            return super().critic_loss(batch, target)

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """SAC's loss by the mean of critics that drop units."""
        with self.dropping(self.model.critic, batch):
            return super().actor_loss(batch)


SPEC = AlgorithmSpec(
    name="droq",
    title="Dropout Q-Functions",
    paper="arXiv:2110.02034",
    summary="off-policy; SAC with dropout in critics, many updates a step; continuous actions",
    learner=DroQ,
    networks=sac_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    obs_ndims=(1, 3),
    metrics=DELAYED_METRICS,
)

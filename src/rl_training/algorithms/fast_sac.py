"""FastSAC (Seo et al., 2025, arXiv:2512.01996): SAC for thousands of parallel environments.

What FastTD3 did for TD3: many environments, large batches, a few updates per step of all of them,
critics that predict a distribution of the return, targets that follow quickly.  Beside these, layer
normalisation in all networks, a policy whose deviation stays between e^-5 and 1, a small
temperature that aims at an entropy of 0, and the mean of the critics in place of the least.

Overrides: td_target, critic_loss, actor_delay, return_statistics.
Deviations, each from the authors' code: the temperature moves with the actor, by the entropy at s,
    there in every update, by that at s', with a loss that is linear in log(alpha), there in alpha,
    and by Adam with the usual betas; the policy's last layer has small weights at first, there
    zeros; actions fill [-1, 1], there the joints' limits; and those of FastTD3 in batches,
    statistics, precision and replay.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.actor_critic import Loss, networks_of
from rl_training.algorithms.categorical import (
    CategoricalSettings,
    Return,
    bellman_atoms,
    categorical_loss,
    categorical_target,
)
from rl_training.algorithms.config import LearningRate, OptimizerChoice, OptimizerSettings
from rl_training.algorithms.fast_td3 import FastReplay
from rl_training.algorithms.sac import ACTOR_METRICS, DELAYED_METRICS, SAC, SACConfig
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.data.normalizer import BoundedReturnScale, ReturnScale
from rl_training.models.categorical_critics import MLPFastSACModel
from rl_training.models.layers import ActivationName
from rl_training.validation import Discount, Fraction, Number, PositiveFloat, PositiveInt, Sizes


class FastSACConfig(SACConfig):
    """Settings of FastSAC; defaults are those of the authors' code."""

    gamma: Discount = 0.97
    """Discount per environment step."""
    batch_size: PositiveInt = 8_192
    """Transitions per gradient step and seed."""
    gradient_updates_per_step: PositiveInt = 8
    """Updates per round; a round is every `train_frequency` steps."""
    policy_delay: PositiveInt = 4
    """Critic updates per update of the policy and the temperature."""
    v_min: Return = -20.0
    """Return of the first atom; smaller ones count as this."""
    v_max: Return = 20.0
    """Return of the last atom; larger ones count as this. `beyond_atoms` tells whether the range
    is too small."""
    use_cdq: bool = False
    """Clipped double Q: all critics learn the target of the one that expects least; otherwise each
    learns its own."""
    actor_q: Literal["min", "mean"] = "mean"
    """What the actor maximises: the minimum of the critics, or their mean."""
    num_target_critics: None = None
    """Always null: targets are made of all critics."""
    initial_alpha: PositiveFloat = Field(default=0.001)
    """Start of a learned temperature."""
    target_entropy: Number | None = 0.0
    """Entropy a learned temperature aims at; null means -A, one nat below uniform per dimension."""
    actor_hidden_sizes: Sizes | None = (512, 256, 128)
    """Widths of the actor's hidden layers; null uses `hidden_sizes`."""
    critic_hidden_sizes: Sizes | None = (768, 384, 192)
    """Widths of the hidden layers of the critics; null uses `hidden_sizes`."""
    activation: ActivationName = "silu"
    """What follows each hidden layer of actor and critics."""
    use_layer_norm: bool = True
    """Normalise the hidden layers of actor and critics."""
    tau: Fraction = 0.125
    """Share of the critics that moves into their targets at each update; 1 copies them."""
    optimizer: OptimizerChoice = Field(
        default=OptimizerSettings(type="adamw", weight_decay=0.001, betas=(0.9, 0.95))
    )
    """Optimizer of the networks: a name, or a mapping `{type: sgd, momentum: 0.9}`; a temperature
    and other single numbers always have Adam, with the usual betas."""


class FastSAC(SAC):
    """SAC with categorical critics, for many environments."""

    config_class = FastSACConfig
    parts = (CategoricalSettings, LearningRate, FastReplay)
    config: FastSACConfig
    model: MLPFastSACModel
    actor_metrics = ACTOR_METRICS

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per update of the policy and the temperature."""
        return self.config.policy_delay

    def return_statistics(self) -> ReturnScale:
        """Create what scales rewards: by G's deviation, or by max |G| / the atoms' nearer end."""
        reach = self.part(CategoricalSettings).reach
        return BoundedReturnScale(self.num_seeds, self.device, reach)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Distribution `[S, 1 or N, B, K]` of r + discount (Z(s', a') - alpha log pi(a'|s'))."""
        action, log_prob = self.sample_action(batch.next_obs)
        log_probs = self.model.value_log_probs(batch.next_obs, action, self.target_critic)
        entropy_term = self.entropy_term(log_prob)
        moved = bellman_atoms(self.model, batch, entropy_term)
        cdq = self.config.use_cdq
        target, metrics = categorical_target(self.model, moved, log_probs, use_cdq=cdq)
        return target, metrics | {"entropy_term": entropy_term}

    def critic_loss(
        self, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Cross-entropy to the target, summed over critics; also the error of the means."""
        return categorical_loss(self.model, batch, target)


SPEC = AlgorithmSpec(
    name="fast_sac",
    title="FastSAC",
    paper="arXiv:2512.01996",
    summary="off-policy; SAC for many environments, categorical critics; continuous actions",
    learner=FastSAC,
    networks=networks_of(MLPFastSACModel, "num_atoms", "v_min", "v_max"),
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    metrics=DELAYED_METRICS
    | {
        "critic_loss": "cross-entropy to the target's distribution, summed over critics",
        "target_q_mean": "mean of the target's distribution",
        "beyond_atoms": "probability that the target would give returns beyond the atoms",
    },
)

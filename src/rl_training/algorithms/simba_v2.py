"""SimbaV2 (Lee et al., 2025, arXiv:2502.15280).

SAC whose networks keep features and weights on the unit hypersphere, so that neither grows during a
run; critics that predict a distribution of the return over fixed atoms; rewards scaled so that
returns stay among these.

Overrides: td_target, critic_loss, improve, return_statistics.
Deviations: critics move before policy and temperature, as in every actor-critic here, where the
    authors' code moves the policy first; the temperature's loss is linear in log(alpha), as SAC's
    is here; one setting, `num_critics: 1`, is their `use_cdq: false` for tasks that never
    terminate.  Standardised observations are clipped to +-10 deviations, which they are not there.
    `gamma` is a setting, 0.99 unless a preset says otherwise; the authors derive it from the length
    of episodes, min(1 - 5 / T, 0.995).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.actor_critic import Loss, networks_of
from rl_training.algorithms.categorical import bellman_atoms, categorical_loss
from rl_training.algorithms.config import LearningRate, LRSchedule
from rl_training.algorithms.losses import categorical_projection
from rl_training.algorithms.sac import SAC, SACConfig
from rl_training.algorithms.simba import require_one_width
from rl_training.algorithms.sources import TransitionReplay
from rl_training.algorithms.spec import VECTOR_LEAVES, AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.data.normalizer import BoundedReturnScale, ReturnScale
from rl_training.models.hypersphere import SimbaV2Model, project
from rl_training.models.layers import chosen_members
from rl_training.validation import (
    NonNegativeInt,
    Number,
    PositiveFloat,
    Sizes,
    Whole,
    never,
)


class SimbaV2Config(SACConfig):
    """Settings of SimbaV2."""

    learning_rate: PositiveFloat = 1e-4
    """Learning rate of the critics, and of the actor unless it has its own."""
    lr_schedule: LRSchedule = Field(default=LRSchedule(type="linear", end=0.5))
    """Schedule of every learning rate."""
    learning_starts: NonNegativeInt = 5_000
    """Steps of uniformly random actions before the first update."""
    normalize_observations: bool = True
    """Standardise observations by the running mean and deviation of all observations so far;
    the replay keeps raw ones, and the statistics are in the checkpoint."""
    normalize_rewards: bool = True
    """Divide rewards by the running deviation of the discounted return, or by more, so that the
    largest return seen stays within `value_range`; returns are reported without it."""
    hidden_sizes: Sizes = (512, 512)
    """Width of the critics' blocks, one number for each, all the same."""
    actor_hidden_sizes: Sizes | None = (128,)
    """Width of the actor's blocks, one number for each, all the same."""
    num_bins: Annotated[int, Field(ge=2, le=10_001), Whole] = 101
    """Atoms of a return's distribution."""
    value_range: PositiveFloat = 5.0
    """Largest return that the atoms reach, after rewards are scaled."""
    initial_alpha: PositiveFloat = Field(default=0.01)
    """Start of a learned temperature."""
    target_entropy: Number | None = None
    """Entropy a learned temperature aims at; null means -A/2."""
    # What the blocks are made of is the method.
    activation: Literal["relu"] = "relu"
    """What follows the hidden layer of each block."""
    encoder: None = None
    """Always null: observations are put on the sphere as they are."""
    features_dim: None = None
    """Always null: there are no convolutions."""
    use_layer_norm: Annotated[
        bool, Field(json_schema_extra={"const": False}), never("features have norm 1 already")
    ] = False
    """Always false: features have norm 1."""
    weight_init: Literal["orthogonal"] = "orthogonal"
    """How initial weights are drawn, before their columns are scaled to norm 1."""

    @model_validator(mode="after")
    def _blocks_have_one_width(self) -> SimbaV2Config:
        require_one_width(self)
        return self


class SimbaV2(SAC):
    """SAC on the hypersphere, with categorical critics."""

    config_class = SimbaV2Config
    parts = (LearningRate, TransitionReplay)
    config: SimbaV2Config
    model: SimbaV2Model

    def return_statistics(self) -> ReturnScale:
        """Create what scales rewards: by G's deviation or max |G| / range (Eq. 17)."""
        return BoundedReturnScale(self.num_seeds, self.device, self.config.value_range)

    entropy_per_entry = -0.5

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Return the distribution `[S, B, K]` of the soft Bellman target, on the atoms.

        `r + discount (Z - alpha log pi(a'|s'))` with Z the return by the target critic that expects
        least (clipped double Q), projected (Sec. 4.4).
        """
        action, log_prob = self.sample_action(batch.next_obs)
        log_probs = self.model.value_log_probs(batch.next_obs, action, self.target_critic)
        log_probs = chosen_members(log_probs, self.target_members())  # [S, N, B, K]
        least = self.model.expected(log_probs).argmin(1, keepdim=True)  # [S, 1, B]
        index = least.unsqueeze(-1).expand(-1, -1, -1, log_probs.shape[-1])
        of_least = log_probs.gather(1, index).squeeze(1).exp()  # [S, B, K]
        entropy_term = self.entropy_term(log_prob)
        moved = bellman_atoms(self.model, batch, entropy_term)
        target = categorical_projection(moved, of_least, self.model.atoms)
        mean = (target * self.model.atoms).sum(-1)
        return target, {"target_q_mean": mean, "entropy_term": entropy_term}

    def critic_loss(
        self, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Cross-entropy to the target, summed over critics; also the error of the means `[S, B]`.

        Args:
            batch: Transitions.
            target: Probabilities of the atoms, `[S, B, K]`.
        """
        return categorical_loss(self.model, batch, target.unsqueeze(1))

    def improve(self, batch: TransitionBatch, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move actor and temperature; each network returns to the sphere after its step (Eq. 7)."""
        project(self.model.critic)
        metrics = super().improve(batch, measured)
        project(self.model.actor)
        return metrics


SPEC = AlgorithmSpec(
    name="simba_v2",
    title="SimbaV2",
    paper="arXiv:2502.15280",
    summary="off-policy; SAC with networks on the hypersphere; continuous actions",
    learner=SimbaV2,
    networks=networks_of(SimbaV2Model, "num_bins", "value_range"),
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    leaf_kinds=VECTOR_LEAVES,
    metrics={
        "critic_loss": "cross-entropy to the target's distribution, summed over critics",
        "actor_loss": "alpha log pi - Q (see `actor_q`)",
        "target_q_mean": "mean of the target's distribution, of scaled rewards",
        "entropy_term": "mean of -alpha log pi(a'|s') in the target",
        "q_mean": "mean of that Q at the policy's actions, of scaled rewards",
        "alpha": "temperature",
        "entropy": "policy entropy, estimated on the batch",
    },
)

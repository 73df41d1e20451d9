"""FastTD3 (Seo et al., 2025, arXiv:2505.22642): TD3 for hundreds of parallel environments.

A few updates per step of all environments, each on a very large batch; critics that predict a
distribution of the return over fixed atoms, where clipped double Q takes the distribution with the
lesser mean; targets that follow quickly; and exploration by noise whose deviation each environment
draws for each episode, so that careful and wild behaviour are in the replay side by side.

Overrides: td_target, critic_loss, policy_value, update_targets, exploring, return_statistics.
Deviations, each from the authors' code: actions that explore are clipped to [-1, 1] before they are
    stored; batches are drawn from all rows alike, not the same number from each environment;
    observations are standardised by all steps so far, there by sampled batches too, without their
    0.01 added to deviations, and clipped to +-10; single precision unless `precision` says
    otherwise, there bfloat16; the replay holds 1,000,000 transitions, there 51,200 of each
    environment.  Asymmetric observations, several tasks and SimNorm layers are not here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.actor_critic import ActorCritic, Loss, networks_of
from rl_training.algorithms.base import ActingState
from rl_training.algorithms.categorical import (
    CategoricalSettings,
    bellman_atoms,
    categorical_loss,
    categorical_target,
)
from rl_training.algorithms.config import LearningRate, OptimizerChoice, OptimizerSettings
from rl_training.algorithms.sources import TransitionReplay
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.td3 import TD3, TD3Config
from rl_training.data.batch import TransitionBatch
from rl_training.data.normalizer import BoundedReturnScale, ReturnScale
from rl_training.models.categorical_critics import MLPFastTD3Model
from rl_training.validation import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Sizes


class FastTD3Config(TD3Config):
    """Settings of FastTD3; defaults are those of the authors' code for HumanoidBench."""

    varying: ClassVar[frozenset[str]] = frozenset({"exploration_noise_min"})

    policy_noise: NonNegativeFloat = 0.001
    """Deviation of the noise on the policy's actions in targets."""
    policy_delay: PositiveInt = 2
    """Critic updates per update of the policy; target critics move in every one."""
    exploration_noise: NonNegativeFloat = 0.4
    """Largest deviation of the noise on actions that explore, in learner units."""
    exploration_noise_min: NonNegativeFloat = 0.001
    """Smallest deviation of that noise. Each environment draws its own between the two, uniformly,
    at the start of each episode; equal ones give TD3's noise."""
    actor_hidden_sizes: Sizes | None = (512, 256, 128)
    """Widths of the actor's hidden layers; null uses `hidden_sizes`."""
    critic_hidden_sizes: Sizes | None = (1024, 512, 256)
    """Widths of the hidden layers of the critics; null uses `hidden_sizes`."""
    tau: Fraction = 0.1
    """Share of the critics that moves into their targets at each update; 1 copies them."""
    optimizer: OptimizerChoice = Field(default=OptimizerSettings(type="adamw", weight_decay=0.1))
    """Optimizer of the networks: a name, or a mapping `{type: sgd, momentum: 0.9}`."""

    @model_validator(mode="after")
    def _noise_is_an_interval(self) -> FastTD3Config:
        if self.exploration_noise_min > self.exploration_noise:
            raise ValueError(
                f"exploration_noise_min must be <= exploration_noise ({self.exploration_noise:g}), "
                f"got {self.exploration_noise_min:g}"
            )
        return self


class FastReplay(TransitionReplay):
    """How experience of many environments is kept and paced; defaults are for 128 of them."""

    batch_size: PositiveInt = 32_768
    """Transitions per gradient step and seed."""
    learning_starts: NonNegativeInt = 1_280
    """Steps before the first update, by the policy with its noise."""
    train_frequency: PositiveInt = 128
    """Environment steps between two rounds of updates; with as many as `num_envs` a round follows
    every step of all environments."""
    gradient_updates_per_step: PositiveInt = 2
    """Updates per round; a round is every `train_frequency` steps."""
    normalize_observations: bool = True
    """Standardise observations by the running mean and deviation of all observations so far;
    the replay keeps raw ones, and the statistics are in the checkpoint."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of the discounted return, or by more, so that the
    largest return seen stays between the atoms; returns are reported without it."""

    @property
    def random_steps(self) -> int:
        """None: the policy's own noise explores from the beginning."""
        return 0


class ExplorationNoise(ActingState):
    """The deviation of each environment's noise, `[S, n]`; 0 where none was drawn yet."""

    def __init__(self, deviation: Tensor) -> None:
        self.deviation = deviation


class FastTD3(TD3):
    """TD3 with categorical critics and noise of many sizes."""

    config_class = FastTD3Config
    parts = (CategoricalSettings, LearningRate, FastReplay)
    config: FastTD3Config
    model: MLPFastTD3Model
    has_target_actor: ClassVar[bool] = False

    def return_statistics(self) -> ReturnScale:
        """Create what scales rewards: by G's deviation, or by max |G| / the atoms' nearer end."""
        return BoundedReturnScale(self.num_seeds, self.device, self.atoms.reach)

    @property
    def atoms(self) -> CategoricalSettings:
        """The settings of the critics' atoms."""
        return self.part(CategoricalSettings)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Distribution `[S, 1 or N, B, K]` of r + discount Z(s', a'), on the atoms.

        a' is the policy's with clipped noise, Z that of the target critic whose target has the
        least mean (`use_cdq`).
        """
        action = self.smoothed_action(batch.next_obs)
        log_probs = self.model.value_log_probs(batch.next_obs, action, self.target_critic)
        moved = bellman_atoms(self.model, batch)
        return categorical_target(self.model, moved, log_probs, use_cdq=self.atoms.use_cdq)

    def critic_loss(
        self, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Cross-entropy to the target, summed over critics; also the error of the means."""
        return categorical_loss(self.model, batch, target)

    def policy_value(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return pi(s) `[S, B, A]` and Q `[S, B]`: the least of the critics, or their mean."""
        action = self.model.policy(obs)
        q = self.model.q_values(obs, action)  # [S, N, B]
        return action, q.amin(1) if self.atoms.use_cdq else q.mean(1)

    def update_targets(self) -> None:
        """Move the target critics in every update; there is no target policy."""
        ActorCritic.update_targets(self)

    # Exploring

    def exploring_state(self, num_envs: int) -> ExplorationNoise:
        """Return what remembers the deviations of the episodes in progress; none is drawn yet."""
        return ExplorationNoise(torch.zeros(self.num_seeds, num_envs, device=self.device))

    def draw_deviation(self, num_envs: int) -> Tensor:
        """Draw deviations `[S, n]` uniformly between the smallest and the largest."""
        low, high = (self.setting(f"exploration_noise{end}", 2) for end in ("_min", ""))
        return low + (high - low) * self.rng.uniform(num_envs)

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Return the policy's action, with noise of newly drawn deviations when exploring."""
        action = self.model.policy(obs)
        if not explore:
            return action
        return self.explored(action, self.draw_deviation(obs.shape[1]).unsqueeze(-1))

    def act_from(self, state: ActingState | None, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose actions like `act`; with a state, an episode keeps the deviation of its start."""
        if state is None or not explore:
            return super().act_from(None, obs, explore=explore)
        assert isinstance(state, ExplorationNoise)
        # Drawn in every step, so that one program serves them all; used where an episode begins.
        drawn = self.draw_deviation(obs.shape[1])
        state.deviation.copy_(torch.where(state.deviation > 0, state.deviation, drawn))
        return self.explored(
            self.model.policy(self.shown(None, obs)), state.deviation.unsqueeze(-1)
        )


SPEC = AlgorithmSpec(
    name="fast_td3",
    title="FastTD3",
    paper="arXiv:2505.22642",
    summary="off-policy; TD3 for many environments, categorical critics; continuous actions",
    learner=FastTD3,
    networks=networks_of(MLPFastTD3Model, "num_atoms", "v_min", "v_max"),
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    metrics={
        "critic_loss": "cross-entropy to the target's distribution, summed over critics",
        "actor_loss": "-Q at the policy's actions (see `use_cdq`), at the last actor step",
        "target_q_mean": "mean of the target's distribution",
        "beyond_atoms": "probability that the target would give returns beyond the atoms",
    },
)

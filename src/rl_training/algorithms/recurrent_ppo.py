"""Recurrent PPO: policy and value read what a recurrent layer remembers of the episode.

For tasks whose observations tell too little (Hausknecht and Stone, 2015, arXiv:1507.06527, who put
such a layer into DQN; Ni et al., 2022, arXiv:2110.05038, on what matters in the actor-critic).
A rollout is cut into sequences.  Each begins with the memory that the policy had there when it
acted, and gradients go back to the sequence's beginning: truncated backpropagation through time.

Deviations from PPO, which has one row per step: a minibatch is whole sequences, and within one
update the memory at a sequence's beginning stays that of the rollout's policy.  The value of a
successor is read from the memory after the observation before it, as in the episode itself, also
where a time limit ended it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from pydantic import model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Remembered
from rl_training.algorithms.pixel_config import PixelConfig, shared_encoder
from rl_training.algorithms.ppo import PPO, Minibatch, PPOConfig, network_options
from rl_training.algorithms.ppo import SPEC as PPO_SPEC
from rl_training.algorithms.sources import RolloutSettings
from rl_training.data.batch import RolloutBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.memory import MemoryName
from rl_training.models.recurrent_actor_critic import RecurrentActorCriticModel
from rl_training.rng import Rng
from rl_training.validation import PositiveInt, Settings


class RecurrentPPOConfig(PPOConfig):
    """Settings of recurrent PPO."""

    memory: MemoryName = "lstm"
    """The recurrent layer: `lstm`, or `gru`, which has three quarters of its weights."""
    memory_size: PositiveInt = 128
    """Outputs of the recurrent layer."""


class SequenceRollouts(RolloutSettings):
    """How rollouts are gathered and cut into sequences."""

    sequence_length: PositiveInt | None = None
    """Steps of a sequence, over which gradients flow back; null, or at least the rollout's
    steps, takes whole rollouts."""

    @model_validator(mode="after")
    def _sequences_fit(self) -> SequenceRollouts:
        length = self.sequence_steps
        if self.num_steps % length:
            raise ValueError(
                f"sequence_length must divide num_steps ({self.num_steps}), got {length}; null "
                "takes whole rollouts"
            )
        if length > self.minibatch_size:
            raise ValueError(
                f"minibatch_size must be >= the steps of a sequence ({length}), got "
                f"{self.minibatch_size}; a shorter sequence_length will do as well"
            )
        return self

    @property
    def sequence_steps(self) -> int:
        """Steps of a sequence."""
        return min(self.sequence_length or self.num_steps, self.num_steps)


@dataclass(frozen=True)
class Sequences(Minibatch):
    """Sequences of a rollout, `[S, C, L, ...]`: C of them, of L steps each."""

    is_first: Tensor
    """Where an episode begins."""
    memory: Tensor
    """Before the first step of each, `[S, C, M]`."""

    def steps(self) -> Minibatch:
        """Return all steps as rows `[S, C * L, ...]`."""
        rows = (getattr(self, field.name).flatten(1, 2) for field in fields(Minibatch))
        return Minibatch(*rows)


class RecurrentPPO(PPO):
    """PPO on sequences, by a policy and a value that remember."""

    config_class: ClassVar[type[Settings]] = RecurrentPPOConfig
    parts: ClassVar[tuple[type[Settings], ...]] = (PixelConfig, SequenceRollouts)
    config: RecurrentPPOConfig
    model: RecurrentActorCriticModel

    @property
    def row_steps(self) -> int:
        """Steps of a sequence."""
        return self.part(SequenceRollouts).sequence_steps

    @property
    def serial_steps(self) -> int:
        """Steps of a gradient step that follow one another: those of a sequence."""
        return self.row_steps

    @torch.no_grad()
    def prepare(self, batch: RolloutBatch) -> Sequences:
        """Compute what PPO computes once of a rollout, along it, and cut it into sequences."""
        model, (steps, envs) = self.model, batch.reward.shape[1:]
        obs = self.normalize(batch.obs.flatten(1, 2))
        next_obs = self.normalize(batch.next_obs.flatten(1, 2))
        start = batch.memory
        if start is None:
            start = model.memory.initial(envs, batch.reward.device)
        ended = batch.terminated | batch.truncated
        is_first = torch.cat((torch.zeros_like(ended[:, :1]), ended[:, :-1]), 1)
        # Of each environment, one sequence of the whole rollout.
        along = by_env(split(obs, 1, steps, envs))
        after = model.follow(along, start, by_env(is_first))  # [S, n, T, M]
        memory = after.transpose(1, 2).flatten(1, 2)  # [S, T * n, M], as the observations

        features = model.memory.output(memory)
        action = batch.action.flatten(1, 2)
        log_prob, _ = model.log_prob_entropy(features, action, self.allowed(obs))
        value = model.value(features)
        next_value = model.value(model.memory.output(model.remember(next_obs, memory)))
        advantage = self.advantages(batch, value, next_value)
        rows = Minibatch(obs, action, log_prob, value, advantage, advantage + value)

        length = self.row_steps

        def cut(x: Tensor) -> Tensor:
            """Return `[S, n, T, ...]` as sequences `[S, C, L, ...]`."""
            return split(x, 2, steps // length, length).flatten(1, 2)

        before = torch.cat((start.unsqueeze(2), after[:, :, :-1]), 2)
        parts = {name: cut(by_env(split(x, 1, steps, envs))) for name, x in vars(rows).items()}
        starts = cut(before)[:, :, 0]
        return Sequences(**parts, is_first=cut(by_env(is_first)), memory=starts)

    def loss(self, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective of PPO of all steps of a minibatch of sequences, `[S]`, and its parts."""
        assert isinstance(batch, Sequences)
        after = self.model.follow(batch.obs, batch.memory, batch.is_first)
        features = self.model.memory.output(after).flatten(1, 2)
        return self.objective(features, batch.steps())

    # Acting: on what is remembered of each environment

    @property
    def memory_network(self) -> RecurrentActorCriticModel:
        """The whole model."""
        return self.model

    def sample_on(self, state: Remembered, obs: Tensor, noise: Tensor) -> Tensor:
        """Take in `obs` `[S, n, ...]` and sample an action, given noise `[S, n, A]`."""
        rows = self.shown(state, obs)
        return self.model.sample(self._features(rows), noise, self.allowed(rows))

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Sample when exploring, else take the mode, on rows of what is remembered."""
        features, allowed = self._features(obs), self.allowed(obs)
        if explore:
            noise = self.draw_noise(1, obs.shape[1])[:, 0]
            return self.model.sample(features, noise, allowed)
        return self.model.mode(features, allowed)

    def _features(self, rows: Tensor) -> Tensor:
        """Return what is remembered, without the mask of actions."""
        return rows[..., : self.model.head_inputs]


def split(x: Tensor, axis: int, *sizes: int) -> Tensor:
    """Return `x` with axes of `sizes` in place of one."""
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def by_env(x: Tensor) -> Tensor:
    """Return `[S, T, n, ...]` as `[S, n, T, ...]`."""
    return x.transpose(1, 2)


def recurrent_ppo_networks(
    env: EnvSpec, config: RecurrentPPOConfig, rng: Rng
) -> dict[str, nn.Module]:
    """Build the networks for a task."""
    options = network_options(env, config)
    encoder = shared_encoder(env, config, rng, options["activation"])
    model = RecurrentActorCriticModel(
        encoder,
        env.obs_dim,
        env.action_dim,
        memory=config.memory,
        memory_size=config.memory_size,
        rng=rng,
        **options,
    )
    return {"model": model}


SPEC = replace(
    PPO_SPEC,
    name="recurrent_ppo",
    title="Recurrent Proximal Policy Optimization",
    summary="on-policy; PPO with an LSTM or GRU, for tasks that need a memory",
    learner=RecurrentPPO,
    networks=recurrent_ppo_networks,
)

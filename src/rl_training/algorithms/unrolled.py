"""Replayed sequences as rows, so that a learner of transitions learns with a memory.

A learner's networks begin with a recurrent layer.  One pass along the sequences of a batch gives
what each network remembers at each step; side by side these outputs are a row, and a row is to the
learner's own update what an observation is.  The first `burn_in` steps of a sequence only warm the
memory up (Kapturowski et al., 2019, "Recurrent Experience Replay in Distributed Reinforcement
Learning", Section 3); sequences begin with the memory that the learner last had there.
Shapes: S seeds, B sequences, T steps, H outputs of a recurrent layer, M entries of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import StepOutput, TransitionLearner
from rl_training.algorithms.sources import SequenceReplay
from rl_training.data.batch import SequenceBatch, TransitionBatch
from rl_training.models.memory import MemoryName
from rl_training.models.recurrent_mlp import RecurrentMLP
from rl_training.validation import LARGEST_INT, PositiveInt, Settings, Whole


class MemorySettings(Settings):
    """What remembers, in networks that learn from replayed sequences."""

    memory: MemoryName = "lstm"
    """The recurrent layer: `lstm`, or `gru`, which has three quarters of its weights."""
    memory_size: PositiveInt = 128
    """Outputs of the recurrent layer."""


class MemoryReplay(SequenceReplay):
    """How experience is kept and drawn by a learner of values with a memory."""

    buffer_capacity: Annotated[int, Field(ge=2, le=LARGEST_INT), Whole] = 100_000
    """Steps kept; the oldest are overwritten."""
    batch_size: PositiveInt = 32
    """Sequences per gradient step and seed."""
    batch_length: Annotated[int, Field(ge=2, le=LARGEST_INT), Whole] = 32
    """Observations of a sequence, including the burn-in."""
    burn_in: Annotated[int, Field(ge=0, le=LARGEST_INT - 2), Whole] = 8
    """First observations of a sequence, which only warm up the memory."""
    n_step: PositiveInt = 1
    """Rewards summed before bootstrapping; stops at the end of an episode or of a sequence."""
    normalize_observations: bool = False
    """Standardise observations by the running mean and deviation of all that were seen; the replay
    keeps them as they were, and the statistics are part of the checkpoint."""
    normalize_rewards: bool = False
    """Divide rewards, each by itself, by the running deviation of the discounted return, clipped to
    +-10; the replay keeps them as they were, and returns are reported without it."""
    newest_first: bool = False
    """Learn from new steps before others are drawn uniformly."""
    stored_latents: bool = True
    """Start sequences with the memory that the learner had when it last learned from the step
    before; otherwise, and where it never did, with an empty memory."""

    @model_validator(mode="after")
    def _something_is_learned_from(self) -> MemoryReplay:
        if self.burn_in + 2 > self.batch_length:
            raise ValueError(
                f"batch_length must be >= burn_in + 2 ({self.burn_in + 2}), got {self.batch_length}"
            )
        return self


def unrolled(
    batch: SequenceBatch,
    remembered: list[Tensor],
    mask: Tensor | None,
    settings: MemoryReplay,
    gamma: float,
) -> TransitionBatch:
    """Return the steps of sequences as transitions `[S, B * (T - 1 - burn_in)]` of rows.

    Args:
        batch: The sequences; an action and a reward are beside the observation that they led to.
        remembered: Outputs of the recurrent layers `[S, B, T, H]`, the parts of a row.
        mask: The mask of actions `[S, B, T, A]`, the end of a row; None without one.
        settings: Burn-in and number of rewards that are summed.
        gamma: Discount of a step.
    """
    rows = torch.cat(remembered if mask is None else [*remembered, mask], -1)
    steps = batch.reward.shape[2] - 1
    reward, action = batch.reward[:, :, 1:], batch.action[:, :, 1:]
    # A step is one of the run's where the observation after it is not the first of an episode.
    is_step = ~batch.is_first[:, :, 1:]  # [S, B, T - 1]
    discount = gamma * (~batch.terminated[:, :, 1:]).to(reward.dtype)
    total, product, ahead = summed(reward, discount, is_step, settings.n_step)
    place = (torch.arange(steps, device=reward.device) + ahead).clamp(max=steps)
    after = rows.gather(2, place.unsqueeze(-1).expand(*place.shape, rows.shape[-1]))
    learned = slice(settings.burn_in, None)
    counts = is_step[:, :, learned].flatten(1, 2).to(reward.dtype)

    def flat(x: Tensor) -> Tensor:
        return x[:, :, learned].flatten(1, 2)

    return TransitionBatch(
        obs=flat(rows[:, :, :-1]),
        action=flat(action),
        reward=flat(total),
        next_obs=flat(after),
        discount=flat(product),
        # Their mean is 1, so that a weighted mean is the mean of the steps that count.
        weight=counts / counts.mean(1, keepdim=True).clamp(min=1 / counts.shape[1]),
    )


def summed(
    reward: Tensor, discount: Tensor, is_step: Tensor, n_step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up to n rewards from each step on, all `[S, B, T]`.

    Returns:
        The sums; the products of discounts that the bootstrap is multiplied by; how many steps
        ahead the observation of the bootstrap is.
    """
    total, product = torch.zeros_like(reward), torch.ones_like(reward)
    ahead = torch.zeros_like(reward, dtype=torch.int64)
    continues = torch.ones_like(is_step)
    for offset in range(min(n_step, reward.shape[2])):
        continues = continues & shifted(is_step, offset)
        total = total + continues * product * shifted(reward, offset)
        product = torch.where(continues, product * shifted(discount, offset), product)
        ahead = ahead + continues
    return total, product, ahead


def shifted(x: Tensor, steps: int) -> Tensor:
    """Return `x` `[S, B, T]` that many steps later; zeros where a sequence has ended."""
    if steps == 0:
        return x
    return torch.cat((x[:, :, steps:], torch.zeros_like(x[:, :, :steps])), 2)


def starts(batch: SequenceBatch, networks: Sequence[RecurrentMLP]) -> list[Tensor]:
    """Return the memory of each network before its sequences, `[S, B, M]`."""
    sizes = [network.memory.state_size for network in networks]
    if batch.start is not None:
        return list(torch.split(batch.start, sizes, -1))
    count, device = batch.reward.shape[1], batch.reward.device
    return [network.memory.initial(count, device) for network in networks]


def learn_unrolled(
    learner: TransitionLearner,
    batch: TransitionBatch | SequenceBatch,
    networks: Sequence[RecurrentMLP],
    target: RecurrentMLP,
) -> StepOutput:
    """Do a learner's own update on the steps of sequences.

    Args:
        learner: Its `step` takes the rows as observations.
        batch: The sequences.
        networks: What follows them, each with a memory of its own; a row has their outputs first.
        target: A slower copy of the last of them, which begins with the same memory.
    """
    assert isinstance(batch, SequenceBatch)
    count, steps = batch.reward.shape[1:]
    obs = learner.normalize(batch.obs.flatten(1, 2))
    mask = learner.mask_of(obs)
    along = obs.view(obs.shape[0], count, steps, *obs.shape[2:])
    before = starts(batch, networks)
    memories = [
        network.follow(along, start, batch.is_first)
        for network, start in zip(networks, before, strict=True)
    ]
    with torch.no_grad():
        behind = target.follow(along, before[-1], batch.is_first)
    remembered = [
        network.memory.output(memory)
        for network, memory in zip((*networks, target), (*memories, behind), strict=True)
    ]
    rows = unrolled(
        replace(batch, reward=learner.scaled(batch.reward)),
        remembered,
        None if mask is None else mask.view(obs.shape[0], count, steps, -1),
        learner.part(MemoryReplay),
        learner.config.gamma,
    )
    output = learner.step(rows)
    beliefs = torch.cat([memory.detach() for memory in memories], -1)
    weight = rows.weight
    assert weight is not None
    metrics = {
        name: value * weight if value.ndim == weight.ndim else value
        for name, value in output.metrics.items()
    }
    return StepOutput(metrics, beliefs=beliefs)

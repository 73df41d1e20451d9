"""Recurrent SAC's update: sequences replayed step by step, with memories of actor and critics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.updates import make_constant, parameters_of, same
from rl_training.algorithms.recurrent_sac import RecurrentSAC, recurrent_sac_networks
from rl_training.data.batch import SequenceBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.recurrent_mlp import RecurrentMLP
from rl_training.rng import Rng

OBS, ACT, B, T, SIZE, GAMMA = 3, 2, 4, 7, 5, 0.9
BURN_IN = 2
TASK = EnvSpec(
    env_id="test",
    obs_shape=(OBS,),
    obs_dtype="float32",
    action_kind="continuous",
    action_shape=(ACT,),
    action_dtype="float32",
    action_low=(-1.0,) * ACT,
    action_high=(1.0,) * ACT,
)
MEAN, NARROW = 0.3, -30.0
"""A policy that always does tanh(MEAN): its deviation is nothing."""


def make_learner(**changes: Any) -> RecurrentSAC:
    settings: dict[str, Any] = {
        "hidden_sizes": (8,),
        "memory_size": SIZE,
        "batch_length": T,
        "burn_in": BURN_IN,
        "gamma": GAMMA,
        "alpha": 1e-12,
    }
    config = RecurrentSAC.settings_class()(**settings | changes)
    networks = recurrent_sac_networks(TASK, config, Rng((0,), "networks"))
    learner = RecurrentSAC(config=config, model=networks["model"])
    with torch.no_grad():  # targets that are not the critics
        generator = torch.Generator().manual_seed(0)
        for parameter in learner.target_critic.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return learner


def make_sequences(learner: RecurrentSAC) -> SequenceBatch:
    rng = Rng((0,), "sequences")
    is_first = rng.uniform(B, T) < 0.2
    return SequenceBatch(
        obs=rng.normal(B, T, OBS),
        action=rng.uniform(B, T, ACT) * 2 - 1,
        reward=rng.normal(B, T),
        is_first=is_first,
        terminated=rng.uniform(B, T) < 0.2,
        start=rng.normal(B, learner.belief_size).tanh(),
    )


def remembered(
    network: RecurrentMLP, start: Tensor, batch: SequenceBatch, row: int
) -> list[Tensor]:
    """What a network remembers at each step of one sequence, one step at a time, `[1, 1, H]`."""
    memory, found = start[:, row, None], []
    for step in range(T):
        if bool(batch.is_first[0, row, step]):
            memory = torch.zeros_like(memory)
        memory = network.remember(batch.obs[:, row, step, None], memory)
        found.append(network.memory.output(memory))
    return found


@pytest.mark.parametrize("memory", ["gru", "lstm"])
@torch.no_grad()
def test_the_critics_loss_is_sacs_along_each_sequence(memory: str) -> None:
    learner = make_learner(memory=memory)
    make_constant(learner.model.actor.layers, [MEAN] * ACT + [NARROW] * ACT)
    batch = make_sequences(learner)
    assert batch.start is not None
    model, target = learner.model, learner.target_critic
    start = batch.start[..., model.actor.memory.state_size :]
    action = torch.full((1, 1, ACT), np.tanh(MEAN))
    losses = []
    for row in range(B):
        own = remembered(model.critic, start, batch, row)
        slower = remembered(target, start, batch, row)
        for step in range(BURN_IN, T - 1):
            if bool(batch.is_first[0, row, step + 1]):
                continue
            value = target(slower[step + 1], action).amin().item()
            goes_on = not bool(batch.terminated[0, row, step + 1])
            wanted = batch.reward[0, row, step + 1].item() + GAMMA * goes_on * value
            q = model.critic(own[step], batch.action[:, row, step + 1, None])
            losses.append((q - wanted).square().sum().item())
    with torch.enable_grad():
        output = learner.learn(batch)
    assert output.metrics["critic_loss"].item() == pytest.approx(np.mean(losses), rel=1e-3)
    assert output.beliefs is not None
    assert output.beliefs.shape == (1, B, T, learner.belief_size)


def test_the_actor_climbs_the_critics_through_its_own_memory() -> None:
    learner = make_learner()
    batch = make_sequences(learner)
    before = parameters_of(learner.model.actor), parameters_of(learner.model.critic)
    target = parameters_of(learner.target_critic)
    learner.learn(batch)
    for old, network in zip(before, (learner.model.actor, learner.model.critic), strict=True):
        changed = [not torch.equal(a, b) for a, b in zip(old, network.parameters(), strict=True)]
        assert all(changed), "layers and memory alike"
    assert not same(target, parameters_of(learner.target_critic))


def test_actor_and_critics_remember_apart() -> None:
    model = make_learner().model
    assert model.actor.memory is not model.critic.memory
    rows = torch.randn(1, 6, 3 * SIZE)
    changed = rows.clone()
    changed[..., SIZE:] += 1.0
    assert torch.equal(model.policy(rows)[0], model.policy(changed)[0])
    action = torch.zeros(1, 6, ACT)
    own, slower = (
        model.q_values(rows, action),
        model.q_values(rows, action, make_learner().target_critic),
    )
    assert torch.equal(
        own, model.q_values(torch.cat((changed[..., :SIZE], rows[..., SIZE:]), -1), action)
    )
    assert not torch.equal(own, slower)

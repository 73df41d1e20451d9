"""Discrete IQL's update: critics of all actions, the categorical policy, and what IQL shares."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from helpers.updates import OBS, B, make_constant, parameters_of, same
from rl_training.algorithms.discrete_iql import SPEC, DiscreteIQL, discrete_iql_loss
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPDiscreteIQLModel
from rl_training.rng import Rng

ACTIONS = 4


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> DiscreteIQL:
    model = MLPDiscreteIQLModel(OBS, ACTIONS, (16,), rng=Rng(seeds, "networks"))
    return DiscreteIQL(model=model, seeds=seeds, **keywords)


def make_batch(seeds: tuple[int, ...] = (0,)) -> TransitionBatch:
    rng = Rng(seeds, "batch")
    return TransitionBatch(
        obs=rng.normal(B, OBS),
        action=rng.integers(ACTIONS, B),
        reward=rng.normal(B),
        next_obs=rng.normal(B, OBS),
        discount=torch.full((len(seeds), B), 0.9),
    )


def answer(network: nn.Module, obs: Tensor, member: int | None = None) -> NDArray[Any]:
    """What one hidden layer of ReLU and a linear output make of rows `[B, I]`, in NumPy."""
    values = {name: p.detach().double().numpy()[0] for name, p in network.named_parameters()}
    if member is not None:
        values = {name: value[member] for name, value in values.items()}
    x = obs[0].double().numpy() @ values["layers.0.weight"] + values["layers.0.bias"]
    out: NDArray[Any] = np.maximum(x, 0) @ values["layers.1.weight"] + values["layers.1.bias"]
    return out


def test_the_losses_are_those_of_numpy() -> None:
    learner, batch = make_learner(expectile=0.8, beta=2.0), make_batch()
    # Other target critics than the current ones, so that a mix-up shows.
    learner.target_critic = copy.deepcopy(
        MLPDiscreteIQLModel(OBS, ACTIONS, (16,), rng=Rng((9,), "networks")).critic
    )
    losses = discrete_iql_loss(learner, batch)
    action, rows = batch.action[0].numpy(), np.arange(B)
    target_q = [answer(learner.target_critic, batch.obs, i)[rows, action] for i in (0, 1)]
    least, value = np.minimum(*target_q), answer(learner.model.value_net, batch.obs)[:, 0]
    error = least - value
    expected = np.mean(np.where(error < 0, 0.2, 0.8) * error**2)
    assert losses["value_loss"].item() == pytest.approx(expected, rel=1e-4)
    logits = answer(learner.model.actor, batch.obs)
    log_prob = logits[rows, action] - np.log(np.exp(logits).sum(-1))
    weight = np.minimum(np.exp(2.0 * error), 100.0)
    assert losses["actor_loss"].item() == pytest.approx(-np.mean(weight * log_prob), rel=1e-4)
    next_value = answer(learner.model.value_net, batch.next_obs)[:, 0]
    target = batch.reward[0].double().numpy() + 0.9 * next_value
    q = [answer(learner.model.critic, batch.obs, i)[rows, action] for i in (0, 1)]
    expected = sum(np.mean((one - target) ** 2) for one in q)
    assert losses["critic_loss"].item() == pytest.approx(expected, rel=1e-4)


def test_actions_that_the_data_does_not_hold_have_no_say() -> None:
    """Q of other actions may be anything: no loss looks at it."""
    learner, batch = make_learner(), make_batch()
    batch = replace(batch, action=torch.full_like(batch.action, 2))
    before = discrete_iql_loss(learner, batch)
    with torch.no_grad():
        for network in (learner.model.critic, learner.target_critic):
            for name, parameter in network.named_parameters():
                if name == "layers.1.bias":
                    parameter[..., [0, 1, 3]] = 1e6
    after = discrete_iql_loss(learner, batch)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_beta_zero_learns_the_shares_of_the_data() -> None:
    """One state with actions 0, 0, 0, 1: the most likely policy has them as often."""
    learner = make_learner(beta=0.0, learning_rate=0.01)
    batch = make_batch()
    action = torch.tensor([0, 0, 0, 1]).repeat(B // 4).unsqueeze(0)
    batch = replace(batch, obs=torch.zeros_like(batch.obs), action=action)
    for _ in range(400):
        learner.update(batch)
    probability = learner.model.logits(batch.obs)[0, 0].softmax(-1)
    torch.testing.assert_close(
        probability, torch.tensor([0.75, 0.25, 0.0, 0.0]), atol=0.02, rtol=0.0
    )


def test_a_large_beta_learns_the_best_action_of_the_data() -> None:
    """A bandit of one state: action 3 pays most but is rare; the data never takes action 0."""
    learner = make_learner(beta=5.0, expectile=0.9, learning_rate=0.01)
    action = torch.tensor([1, 1, 1, 2, 2, 2, 2, 3]).unsqueeze(0)
    reward = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 2.0]).unsqueeze(0)
    zeros = torch.zeros(1, 8, OBS)
    batch = TransitionBatch(
        obs=zeros, action=action, reward=reward, next_obs=zeros, discount=torch.zeros(1, 8)
    )
    for _ in range(600):
        learner.update(batch)
    assert learner.act(zeros).tolist() == [[3] * 8]
    q = learner.model.q_values(zeros, action)
    torch.testing.assert_close(q[0, 0], reward[0], atol=0.05, rtol=0.0)


def test_acting_is_greedy_and_exploring_samples_by_the_logits() -> None:
    learner = make_learner()
    make_constant(learner.model.actor, [0.0, math.log(3.0), -50.0, -50.0])
    obs = torch.zeros(1, 4000, OBS)
    assert (learner.act(obs) == 1).all()
    drawn = learner.act(obs, explore=True)
    assert drawn.dtype == torch.int64
    shares = torch.bincount(drawn[0], minlength=ACTIONS) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.25, 0.75, 0.0, 0.0]), atol=0.03, rtol=0.0)


def test_random_actions_are_uniform() -> None:
    drawn = make_learner().random_action(4000)
    shares = torch.bincount(drawn[0], minlength=ACTIONS) / 4000
    torch.testing.assert_close(shares, torch.full((ACTIONS,), 0.25), atol=0.03, rtol=0.0)


def test_an_update_moves_every_network() -> None:
    learner = make_learner()
    model = learner.model
    networks = (model.actor, model.critic, model.value_net, learner.target_critic)
    before = [parameters_of(network) for network in networks]
    metrics = learner.update(make_batch()).metrics
    assert set(metrics) == set(SPEC.metrics)
    for old, network in zip(before, networks, strict=True):
        assert not same(old, parameters_of(network))


def test_stacked_seeds_equal_single_ones() -> None:
    seeds = (3, 1, 2)
    group = make_learner(seeds)
    singles = [make_learner((seed,)) for seed in seeds]
    for _ in range(4):
        together = group.update(make_batch(seeds)).metrics
        for index, (seed, single) in enumerate(zip(seeds, singles, strict=True)):
            alone = single.update(make_batch((seed,))).metrics
            for name, value in together.tensors.items():
                ours = value[index].mean().item()
                assert ours == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name

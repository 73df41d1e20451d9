"""TD3+BC's update: the weight of Q and of cloning, limiting cases, statistics of the data.

What it shares with TD3 is tested in `test_td3_update.py`.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.datasets import TOY, toy_data
from helpers.updates import (
    ACT,
    OBS,
    B,
    actor_gradient,
    last_layer,
    make_batch,
    make_constant,
    parameters_of,
    same,
)
from rl_training.algorithms.td3_bc import SPEC, TD3BC, td3_bc_loss
from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.models.actor_with_critics import MLPTD3Model
from rl_training.rng import Rng
from rl_training.testing.contract import flat_state


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> TD3BC:
    model = MLPTD3Model(
        OBS, ACT, (16,), num_critics=keywords.get("num_critics", 2), rng=Rng(seeds, "networks")
    )
    return TD3BC(model=model, seeds=seeds, **keywords)


def scale_critics(learner: TD3BC, factor: float) -> None:
    """Multiply every Q by a factor."""
    layer = last_layer(learner.model.critic)
    with torch.no_grad():
        layer.weight.mul_(factor)
        layer.bias.mul_(factor)


def cloning_gradient(learner: TD3BC, batch: TransitionBatch) -> Tensor:
    loss = (learner.model.policy(batch.obs) - batch.action).square().mean()
    found = torch.autograd.grad(loss, list(learner.model.actor.parameters()))
    return torch.cat([gradient.flatten() for gradient in found])


# The target


def test_a_termination_stops_the_bootstrap_and_a_truncation_does_not() -> None:
    data = toy_data().in_learner_units(TOY)
    buffer = DatasetBuffer(data, gamma=0.9)
    ends = (
        torch.from_numpy(data.terminations).nonzero()[0],
        torch.from_numpy(data.truncations).nonzero()[0],
    )
    batch = buffer.gather(torch.cat(ends).unsqueeze(0))
    learner = make_learner(normalize_observations=False)
    make_constant(learner.target_critic, [10.0, 10.0])
    target, _ = learner.td_target(batch)
    torch.testing.assert_close(target, batch.reward + torch.tensor([[0.0, 9.0]]))


# The policy


def test_the_actor_loss_is_cloning_minus_alpha_times_q_over_its_mean_size() -> None:
    learner, batch = make_learner(bc_alpha=3.0), make_batch()
    action = learner.model.policy(batch.obs)
    q = learner.model.q_values(batch.obs, action)[:, 0]
    cloning = ((action - batch.action) ** 2).sum() / (B * ACT)
    loss, metrics = learner.actor_loss(batch)
    assert metrics["q_weight"].item() == pytest.approx(3.0 / q.abs().mean().item())
    assert metrics["bc_loss"].item() == pytest.approx(cloning.item())
    expected = cloning - 3.0 * q.mean() / q.abs().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_the_actors_gradient_does_not_depend_on_the_scale_of_q(factor: float) -> None:
    learner, batch = make_learner(), make_batch()
    before = actor_gradient(learner, batch)
    scale_critics(learner, factor)
    torch.testing.assert_close(actor_gradient(learner, batch), before, rtol=1e-3, atol=1e-6)


def test_no_gradient_flows_through_the_weight_of_q() -> None:
    learner, batch = make_learner(bc_alpha=2.0), make_batch()
    action = learner.model.policy(batch.obs)
    q = learner.model.q_values(batch.obs, action)[:, 0]
    weight = 2.0 / q.abs().mean().item()
    loss = (action - batch.action).square().mean() - weight * q.mean()
    found = torch.autograd.grad(loss, list(learner.model.actor.parameters()))
    expected = torch.cat([gradient.flatten() for gradient in found])
    torch.testing.assert_close(actor_gradient(learner, batch), expected)


def test_a_vanishing_alpha_is_behaviour_cloning_and_a_larger_one_is_not() -> None:
    learner, batch = make_learner(bc_alpha=1e-9), make_batch()
    cloning = cloning_gradient(learner, batch)
    torch.testing.assert_close(actor_gradient(learner, batch), cloning)
    other = make_learner(bc_alpha=2.5)
    assert not torch.allclose(actor_gradient(other, batch), cloning, rtol=0.1, atol=1e-3)


def test_a_vanishing_alpha_learns_the_actions_of_the_data() -> None:
    learner = make_learner(bc_alpha=1e-6, learning_rate=0.01, normalize_observations=False)
    batch = make_batch()
    batch = replace(batch, action=torch.full_like(batch.action, 0.4))
    for _ in range(400):
        learner.update(batch)
    torch.testing.assert_close(learner.act(batch.obs), batch.action, atol=0.03, rtol=0)


def test_cloning_falls_linearly_online_and_stays_offline() -> None:
    offline, online = make_learner(cloning_end=0.5), make_learner(cloning_end=0.5, online={})
    batch = make_batch()
    for learner in (offline, online):
        learner.set_progress(0.5)
    loss = {learner: learner.actor_loss(batch) for learner in (offline, online)}
    cloning = loss[online][1]["bc_loss"]
    torch.testing.assert_close(loss[offline][0] - loss[online][0], 0.25 * cloning)


def test_acting_is_the_policy_at_standardised_observations() -> None:
    learner, obs = make_learner(), make_batch().obs
    learner.see_data(DatasetBuffer(toy_data().in_learner_units(TOY)))
    expected = learner.model.policy(learner.normalize(obs))
    assert torch.equal(learner.act(obs), expected)
    assert not torch.equal(expected, learner.model.policy(obs))


# What an update moves


def test_metrics_of_the_actor_are_those_of_its_last_step() -> None:
    learner = make_learner(policy_delay=2)
    first, second, third = (learner.update(make_batch()).metrics for _ in range(3))
    names = ("actor_loss", "bc_loss", "q_weight")
    assert all(first[name] == 0.0 for name in names)
    assert all(second[name] != 0.0 for name in names)
    assert [third[name] for name in names] == [second[name] for name in names]
    assert third["critic_loss"] != second["critic_loss"]


def test_the_pure_losses_are_those_of_the_update_and_change_nothing() -> None:
    learner = make_learner(policy_delay=1)
    probe = copy.deepcopy(learner)
    losses = td3_bc_loss(probe, make_batch())
    metrics = learner.update(make_batch()).metrics
    assert set(metrics) == set(SPEC.metrics) == set(losses)
    assert losses["critic_loss"].item() == pytest.approx(metrics["critic_loss"], rel=1e-6)
    assert same(parameters_of(probe.model), parameters_of(make_learner().model))


# Statistics and seeds


def test_statistics_are_those_of_the_dataset_and_part_of_the_state() -> None:
    data = toy_data().in_learner_units(TOY)
    seeds = (4, 9)
    learner = make_learner(seeds)
    buffer = DatasetBuffer(data, seeds=seeds)
    learner.see_data(buffer)
    mean, deviation = map(torch.from_numpy, data.observation_statistics())
    obs = torch.from_numpy(data.observations[:B]).expand(2, -1, -1)
    expected = ((obs - mean) / deviation).clamp(-10, 10)
    torch.testing.assert_close(learner.normalize(obs), expected, rtol=1e-4, atol=1e-4)
    batch = buffer.sample(B)
    seen = learner.normalized(batch)
    assert torch.equal(seen.obs, learner.normalize(batch.obs))
    assert torch.equal(seen.next_obs, learner.normalize(batch.next_obs))
    assert any("obs_norm" in name for name in flat_state(learner.state_dict()))
    other = make_learner((1, 2))
    other.load_state_dict(learner.state_dict())
    assert torch.equal(other.normalize(obs), learner.normalize(obs))


def test_statistics_can_be_left_out() -> None:
    learner = make_learner(normalize_observations=False)
    learner.see_data(DatasetBuffer(toy_data().in_learner_units(TOY)))
    batch = make_batch()
    assert learner.normalized(batch) is batch
    assert torch.equal(learner.normalize(batch.obs), batch.obs)


def test_stacked_seeds_equal_single_ones() -> None:
    seeds = (3, 1, 2)
    group = make_learner(seeds, max_grad_norm=1.0)
    singles = [make_learner((seed,), max_grad_norm=1.0) for seed in seeds]
    for _ in range(4):
        together = group.update(make_batch(seeds)).metrics
        for index, (seed, single) in enumerate(zip(seeds, singles, strict=True)):
            alone = single.update(make_batch((seed,))).metrics
            for name, value in together.tensors.items():
                ours = value[index].mean().item()
                assert ours == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name
    for index, single in enumerate(singles):
        for p, q in zip(group.model.parameters(), single.model.parameters(), strict=True):
            torch.testing.assert_close(p[index], q[0], rtol=1e-4, atol=1e-6)

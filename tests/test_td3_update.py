"""TD3's update: one by hand, the smoothed target, who leads the policy, and what moves when."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from helpers.updates import (
    ACT,
    OBS,
    B,
    actor_gradient,
    make_batch,
    make_constant,
    parameters_of,
    same,
)
from helpers.watching import rows_asked
from rl_training.algorithms.td3 import SPEC, TD3, td3_loss
from rl_training.algorithms.td3_bc import TD3BC
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPTD3Model
from rl_training.models.layers import StackedLinear, StackedMLP
from rl_training.rng import Rng


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> TD3:
    model = MLPTD3Model(
        OBS, ACT, (16,), num_critics=keywords.get("num_critics", 2), rng=Rng(seeds, "networks")
    )
    return TD3(model=model, seeds=seeds, **keywords)


def layers(network: nn.Module) -> tuple[StackedLinear, StackedLinear]:
    """First and last layer of a network with one hidden layer."""
    assert isinstance(network, StackedMLP)
    first, last = network.layers[0], network.layers[-1]
    assert isinstance(first, StackedLinear)
    assert isinstance(last, StackedLinear)
    return first, last


# A whole update by hand: without noise and delay, TD3 is DDPG with clipped double Q


def by_hand(**keywords: Any) -> tuple[TD3, TransitionBatch]:
    """pi(s) = tanh(s / 2), Q_1 = 2 (s + a + 1) and Q_2 = (s + a + 1) + 1, and one transition."""
    model = MLPTD3Model(1, 1, (1,), num_critics=2, rng=Rng((0,), "networks"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        first, last = layers(model.actor)
        first.weight.fill_(1.0)
        last.weight.fill_(0.5)
        first, last = layers(model.critic)
        first.weight.fill_(1.0)
        first.bias.fill_(1.0)
        last.weight.view(2).copy_(torch.tensor([2.0, 1.0]))
        last.bias.view(2).copy_(torch.tensor([0.0, 1.0]))
    batch = TransitionBatch(
        obs=torch.tensor([[[1.0]]]),
        action=torch.tensor([[[0.5]]]),
        reward=torch.tensor([[1.0]]),
        next_obs=torch.tensor([[[2.0]]]),
        discount=torch.tensor([[0.9]]),
    )
    plain = {"policy_noise": 0.0, "policy_delay": 1, "learning_rate": 0.01, "tau": 0.1}
    return TD3(model=model, **plain | keywords), batch


def test_without_noise_and_delay_an_update_is_that_of_ddpg_with_clipped_double_q() -> None:
    learner, batch = by_hand()
    before = {name: parameters_of(getattr(learner.model, name)) for name in ("actor", "critic")}
    metrics = learner.update(batch).metrics
    # a' = tanh(1), Q' = 2 * 3.761594 and 3.761594 + 1: the second is less.
    target = 1 + 0.9 * (math.tanh(1) + 4)
    assert target == pytest.approx(5.285435, abs=1e-6)
    assert metrics["target_q_mean"] == pytest.approx(target, rel=1e-6)
    # Q = 2 * 2.5 and 2.5 + 1 at the action taken.
    assert metrics["critic_loss"] == pytest.approx((5 - target) ** 2 + (3.5 - target) ** 2)
    # Both are too low, so the first step of Adam raises every parameter by its step size.
    for name in ("actor", "critic"):
        online = getattr(learner.model, name)
        slow = {"actor": learner.target_actor, "critic": learner.target_critic}[name]
        for old, new, moved in zip(
            before[name], online.parameters(), slow.parameters(), strict=True
        ):
            torch.testing.assert_close(new, old + 0.01, rtol=0, atol=1e-6)
            torch.testing.assert_close(moved, old + 0.1 * 0.01, rtol=0, atol=1e-6)
    # The policy climbs the first critic as the step before has left it: 2.01 * 1.01 (s + a + 1).
    value = 2.01 * 1.01 * (1 + math.tanh(0.5) + 1) + 0.01
    assert metrics["actor_loss"] == pytest.approx(-value, rel=1e-5)


def test_a_termination_stops_the_bootstrap_and_a_truncation_does_not() -> None:
    learner = make_learner()
    make_constant(learner.target_critic, [10.0, 10.0])
    batch = make_batch(discount=torch.tensor([[0.0] * 4 + [0.9] * 4]))
    target, _ = learner.td_target(batch)
    assert torch.equal(target[:, :4], batch.reward[:, :4])
    torch.testing.assert_close(target[:, 4:], batch.reward[:, 4:] + 9.0)


def test_the_target_takes_the_least_of_all_target_critics() -> None:
    learner = make_learner(num_critics=3)
    make_constant(learner.target_critic, [5.0, 2.0, 4.0])
    make_constant(learner.model.critic, [-100.0] * 3)  # the online critics have no say
    batch = make_batch()
    target, metrics = learner.td_target(batch)
    torch.testing.assert_close(target, batch.reward + 0.9 * 2.0)
    assert torch.equal(metrics["target_q_mean"], target)


# Target policy smoothing


def test_the_smoothing_noise_is_scaled_and_clipped_around_the_target_policy() -> None:
    learner = make_learner(policy_noise=0.4, noise_clip=0.3)
    make_constant(learner.target_actor, [0.0, 0.0])
    make_constant(learner.model.actor, [5.0, 5.0])  # the online policy has no say
    noise = Rng((0,), "learner").normal(B, ACT)  # what the learner is about to draw
    action = learner.smoothed_action(make_batch().next_obs)
    torch.testing.assert_close(action, (0.4 * noise).clamp(-0.3, 0.3))
    assert (action.abs() == 0.3).any(), "nothing was clipped"
    assert (action.abs() < 0.3).any(), "everything was clipped"


def test_the_smoothed_action_stays_in_the_box() -> None:
    learner = make_learner(policy_noise=1.0, noise_clip=2.0)
    make_constant(learner.target_actor, [2.0, -2.0])  # tanh is +-0.96
    action = learner.smoothed_action(make_batch().next_obs)
    assert action.abs().max() == 1.0
    assert action.abs().min() < 1.0


@pytest.mark.parametrize("setting", ["policy_noise", "noise_clip"])
def test_without_noise_the_target_is_at_the_target_policy(setting: str) -> None:
    keywords: dict[str, Any] = {setting: 0.0}
    learner, batch = make_learner(**keywords), make_batch()
    expected = learner.model.policy(batch.next_obs, learner.target_actor)
    assert torch.equal(learner.smoothed_action(batch.next_obs), expected)


# The policy


def test_the_policy_climbs_the_first_critic_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, batch = make_learner(), make_batch()
    q = learner.model.q_values(batch.obs, learner.model.policy(batch.obs))[:, 0]
    asked = rows_asked(monkeypatch, learner.model.critic)
    loss, _ = learner.actor_loss(batch)
    assert asked == [(B, 1)], "other critics were evaluated"
    torch.testing.assert_close(loss, -q.mean(1))
    before = actor_gradient(learner, batch)
    with torch.no_grad():
        for parameter in learner.model.critic.parameters():
            parameter[:, 1].mul_(-7.0)
    torch.testing.assert_close(actor_gradient(learner, batch), before)


def test_the_actors_gradient_is_the_deterministic_policy_gradient() -> None:
    learner, batch = make_learner(), make_batch()
    action = learner.model.policy(batch.obs)
    free = action.detach().requires_grad_()
    q = learner.model.q_values(batch.obs, free)[:, 0].mean()
    (slope,) = torch.autograd.grad(q, free)  # grad_a Q(s, a) at a = pi(s)
    chained = torch.autograd.grad(action, list(learner.model.actor.parameters()), slope)
    expected = torch.cat([gradient.flatten() for gradient in chained])
    torch.testing.assert_close(actor_gradient(learner, batch), -expected)


def test_exploring_adds_noise_of_the_given_deviation_and_stays_in_the_box() -> None:
    learner = make_learner(exploration_noise=0.05)
    obs = torch.zeros(1, 20_000, OBS)
    noise = (learner.act(obs, explore=True) - learner.act(obs)).detach()
    assert abs(float(noise.std()) - 0.05) < 0.002
    assert abs(float(noise.mean())) < 0.002
    wild = make_learner(exploration_noise=50.0)
    assert wild.act(obs, explore=True).abs().max() == 1.0
    still = make_learner(exploration_noise=0.0)
    assert torch.equal(still.act(obs, explore=True), still.act(obs))
    assert torch.equal(learner.sample_from(None, obs), learner.act(obs)), "sampling explored"


# What an update moves


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_policy_and_targets_move_at_every_delayed_update_only(delay: int) -> None:
    learner = make_learner(policy_delay=delay)
    for count in range(1, 2 * delay + 1):
        slow = (learner.model.actor, learner.target_actor, learner.target_critic)
        before = [parameters_of(network) for network in slow]
        critic = parameters_of(learner.model.critic)
        learner.update(make_batch())
        moved = [not same(b, parameters_of(n)) for b, n in zip(before, slow, strict=True)]
        assert moved == [count % delay == 0] * 3
        assert not same(critic, parameters_of(learner.model.critic)), "critics always move"


def test_the_actor_step_leaves_the_critics_alone() -> None:
    learner, batch = make_learner(policy_delay=1), make_batch()
    critic, actor = parameters_of(learner.model.critic), parameters_of(learner.model.actor)
    learner.improve(batch, {})
    assert not same(parameters_of(learner.model.actor), actor)
    assert same(parameters_of(learner.model.critic), critic)
    learner.critic_optimizer.minimize(learner.critic_loss(batch, batch.reward)[0])
    assert not same(parameters_of(learner.model.critic), critic)


def test_the_metric_of_the_actor_is_that_of_its_last_step() -> None:
    learner = make_learner(policy_delay=2)
    first, second, third = (learner.update(make_batch()).metrics for _ in range(3))
    assert first["actor_loss"] == 0.0
    assert third["actor_loss"] == second["actor_loss"] != 0.0
    assert third["critic_loss"] != second["critic_loss"]


def test_the_pure_losses_are_those_of_the_update_and_change_nothing() -> None:
    learner = make_learner(policy_delay=1)
    probe = copy.deepcopy(learner)
    losses = td3_loss(probe, make_batch())
    metrics = learner.update(make_batch()).metrics
    assert set(metrics) == set(SPEC.metrics) == set(losses)
    assert losses["critic_loss"].item() == pytest.approx(metrics["critic_loss"], rel=1e-6)
    assert same(parameters_of(probe.model), parameters_of(make_learner().model))


# Groups and relatives


def test_members_of_a_group_have_their_own_noise() -> None:
    """Members of one seed that differ in their noise alone, against three single learners."""
    values: dict[str, list[float]] = {
        "policy_noise": [0.2, 0.2, 0.6],
        "noise_clip": [0.5, 0.1, 0.5],
        "exploration_noise": [0.0, 0.1, 0.4],
    }
    seeds = (4, 4, 4)
    model = MLPTD3Model(OBS, ACT, (16,), rng=Rng(seeds, "networks"))
    group = TD3(model=model, seeds=seeds, varied=values)
    obs = make_batch((4,)).obs
    together = group.smoothed_action(obs.expand(3, -1, -1))
    explored = group.act(obs.expand(3, -1, -1), explore=True)
    for index in range(3):
        alone = make_learner((4,), **{name: numbers[index] for name, numbers in values.items()})
        torch.testing.assert_close(together[index], alone.smoothed_action(obs)[0])
        torch.testing.assert_close(explored[index], alone.act(obs, explore=True)[0])
    assert not torch.equal(explored[0], explored[1])
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[0], together[2])


def test_td3_bc_without_cloning_is_td3_but_for_the_scale_of_the_actors_loss() -> None:
    model = MLPTD3Model(OBS, ACT, (16,), num_critics=2, rng=Rng((0,), "networks"))
    relative = TD3BC(
        model=model,
        normalize_observations=False,
        policy_delay=1,
        bc_alpha=3.0,
        cloning_end=0.0,
        online={},
    )
    relative.set_progress(1.0)  # the weight of cloning has fallen to 0
    learner, batch = make_learner(policy_delay=1), make_batch()
    weight = relative.actor_loss(batch)[1]["q_weight"]
    expected = weight * actor_gradient(learner, batch)
    torch.testing.assert_close(actor_gradient(relative, batch), expected)
    # Adam's first step does not depend on the scale, so all networks are those of TD3.
    ours, theirs = learner.update(batch).metrics, relative.update(batch).metrics
    assert ours["critic_loss"] == theirs["critic_loss"]
    assert ours["target_q_mean"] == theirs["target_q_mean"]
    for name in ("target_actor", "target_critic", "model"):
        pair = (getattr(one, name).parameters() for one in (learner, relative))
        for p, q in zip(*pair, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_stacked_seeds_equal_single_ones() -> None:
    seeds = (3, 1, 2)
    group = make_learner(seeds, max_grad_norm=1.0)
    singles = [make_learner((seed,), max_grad_norm=1.0) for seed in seeds]
    for _ in range(4):
        group.update(make_batch(seeds))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_batch((seed,)))
    for index, single in enumerate(singles):
        for p, q in zip(group.model.parameters(), single.model.parameters(), strict=True):
            torch.testing.assert_close(p[index], q[0], rtol=1e-4, atol=1e-6)

"""SAC's update: targets by hand, directions of the temperature, and what each step may touch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.updates import ACT, OBS, B, last_layer, make_batch, make_constant, parameters_of, same
from rl_training.algorithms.sac import SAC, SPEC, sac_loss
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError, DataError
from rl_training.models.actor_with_critics import tanh_gaussian_sample
from rl_training.models.layers import StackedLinear, StackedMLP
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> SAC:
    critics = keywords.get("num_critics", 2)
    norm = keywords.get("use_layer_norm", False)
    model = MLPSACModel(
        OBS, ACT, (16,), num_critics=critics, use_layer_norm=norm, rng=Rng(seeds, "networks")
    )
    return SAC(model=model, seeds=seeds, **keywords)


def test_target_is_the_reward_plus_the_discounted_soft_value() -> None:
    learner = make_learner(alpha=0.3)
    make_constant(learner.target_critic, [5.0, 2.0])
    make_constant(learner.model.critic, [-100.0, -100.0])  # the online critics have no say
    batch = make_batch()
    noise = Rng((0,), "learner").normal(B, ACT)  # what the learner is about to draw
    mean, log_std = learner.model.policy(batch.next_obs)
    _, log_prob = tanh_gaussian_sample(mean, log_std, noise)
    target, metrics = learner.td_target(batch)
    torch.testing.assert_close(target, batch.reward + 0.9 * (2.0 - 0.3 * log_prob))
    torch.testing.assert_close(metrics["entropy_term"], -0.3 * log_prob)


def test_a_terminated_row_does_not_bootstrap_and_others_do() -> None:
    learner = make_learner(alpha=1e-6)
    make_constant(learner.target_critic, [10.0, 10.0])
    discount = torch.tensor([[0.0] * 4 + [0.9] * 4])
    batch = make_batch(discount=discount)
    target, _ = learner.td_target(batch)
    assert torch.equal(target[:, :4], batch.reward[:, :4])
    torch.testing.assert_close(target[:, 4:], batch.reward[:, 4:] + 9.0, atol=1e-3, rtol=0)


def test_dones_of_a_mapping_are_terminations() -> None:
    learner = make_learner(gamma=0.5)
    batch = learner.as_batch(plain_mapping(make_batch()))
    expected = torch.tensor([[0.0, 0.5] * 4])
    assert torch.equal(batch.discount, expected)


def plain_mapping(batch: TransitionBatch) -> dict[str, Tensor]:
    return {
        "obs": batch.obs[0],
        "actions": batch.action[0],
        "rewards": batch.reward[0],
        "next_obs": batch.next_obs[0],
        "dones": torch.tensor([1.0, 0.0] * 4),
    }


def test_critic_loss_is_the_squared_error_summed_over_critics() -> None:
    learner = make_learner(num_critics=3)
    make_constant(learner.model.critic, [1.0, 2.0, 4.0])
    batch = make_batch()
    loss, _, td_error = learner.critic_loss(batch, torch.ones(1, B))
    assert loss.tolist() == [0.0 + 1.0 + 9.0]
    torch.testing.assert_close(td_error, torch.full((1, B), (0.0 + 1.0 + 3.0) / 3))


def test_importance_weights_scale_the_critic_loss() -> None:
    learner = make_learner()
    make_constant(learner.model.critic, [3.0, 3.0])
    weight = torch.tensor([[1.0, 0.5] + [0.0] * 6])
    loss, _, td_error = learner.critic_loss(make_batch(weight=weight), torch.ones(1, B))
    assert loss.item() == pytest.approx(2 * (4.0 + 2.0) / B)
    assert td_error.tolist() == [[2.0] * B], "priorities are not weighted"


def test_actor_loss_on_constant_critics_is_alpha_log_pi_minus_the_least() -> None:
    learner = make_learner(alpha=0.3)
    make_constant(learner.model.critic, [5.0, 2.0])
    loss, metrics = learner.actor_loss(make_batch())
    assert loss.item() == pytest.approx(-0.3 * metrics["entropy"].item() - 2.0, rel=1e-5)
    assert metrics["q_mean"].mean().item() == 2.0


def test_actor_climbs_a_linear_critic() -> None:
    learner = make_learner(alpha=1e-6, learning_rate=0.01)
    critic = learner.model.critic
    assert isinstance(critic, StackedMLP)
    first = critic.layers[0]
    assert isinstance(first, StackedLinear)
    with torch.no_grad():  # Q = relu(a_0 + 5) - 5 = a_0: push action 0 up, leave action 1 alone
        first.weight.zero_()
        first.weight[..., OBS, 0] = 1.0
        first.bias.fill_(5.0)
        last_layer(learner.model.critic).weight.zero_()
        last_layer(learner.model.critic).weight[..., 0, :] = 1.0
    batch = make_batch()
    before = learner.act(batch.obs)
    for _ in range(20):
        learner.actor_optimizer.minimize(learner.actor_loss(batch)[0])
    assert (learner.act(batch.obs)[..., 0] > before[..., 0]).all()


def test_actor_step_leaves_the_critics_and_critic_step_leaves_the_actor() -> None:
    learner, batch = make_learner(), make_batch()
    critic, target = parameters_of(learner.model.critic), parameters_of(learner.target_critic)
    actor = parameters_of(learner.model.actor)
    learner.actor_optimizer.minimize(learner.actor_loss(batch)[0])
    assert same(parameters_of(learner.model.critic), critic)
    assert not same(parameters_of(learner.model.actor), actor)
    actor = parameters_of(learner.model.actor)
    learner.critic_optimizer.minimize(learner.critic_loss(batch, batch.reward)[0])
    assert same(parameters_of(learner.model.actor), actor)
    assert same(parameters_of(learner.target_critic), target)
    assert not same(parameters_of(learner.model.critic), critic)


@pytest.mark.parametrize(("log_std", "rises"), [(-6.0, True), (0.0, False)])
def test_temperature_rises_below_the_target_entropy_and_falls_above_it(
    log_std: float, rises: bool
) -> None:
    learner = make_learner(initial_alpha=0.5)
    # tanh N(0, e^-6) has entropy near -9 for two actions, tanh N(0, 1) near +1; the target is -2.
    make_constant(learner.model.actor, [0.0, 0.0, log_std, log_std])
    result = learner.update(make_batch())
    assert (result.metrics["entropy"] < -2.0) is rises
    assert (learner.log_alpha.exp().item() > 0.5) is rises
    assert learner.log_alpha.item() != math.log(0.5)


def test_first_temperature_step_has_the_size_of_the_learning_rate() -> None:
    learner = make_learner(learning_rate=0.01)
    metrics = learner.update(make_batch()).metrics
    sign = 1.0 if metrics["entropy"] < -ACT else -1.0
    assert learner.log_alpha.item() == pytest.approx(sign * 0.01, rel=1e-4)
    assert metrics["alpha"] == pytest.approx(math.exp(sign * 0.01), rel=1e-4)


def test_target_entropy_is_minus_the_action_dimension_unless_given() -> None:
    assert make_learner().target_entropy == -2.0
    assert make_learner(target_entropy=0.0).target_entropy == 0.0


def test_a_fixed_temperature_never_moves() -> None:
    learner = make_learner(alpha=0.2)
    results = [learner.update(make_batch()) for _ in range(3)]
    assert [r.metrics["alpha"] for r in results] == pytest.approx([0.2] * 3)
    assert learner.log_alpha.exp().item() == pytest.approx(0.2)


def test_tau_one_copies_the_critics() -> None:
    learner = make_learner(tau=1.0)
    learner.update(make_batch())
    assert same(parameters_of(learner.target_critic), parameters_of(learner.model.critic))


def test_targets_move_by_tau_after_the_critics() -> None:
    learner = make_learner(tau=0.005, learning_rate=0.1)
    old = parameters_of(learner.target_critic)
    learner.update(make_batch())
    new, online = parameters_of(learner.target_critic), parameters_of(learner.model.critic)
    for before, after, source in zip(old, new, online, strict=True):
        torch.testing.assert_close(after, 0.995 * before + 0.005 * source)
        assert not torch.equal(after, before)


@pytest.mark.parametrize("use_layer_norm", [False, True])
def test_stacked_seeds_equal_single_ones(use_layer_norm: bool) -> None:
    seeds = (3, 1, 2)
    group = make_learner(seeds, use_layer_norm=use_layer_norm, max_grad_norm=1.0)
    singles = [make_learner((s,), use_layer_norm=use_layer_norm, max_grad_norm=1.0) for s in seeds]
    for _ in range(4):
        together = group.update(make_batch(seeds)).metrics
        for index, (seed, single) in enumerate(zip(seeds, singles, strict=True)):
            alone = single.update(make_batch((seed,))).metrics
            for name, value in together.tensors.items():
                assert value[index].mean().item() == pytest.approx(
                    alone[name], rel=1e-4, abs=1e-5
                ), name
    for index, single in enumerate(singles):
        ours, theirs = parameters_of(group.model), parameters_of(single.model)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p[index], q[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", ["auto", 0.2])
def test_state_round_trip_gives_a_bit_equal_next_update(alpha: str | float) -> None:
    first, other = make_learner((0,), alpha=alpha), make_learner((5,), alpha=alpha)
    for _ in range(3):
        first.update(make_batch())
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    ours, theirs = first.update(make_batch()).metrics, other.update(make_batch()).metrics
    assert dict(ours) == dict(theirs)
    assert same(parameters_of(first.model), parameters_of(other.model))
    assert same(parameters_of(first.target_critic), parameters_of(other.target_critic))
    assert torch.equal(
        first.act(make_batch().obs, explore=True), other.act(make_batch().obs, explore=True)
    )
    assert other.num_updates.value == 4


def test_update_takes_a_plain_mapping() -> None:
    first, second = make_learner(gamma=0.9), make_learner(gamma=0.9)
    batch = make_batch()
    discount = 0.9 * (1 - torch.tensor([[1.0, 0.0] * 4]))
    typed = second.update(make_batch(discount=discount))
    plain = first.update(plain_mapping(batch), global_step=1)
    assert dict(typed.metrics) == dict(plain.metrics)
    assert same(parameters_of(first.model), parameters_of(second.model))


def test_a_mapping_without_ends_or_with_unknown_names_is_refused() -> None:
    learner, batch = make_learner(), plain_mapping(make_batch())
    with pytest.raises(DataError, match="neither dones nor discounts"):
        learner.update({name: x for name, x in batch.items() if name != "dones"})
    with pytest.raises(DataError, match=r"unknown.*done_flags"):
        learner.update(batch | {"done_flags": batch["dones"]})
    with pytest.raises(DataError, match=r"lacks \['next_obs'\]"):
        learner.update({name: x for name, x in batch.items() if name != "next_obs"})


def test_metrics_are_those_declared_and_losses_match_the_pure_function() -> None:
    learner = make_learner()
    probe = copy.deepcopy(learner)
    losses = sac_loss(probe, make_batch())
    metrics = learner.update(make_batch()).metrics
    assert set(metrics) == set(SPEC.metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert losses["critic_loss"].item() == pytest.approx(metrics["critic_loss"], rel=1e-6)
    assert same(parameters_of(probe.model), parameters_of(make_learner().model))


def test_acting_stays_inside_the_bounds_and_the_mode_is_the_tanh_of_the_mean() -> None:
    learner, obs = make_learner(), make_batch().obs * 100
    assert torch.equal(learner.act(obs), torch.tanh(learner.model.policy(obs)[0]))
    sampled, random = learner.act(obs, explore=True), learner.random_action(1000)
    assert sampled.abs().max() <= 1
    assert not torch.equal(sampled, learner.act(obs, explore=True))
    assert random.shape == (1, 1000, ACT)
    assert random.min().item() == pytest.approx(-1, abs=0.01)
    assert random.max().item() == pytest.approx(1, abs=0.01)


def test_progress_moves_every_learning_rate() -> None:
    learner = make_learner(
        learning_rate=0.1, actor_learning_rate=0.2, lr_schedule={"type": "linear"}
    )
    learner.set_progress(0.75)
    assert [o.rate_of() for o in learner.optimizers()] == pytest.approx([0.025, 0.05, 0.05])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tau": -1}, r"tau must be >= 0, got -1"),
        ({"tau": 1.5}, r"tau must be <= 1, got 1\.5"),
        ({"batch_size": 0}, r"batch_size must be >= 1, got 0"),
        ({"batch_size": 2.5}, r"batch_size must be an integer, got 2\.5"),
        ({"gamma": 1.01}, r"gamma must be <= 1, got 1\.01"),
        ({"gamma": math.nan}, r"gamma must be a finite number, got nan"),
        ({"learning_rate": "fast"}, r"learning_rate must be a number, got 'fast'"),
        ({"alpha": -0.1}, r"alpha must be > 0 or 'auto', got -0\.1"),
        ({"use_layer_norm": 1}, r"use_layer_norm must be true or false, got 1"),
        ({"hidden_sizes": [16, 0]}, r"hidden_sizes\[1\] must be >= 1, got 0"),
        ({"batchsize": 8}, r"batchsize is not a field of SACConfig \(did you mean batch_size\?\)"),
        ({"lr_schedule": {"typ": "linear"}}, r"lr_schedule\.typ .*did you mean type\?"),
        (
            {"buffer_capacity": 8, "batch_size": 9},
            r"buffer_capacity must be >= batch_size \(9\), got 8",
        ),
    ],
)
def test_a_wrong_keyword_names_field_rule_and_value(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(**keywords)


def test_a_missing_network_is_named() -> None:
    with pytest.raises(ConfigError, match=r"SAC\(model=\.\.\.\) must be a torch module, got None"):
        SAC()

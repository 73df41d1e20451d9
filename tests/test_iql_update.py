"""IQL's update: expectiles in closed form, weights, fixed points, and what each step may touch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.datasets import TOY, toy_data
from helpers.updates import ACT, OBS, B, make_batch, make_constant, parameters_of, same
from rl_training.algorithms.iql import IQL, SPEC, iql_loss
from rl_training.algorithms.losses import expectile_loss
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.envs.factory import probe_env
from rl_training.errors import ConfigError
from rl_training.models.layers import StackedMLP, dropout
from rl_training.models.mlp_iql import MLPIQLModel
from rl_training.rng import Rng


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> IQL:
    critics = keywords.get("num_critics", 2)
    model = MLPIQLModel(OBS, ACT, (16,), num_critics=critics, rng=Rng(seeds, "networks"))
    return IQL(model=model, seeds=seeds, **keywords)


def expectile_of(targets: Tensor, expectile: float) -> float:
    """Minimise the loss by bisection of its derivative, apart from any learner."""
    low, high = targets.min().item(), targets.max().item()
    for _ in range(60):
        middle = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        loss = expectile_loss(targets.double() - middle, expectile).sum()
        (slope,) = torch.autograd.grad(loss, middle)
        low, high = (low, middle.item()) if slope > 0 else (middle.item(), high)
    return low


def test_expectile_one_half_is_half_of_the_square() -> None:
    error = torch.linspace(-3, 3, 13)
    assert torch.equal(expectile_loss(error, 0.5), 0.5 * error.square())


def test_expectile_weighs_errors_by_their_sign() -> None:
    loss = expectile_loss(torch.tensor([-2.0, 2.0]), 0.9)
    torch.testing.assert_close(loss, torch.tensor([0.1 * 4, 0.9 * 4]))


def test_expectile_may_differ_between_seeds() -> None:
    loss = expectile_loss(torch.ones(2, 3), torch.tensor([[0.2], [0.7]]))
    torch.testing.assert_close(loss, torch.tensor([[0.2] * 3, [0.7] * 3]))


def test_minimiser_is_the_mean_at_one_half_and_nears_the_maximum_at_one() -> None:
    targets = torch.tensor([0.0, 1.0, 5.0])
    assert expectile_of(targets, 0.5) == pytest.approx(2.0)
    # Between 1 and 5: tau (5 - v) = (1 - tau) (2 v - 1), so v = (1 + 4 tau) / (2 - tau).
    for tau in (0.7, 0.9, 0.999):
        assert expectile_of(targets, tau) == pytest.approx((1 + 4 * tau) / (2 - tau))
    assert expectile_of(targets, 0.999) == pytest.approx(5.0, abs=0.01)
    assert expectile_of(targets, 0.001) == pytest.approx(0.0, abs=0.01)


def test_value_regresses_to_the_least_target_critic() -> None:
    learner = make_learner(expectile=0.8)
    make_constant(learner.target_critic, [5.0, 2.0])
    make_constant(learner.model.critic, [-100.0, -100.0])  # the online critics have no say
    make_constant(learner.model.value_net, [1.0])
    losses = iql_loss(learner, make_batch())
    assert losses["value_loss"].item() == pytest.approx(0.8 * 1.0)
    make_constant(learner.model.value_net, [4.0])
    assert iql_loss(learner, make_batch())["value_loss"].item() == pytest.approx(0.2 * 4.0)


@pytest.mark.parametrize(("value", "weight"), [(1.5, math.exp(1.0)), (3.0, math.exp(-2.0))])
def test_weight_is_the_exponential_of_beta_times_the_advantage(value: float, weight: float) -> None:
    learner = make_learner(beta=2.0)
    make_constant(learner.target_critic, [5.0, 2.0])
    make_constant(learner.model.value_net, [value])
    batch = make_batch()
    loss, metrics = learner.actor_loss(batch)
    torch.testing.assert_close(metrics["weight_mean"], torch.full((1, B), weight))
    torch.testing.assert_close(metrics["advantage_mean"], torch.full((1, B), 2.0 - value))
    log_prob = learner.model.log_prob(batch.obs, batch.action)
    torch.testing.assert_close(loss, -weight * log_prob.mean(1))


@pytest.mark.parametrize("advantage", [10.0, 1e6])
def test_weight_is_clipped_even_where_the_exponential_overflows(advantage: float) -> None:
    learner = make_learner(max_advantage_weight=7.0)
    make_constant(learner.target_critic, [advantage, advantage])
    make_constant(learner.model.value_net, [0.0])
    loss, metrics = learner.actor_loss(make_batch())
    assert metrics["weight_mean"].tolist() == [[7.0] * B]
    assert loss.isfinite().all()


def test_beta_zero_is_behaviour_cloning() -> None:
    learner, batch = make_learner(beta=0.0), make_batch()
    trained = [*learner.model.actor.parameters(), learner.model.log_std]
    ours = torch.autograd.grad(learner.actor_loss(batch)[0].sum(), trained)
    cloning = -learner.model.log_prob(batch.obs, batch.action).mean()
    theirs = torch.autograd.grad(cloning, trained)
    assert all(gradient.abs().max() > 0 for gradient in ours)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_log_density_is_that_of_a_gaussian_around_the_tanh_mean() -> None:
    model = make_learner().model
    with torch.no_grad():
        model.log_std.copy_(torch.tensor([-9.0, 0.4]))  # the first is held at -5
    batch = make_batch()
    mean = torch.tanh(model.actor.forward(batch.obs))
    log_std = torch.tensor([-5.0, 0.4])
    error = (batch.action - mean) / log_std.exp()
    expected = (-0.5 * error.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
    torch.testing.assert_close(model.log_prob(batch.obs, batch.action), expected)


def test_target_is_the_reward_plus_the_discounted_value_and_asks_for_no_action() -> None:
    learner, batch = make_learner(), make_batch()

    def refuse(*arguments: object) -> tuple[Tensor, Tensor]:
        raise AssertionError("the target must not ask for an action or its value")

    learner.model.policy = refuse  # type: ignore[method-assign,assignment]
    learner.model.q_values = refuse  # type: ignore[method-assign,assignment]
    target, _ = learner.td_target(batch)
    value = learner.model.value(batch.next_obs)
    torch.testing.assert_close(target, batch.reward + 0.9 * value)


def test_critics_are_asked_about_the_actions_of_the_data_alone() -> None:
    learner, batch = make_learner(), make_batch()
    asked, answer = [], learner.model.q_values

    def listen(obs: Tensor, action: Tensor, critic: nn.Module | None = None) -> Tensor:
        asked.append((obs, action))
        return answer(obs, action, critic)

    learner.model.q_values = listen  # type: ignore[method-assign,assignment]
    learner.update(batch)
    assert len(asked) == 2
    assert all(obs is batch.obs and action is batch.action for obs, action in asked)


def test_a_terminated_row_of_a_dataset_does_not_bootstrap_and_a_truncated_one_does() -> None:
    learner = make_learner()
    make_constant(learner.model.value_net, [10.0])
    dataset = toy_data().in_learner_units(TOY)
    assert dataset.terminations.any()
    assert dataset.truncations.any()
    rows = torch.arange(len(dataset)).unsqueeze(0)
    batch = DatasetBuffer(dataset, gamma=0.9).gather(rows)
    target, _ = learner.td_target(batch)
    future = 9.0 * (1.0 - torch.from_numpy(dataset.terminations).float())
    torch.testing.assert_close(target[0], torch.from_numpy(dataset.rewards) + future)


@pytest.mark.matrix
def test_fixed_points_on_a_bandit_of_one_state() -> None:
    """Two actions pay 0 and 1, half of the data each: V = tau / (1 - gamma), Q = r + gamma V."""
    seeds, gamma = (0, 1, 2), torch.tensor([[0.0], [0.5], [0.5]])
    expectiles = [0.7, 0.7, 0.9]
    learner = make_learner(seeds, varied={"expectile": expectiles}, tau=1.0, learning_rate=0.01)
    right = torch.tensor([[0.0, 1.0] * 4]).expand(3, B)
    state, action = torch.ones(3, B, OBS), (2 * right - 1).unsqueeze(-1).expand(3, B, ACT)
    discount = gamma.expand(3, B)
    batch = make_batch(
        seeds, obs=state, action=action, reward=right, next_obs=state, discount=discount
    )
    for _ in range(500):
        learner.update(batch)
    value = torch.tensor(expectiles).unsqueeze(1) / (1 - gamma)  # [S, 1]: 0.7, 1.4, 1.8
    found = learner.model.value(state)
    torch.testing.assert_close(found, value.expand(3, B), atol=0.01, rtol=0)
    q = learner.model.q_values(state, batch.action)
    expected = (right + gamma * value).unsqueeze(1).expand(3, 2, B)
    torch.testing.assert_close(q, expected, atol=0.01, rtol=0)


def test_the_policy_prefers_the_better_action_of_the_bandit() -> None:
    """With weights e^(beta A) the mean is the weighted mean of the actions -0.5 and 0.5."""
    learner = make_learner(beta=2.0, learning_rate=0.01)
    right = torch.tensor([[0.0, 1.0] * 4])
    action = (right - 0.5).unsqueeze(-1).expand(1, B, ACT).contiguous()
    batch = make_batch(obs=torch.ones(1, B, OBS), action=action)
    for _ in range(500):
        learner.actor_optimizer.minimize(learner.actor_loss(batch, right)[0])
    expected = 0.5 * math.tanh(1.0)  # (e^2 - 1) / (e^2 + 1) of the way: V cancels
    torch.testing.assert_close(
        learner.act(batch.obs), torch.full((1, B, ACT), expected), atol=0.01, rtol=0
    )


def test_actor_and_critics_use_the_value_after_its_step() -> None:
    learner = make_learner(learning_rate=0.1, tau=0.0)
    batch, before = make_batch(), copy.deepcopy(learner)
    metrics = learner.update(batch).metrics.tensors
    value, next_value = learner.model.value(batch.obs), learner.model.value(batch.next_obs)
    assert not torch.allclose(value, before.model.value(batch.obs), atol=0.01)
    torch.testing.assert_close(metrics["value_mean"], before.model.value(batch.obs).detach())
    torch.testing.assert_close(metrics["advantage_mean"], (before.data_q(batch) - value).detach())
    torch.testing.assert_close(metrics["target_q_mean"], (batch.reward + 0.9 * next_value).detach())


def test_each_step_moves_its_own_network_alone() -> None:
    learner, batch = make_learner(), make_batch()
    model, q = learner.model, learner.data_q(batch)
    with torch.no_grad():
        target = learner.td_target(batch)[0]
    steps = {
        "value_net": (learner.value_optimizer, learner.value_loss(batch, q)[0]),
        "actor": (learner.actor_optimizer, learner.actor_loss(batch, q)[0]),
        "critic": (learner.critic_optimizer, learner.critic_loss(batch, target)[0]),
    }
    for name, (optimizer, loss) in steps.items():
        before = {part: parameters_of(getattr(model, part)) for part in steps}
        log_std, targets = model.log_std.detach().clone(), parameters_of(learner.target_critic)
        optimizer.minimize(loss)
        for part, old in before.items():
            assert same(parameters_of(getattr(model, part)), old) is (part != name)
        assert torch.equal(model.log_std, log_std) is (name != "actor")
        assert same(parameters_of(learner.target_critic), targets)


def test_targets_move_by_tau_after_the_critics() -> None:
    learner = make_learner(tau=0.005, learning_rate=0.1)
    old = parameters_of(learner.target_critic)
    learner.update(make_batch())
    new, online = parameters_of(learner.target_critic), parameters_of(learner.model.critic)
    for before, after, source in zip(old, new, online, strict=True):
        torch.testing.assert_close(after, 0.995 * before + 0.005 * source)
        assert not torch.equal(after, before)


def check_stacked(seeds: tuple[int, ...], group: IQL, singles: list[IQL]) -> None:
    for _ in range(4):
        together = group.update(make_batch(seeds)).metrics
        for index, (seed, single) in enumerate(zip(seeds, singles, strict=True)):
            alone = single.update(make_batch((seed,))).metrics
            for name, value in together.tensors.items():
                assert value[index].mean().item() == pytest.approx(
                    alone[name], rel=1e-4, abs=1e-5
                ), name
    for index, single in enumerate(singles):
        for p, q in zip(parameters_of(group.model), parameters_of(single.model), strict=True):
            torch.testing.assert_close(p[index], q[0], rtol=1e-4, atol=1e-6)


def test_stacked_seeds_equal_single_ones() -> None:
    seeds = (3, 1, 2)
    singles = [make_learner((seed,), max_grad_norm=1.0) for seed in seeds]
    check_stacked(seeds, make_learner(seeds, max_grad_norm=1.0), singles)


def test_expectile_and_beta_may_vary_between_seeds() -> None:
    seeds = (3, 1)
    group = make_learner(seeds, varied={"expectile": [0.6, 0.9], "beta": [0.0, 5.0]})
    singles = [
        make_learner((3,), expectile=0.6, beta=0.0),
        make_learner((1,), expectile=0.9, beta=5.0),
    ]
    check_stacked(seeds, group, singles)


def test_metrics_are_those_declared_and_the_pure_function_changes_nothing() -> None:
    learner = make_learner()
    losses = iql_loss(learner, make_batch())
    assert same(parameters_of(learner.model), parameters_of(make_learner().model))
    metrics = learner.update(make_batch()).metrics
    assert set(metrics) == set(losses) == set(SPEC.metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert losses["value_loss"].item() == pytest.approx(metrics["value_loss"], rel=1e-6)


def test_acting_takes_the_mean_or_samples_around_it_inside_the_bounds() -> None:
    learner, obs = make_learner(), make_batch().obs
    assert torch.equal(learner.act(obs), learner.model.policy(obs)[0])
    sampled = learner.act(obs, explore=True)
    assert sampled.abs().max() <= 1
    assert not torch.equal(sampled, learner.act(obs, explore=True))


def test_observations_are_standardised_when_asked() -> None:
    plain, scaled = make_learner(), make_learner(normalize_observations=True)
    batch = make_batch()
    for learner in (plain, scaled):
        learner.obs_norm.update(batch.obs * 5 + 3)
    inputs = scaled.obs_norm(batch.obs)
    torch.testing.assert_close(scaled.act(batch.obs), plain.act(inputs))
    ours = iql_loss(scaled, batch)["value_mean"]
    torch.testing.assert_close(ours, plain.model.value(inputs))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"expectile": 1.0}, r"expectile must be < 1, got 1\.0"),
        ({"expectile": 0.0}, r"expectile must be > 0, got 0\.0"),
        ({"beta": -1.0}, r"beta must be >= 0, got -1\.0"),
        ({"max_advantage_weight": 0.0}, r"max_advantage_weight must be > 0, got 0\.0"),
        ({"expectle": 0.7}, r"expectle is not a field of IQLConfig \(did you mean expectile\?\)"),
    ],
)
def test_a_wrong_keyword_names_field_rule_and_value(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(**keywords)


def test_the_actors_own_schedule_leaves_the_other_rates_alone() -> None:
    learner = make_learner(actor_lr_schedule={"type": "cosine"}, learning_rate=1e-3)
    for progress, factor in ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0)):
        learner.set_progress(progress)
        assert learner.actor_optimizer.rate_of() == pytest.approx(1e-3 * factor, abs=1e-9)
        assert learner.critic_optimizer.rate_of() == pytest.approx(1e-3)
        assert learner.value_optimizer.rate_of() == pytest.approx(1e-3)


def test_a_callbacks_factor_reaches_the_actors_own_schedule_too() -> None:
    learner = make_learner(actor_lr_schedule={"type": "cosine"}, learning_rate=1e-3)
    learner.rate_factor = 0.5
    learner.set_progress(0.5)
    assert learner.actor_optimizer.rate.value == pytest.approx(2.5e-4)
    assert learner.critic_optimizer.rate.value == pytest.approx(5e-4)


def test_without_one_the_actor_follows_the_common_schedule() -> None:
    learner = make_learner(lr_schedule={"type": "linear"}, learning_rate=1e-3)
    learner.set_progress(0.25)
    assert learner.actor_optimizer.rate_of() == pytest.approx(0.75e-3)


# Dropout in the policy, and the value's normalisation


def test_dropout_is_that_of_numpy_and_leaves_no_trace() -> None:
    learner, batch = make_learner(policy_dropout=0.3), make_batch()
    rng = copy.deepcopy(learner.rng)
    loss, metrics = learner.actor_loss(batch)
    mask = (rng.uniform(B, 16) >= 0.3).double() / 0.7
    assert 0 < (mask == 0).float().mean() < 1
    assert isinstance(learner.model.actor, StackedMLP)
    hidden, output = learner.model.actor.layers
    values = [p.detach().double() for layer in (hidden, output) for p in layer.parameters()]
    activity = torch.relu(batch.obs.double() @ values[0] + values[1]) * mask
    mean = torch.tanh(activity @ values[2] + values[3])
    log_prob = (-0.5 * (batch.action - mean).square() - 0.5 * math.log(2 * math.pi)).sum(-1)
    expected = -(metrics["weight_mean"].double() * log_prob).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    # Acting drops nothing.
    assert torch.equal(learner.act(batch.obs), make_learner().act(batch.obs))


def test_without_dropout_nothing_is_drawn() -> None:
    learner = make_learner()
    learner.update(make_batch())
    assert learner.rng.counter == 0


def test_dropout_touches_neither_value_nor_critics() -> None:
    plain, dropped = make_learner(), make_learner(policy_dropout=0.5)
    for learner in (plain, dropped):
        learner.update(make_batch())
    for name in ("critic", "value_net"):
        ours, theirs = getattr(dropped.model, name), getattr(plain.model, name)
        assert same(parameters_of(ours), parameters_of(theirs)), name
    assert not same(parameters_of(dropped.model.actor), parameters_of(plain.model.actor))


def test_on_average_dropout_leaves_a_linear_network_as_it_is() -> None:
    """Kept outputs are scaled up: the mean over masks is the answer without them."""
    network = StackedMLP((OBS, 64, 1), Rng((0,), "networks"))
    x = torch.ones(1, 20_000, OBS)
    with dropout(network, 0.25, 20_000, Rng((1,), "masks")), torch.no_grad():
        answers = network.forward(x)
    assert network.masks is None
    expected = network.forward(x[:, :1]).item()
    assert answers.mean().item() == pytest.approx(expected, abs=4 * answers.std().item() / 141)
    assert answers.std() > 0.01


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_outside_of_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="policy_dropout must be"):
        make_learner(policy_dropout=rate)


def test_the_value_is_normalised_when_asked_to() -> None:
    env, settings = probe_env("Pendulum-v1"), dict[str, Any](use_layer_norm=True)
    plain = SPEC.build(env, SPEC.config_class(**settings), (0,))
    settings["value_layer_norm"] = True
    both = SPEC.build(env, SPEC.config_class(**settings), (0,))
    assert isinstance(plain, IQL)
    assert isinstance(both, IQL)
    norms = [
        [len(n.norms) for n in (model.actor, model.critic, model.value_net)]  # type: ignore[arg-type]
        for model in (plain.model, both.model)
    ]
    assert norms == [[0, 2, 0], [0, 2, 2]]

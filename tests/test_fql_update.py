"""FQL's update: the flow, the one-step policy between flow and critics, limiting cases."""

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

from helpers.updates import ACT, OBS, B, make_batch, make_constant, parameters_of, same
from rl_training.algorithms.fql import FQL, SPEC, fql_loss
from rl_training.data.batch import TransitionBatch
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.models.actor_with_critics import MLPFQLModel
from rl_training.models.layers import StackedMLP
from rl_training.rng import Rng

Array = NDArray[Any]


def make_model(seeds: tuple[int, ...] = (0,)) -> MLPFQLModel:
    return MLPFQLModel(
        OBS,
        ACT,
        (16, 16),
        activation="gelu",
        use_layer_norm=True,
        weight_init="glorot",
        rng=Rng(seeds, "networks"),
    )


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> FQL:
    return FQL(model=make_model(seeds), seeds=seeds, **keywords)


# An independent version in NumPy: one seed, double precision, every network by its own loops


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def gelu(x: Array) -> Array:
    answer: Array = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return answer


def layer_norm(x: Array, scale: Array, shift: Array) -> Array:
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    answer: Array = (x - x.mean(-1, keepdims=True)) / deviation * scale + shift
    return answer


def network_of(network: nn.Module, x: Array, member: int | None = None) -> Array:
    """Answer of one seed's network, or of one of its members, to rows `[B, I]`."""
    values = {name: array(value)[0] for name, value in network.named_parameters()}
    if member is not None:
        values = {name: value[member] for name, value in values.items()}
    assert isinstance(network, StackedMLP)
    last = len(network.layers) - 1
    for index in range(last):
        x = x @ values[f"layers.{index}.weight"] + values[f"layers.{index}.bias"]
        if len(network.norms) > 0:
            x = layer_norm(x, values[f"norms.{index}.scale"], values[f"norms.{index}.shift"])
        x = gelu(x)
    answer: Array = x @ values[f"layers.{last}.weight"] + values[f"layers.{last}.bias"]
    return answer


def q_of(critic: nn.Module, obs: Array, action: Array) -> Array:
    """Q of both critics, `[2, B]`."""
    x = np.concatenate((obs, action), -1)
    return np.stack([network_of(critic, x, member)[:, 0] for member in (0, 1)])


def policy_of(model: MLPFQLModel, obs: Array, noise: Array) -> Array:
    return network_of(model.actor, np.concatenate((obs, noise), -1))


def euler(model: MLPFQLModel, obs: Array, noise: Array, steps: int) -> Array:
    action = noise.copy()
    for index in range(steps):
        time = np.full((len(obs), 1), index / steps)
        action += network_of(model.flow, np.concatenate((obs, action, time), -1)) / steps
    return np.clip(action, -1, 1)


# The target


@pytest.mark.parametrize("q_agg", ["mean", "min"])
def test_the_target_is_that_of_numpy(q_agg: str) -> None:
    learner, batch = make_learner(q_agg=q_agg), make_batch()
    rng = copy.deepcopy(learner.rng)
    target, _ = learner.td_target(batch)
    obs = array(batch.next_obs)[0]
    action = np.clip(policy_of(learner.model, obs, array(rng.normal(B, ACT))[0]), -1, 1)
    q = q_of(learner.target_critic, obs, action)
    value = q.min(0) if q_agg == "min" else q.mean(0)
    expected = array(batch.reward)[0] + array(batch.discount)[0] * value
    np.testing.assert_allclose(array(target)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("q_agg", "expected"), [("mean", 1 + 0.9 * 6), ("min", 1 + 0.9 * 5)])
def test_the_target_by_hand(q_agg: str, expected: float) -> None:
    learner = make_learner(q_agg=q_agg)
    make_constant(learner.target_critic, [5.0, 7.0])
    target, _ = learner.td_target(make_batch(reward=torch.ones(1, B)))
    torch.testing.assert_close(target, torch.full((1, B), expected))


def test_a_termination_is_worth_its_reward_alone() -> None:
    batch = make_batch(discount=torch.zeros(1, B))
    assert torch.equal(make_learner().td_target(batch)[0], batch.reward)


def test_the_targets_action_is_clipped_to_the_box() -> None:
    learner, batch = make_learner(), make_batch()
    make_constant(learner.model.actor, [9.0, -9.0])
    corner = torch.tensor([1.0, -1.0]).expand(1, B, ACT)
    q = learner.model.q_values(batch.next_obs, corner, learner.target_critic).mean(1)
    torch.testing.assert_close(learner.td_target(batch)[0], batch.reward + 0.9 * q)


# The flow


def test_the_flow_loss_is_that_of_numpy() -> None:
    learner, batch = make_learner(), make_batch()
    rng = copy.deepcopy(learner.rng)
    loss = learner.flow_loss(batch)
    start, time = array(rng.normal(B, ACT))[0], array(rng.uniform(B, 1))[0]
    obs, action = array(batch.obs)[0], array(batch.action)[0]
    total = 0.0
    for row in range(B):
        position = (1 - time[row]) * start[row] + time[row] * action[row]
        x = np.concatenate((obs[row], position, time[row]))[None]
        velocity = network_of(learner.model.flow, x)[0]
        for entry in range(ACT):
            total += (velocity[entry] - (action[row, entry] - start[row, entry])) ** 2
    assert loss.item() == pytest.approx(total / (B * ACT), rel=1e-4)


@pytest.mark.parametrize("steps", [1, 10])
def test_eulers_method_is_that_of_numpy(steps: int) -> None:
    model, batch, noise = make_model(), make_batch(), Rng((0,), "noise").normal(B, ACT)
    ours = array(model.flow_action(batch.obs, noise, steps))[0]
    expected = euler(model, array(batch.obs)[0], array(noise)[0], steps)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_a_constant_velocity_moves_noise_by_itself_in_any_number_of_steps(steps: int) -> None:
    model = make_model()
    make_constant(model.flow, [0.25, -5.0])
    noise = torch.tensor([0.5, 0.0]).expand(1, B, ACT)
    action = model.flow_action(make_batch().obs, noise, steps)
    torch.testing.assert_close(action, torch.tensor([0.75, -1.0]).expand(1, B, ACT))


def test_the_flow_learns_the_two_modes_of_the_data_and_not_their_mean() -> None:
    """One state, half of the actions at -0.6 and half at 0.6: noise goes to one or the other."""
    learner, rows = make_learner(), 256
    optimizer = torch.optim.Adam(learner.model.flow.parameters(), 0.01)
    rng = Rng((1,), "modes")
    obs = torch.zeros(1, rows, OBS)
    for _ in range(500):
        sign = (rng.uniform(rows, 1) < 0.5).float() * 2 - 1
        action = (0.6 * sign).expand(-1, -1, ACT)
        loss = learner.flow_loss(replace(make_batch(), obs=obs, action=action))
        torch.autograd.backward(loss.sum())
        optimizer.step()
        optimizer.zero_grad()
    noise = rng.normal(rows, ACT)
    with torch.no_grad():
        action = learner.model.flow_action(obs, noise, 10)
    near = (action.abs() - 0.6).abs() < 0.25
    assert near.float().mean() > 0.8
    assert 0.3 < (action > 0).float().mean() < 0.7
    assert (action.sign()[..., 0] == action.sign()[..., 1]).float().mean() > 0.8


# The policy


@pytest.mark.parametrize("normalize_q", [True, False])
def test_the_actor_loss_is_that_of_numpy(normalize_q: bool) -> None:
    learner, batch = make_learner(alpha=3.0, flow_steps=4, normalize_q=normalize_q), make_batch()
    rng = copy.deepcopy(learner.rng)
    loss, metrics = learner.actor_loss(batch)
    rng.normal(B, ACT), rng.uniform(B, 1)  # the flow's own
    noise = array(rng.normal(B, ACT))[0]
    obs, model = array(batch.obs)[0], learner.model
    action = policy_of(model, obs, noise)
    distance = ((action - euler(model, obs, noise, 4)) ** 2).mean()
    q = q_of(model.critic, obs, np.clip(action, -1, 1)).mean(0)
    weight = 1 / np.abs(q).mean() if normalize_q else 1.0
    expected = metrics["flow_loss"].item() + 3.0 * distance - weight * q.mean()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert metrics["distillation_loss"].item() == pytest.approx(distance, rel=1e-4)
    assert metrics["q_weight"].item() == pytest.approx(weight, rel=1e-4)
    np.testing.assert_allclose(array(metrics["q_mean"])[0], q, rtol=1e-4, atol=1e-5)


def gradients(loss: Tensor, network: nn.Module) -> list[Tensor | None]:
    parameters = list(network.parameters())
    return list(torch.autograd.grad(loss.sum(), parameters, retain_graph=True, allow_unused=True))


def test_the_flow_learns_from_the_data_alone() -> None:
    """No gradient of distillation or Q reaches the flow."""
    learner, batch = make_learner(alpha=100.0), make_batch()
    alone = copy.deepcopy(learner)
    ours = gradients(learner.actor_loss(batch)[0], learner.model.flow)
    expected = gradients(alone.flow_loss(batch), alone.model.flow)
    for first, second in zip(ours, expected, strict=True):
        assert first is not None
        assert second is not None
        torch.testing.assert_close(first, second)


def test_the_policys_gradient_is_that_of_distillation_and_the_mean_of_the_critics() -> None:
    learner, batch = make_learner(alpha=2.0, normalize_q=True), make_batch()
    rng = copy.deepcopy(learner.rng)
    ours = gradients(learner.actor_loss(batch)[0], learner.model.actor)
    rng.normal(B, ACT), rng.uniform(B, 1)
    noise, model = rng.normal(B, ACT), learner.model
    cloned = model.flow_action(batch.obs, noise, 10).detach()
    action = model.policy(batch.obs, noise)
    q = model.q_values(batch.obs, action.clamp(-1, 1))
    mean = (q[:, 0] + q[:, 1]) / 2
    loss = 2.0 * (action - cloned).square().mean() - mean.mean() / mean.abs().mean().item()
    for first, second in zip(ours, gradients(loss, model.actor), strict=True):
        assert first is not None
        assert second is not None
        torch.testing.assert_close(first, second)


def test_without_distillation_the_policy_ignores_flow_and_data() -> None:
    batch = make_batch()
    learners = make_learner(alpha=0.0), make_learner(alpha=0.0)
    make_constant(learners[1].model.flow, [0.3, 0.3])
    batches = batch, replace(batch, action=-batch.action)
    pair = [
        gradients(learner.actor_loss(one)[0], learner.model.actor)
        for learner, one in zip(learners, batches, strict=True)
    ]
    for first, second in zip(*pair, strict=True):
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)


def test_with_a_large_alpha_the_policy_becomes_the_flow() -> None:
    learner, batch = make_learner(alpha=1e6, learning_rate=0.01), make_batch()
    for _ in range(400):
        learner.update(batch)
    noise = Rng((3,), "noise").normal(B, ACT)
    with torch.no_grad():
        action = learner.model.policy(batch.obs, noise)
        cloned = learner.model.flow_action(batch.obs, noise, 10)
    assert (action - cloned).abs().mean() < 0.15


def test_the_critics_have_no_gradient_outside_of_the_box() -> None:
    learner, batch = make_learner(alpha=0.0), make_batch()
    make_constant(learner.model.actor, [2.0, -2.0])
    flat = gradients(learner.actor_loss(batch)[0], learner.model.actor)
    assert all(gradient is not None and (gradient == 0).all() for gradient in flat)


# Acting


def test_the_noise_makes_the_action_and_none_is_the_centre() -> None:
    learner, batch = make_learner(), make_batch()
    rng = copy.deepcopy(learner.rng)
    zero = torch.zeros(1, B, ACT)
    assert torch.equal(learner.act(batch.obs), learner.model.policy(batch.obs, zero).clamp(-1, 1))
    explored = learner.act(batch.obs, explore=True)
    expected = learner.model.policy(batch.obs, rng.normal(B, ACT)).clamp(-1, 1)
    assert torch.equal(explored, expected)
    assert not torch.equal(explored, learner.act(batch.obs, explore=True))


def test_actions_are_in_the_box() -> None:
    learner, batch = make_learner(), make_batch()
    make_constant(learner.model.actor, [7.0, -7.0])
    for explore in (True, False):
        action = learner.act(batch.obs, explore=explore)
        assert torch.equal(action, torch.tensor([1.0, -1.0]).expand(1, B, ACT))


def test_a_run_is_evaluated_by_samples_unless_it_says_otherwise() -> None:
    given: dict[str, Any] = {"algo": "fql", "env_id": "Pendulum-v1"}
    assert TrainConfig(**given).eval_deterministic is False
    assert TrainConfig(**given, eval_deterministic=True).eval_deterministic is True
    assert load_config("fql/pendulum").eval_deterministic is False
    assert TrainConfig(algo="iql", env_id="Pendulum-v1").eval_deterministic is True


# What an update moves, and seeds


def test_an_update_moves_every_network_and_targets_by_tau() -> None:
    learner = make_learner(tau=0.25)
    model = learner.model
    networks = (model.actor, model.flow, model.critic, learner.target_critic)
    before = [parameters_of(network) for network in networks]
    learner.update(make_batch())
    after = [parameters_of(network) for network in networks]
    for first, second in zip(before, after, strict=True):
        assert not same(first, second)
    for old, new, critic in zip(before[3], after[3], after[2], strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * critic)


def test_the_pure_losses_are_those_of_the_update_and_change_nothing() -> None:
    learner = make_learner()
    probe = copy.deepcopy(learner)
    losses = fql_loss(probe, make_batch())
    metrics = learner.update(make_batch()).metrics
    assert set(metrics) == set(SPEC.metrics) == set(losses)
    for name in ("critic_loss", "flow_loss", "distillation_loss"):
        assert losses[name].item() == pytest.approx(metrics[name], rel=1e-6), name
    assert same(parameters_of(probe.model), parameters_of(make_model()))


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
                assert ours == pytest.approx(alone[name], rel=1e-3, abs=1e-4), name


def test_alpha_may_differ_between_members() -> None:
    alphas = (0.5, 20.0)
    group = FQL(model=make_model((5, 5)), seeds=(5, 5), varied={"alpha": alphas})
    batch = make_batch((5, 5))
    loss = group.actor_loss(batch)[0]
    for index, alpha in enumerate(alphas):
        single = make_learner((5,), alpha=alpha)
        alone: TransitionBatch = make_batch((5,))
        torch.testing.assert_close(loss[index : index + 1], single.actor_loss(alone)[0])

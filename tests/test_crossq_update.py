"""CrossQ's update: the joint pass, who moves which statistics, and what has no gradient."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.settings import settings_of
from helpers.updates import ACT, OBS, B, make_batch, parameters_of, same
from rl_training.algorithms.crossq import CrossQ
from rl_training.errors import ConfigError
from rl_training.models.actor_with_critics import MLPCrossQModel
from rl_training.models.batch_renorm import StackedBatchRenorm, batch_statistics
from rl_training.rng import Rng

Array = NDArray[np.float64]


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> CrossQ:
    critics = keywords.get("num_critics", 2)
    model = MLPCrossQModel(
        OBS, ACT, (8,), num_critics=critics, renorm_warmup=2, rng=Rng(seeds, "networks")
    )
    return CrossQ(model=model, seeds=seeds, **keywords)


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def renorms(network: torch.nn.Module) -> list[StackedBatchRenorm]:
    return [part for part in network.modules() if isinstance(part, StackedBatchRenorm)]


def statistics_of(network: torch.nn.Module) -> list[Tensor]:
    return [
        tensor.clone()
        for layer in renorms(network)
        for tensor in (layer.mean, layer.variance, layer.steps)
    ]


def test_the_loss_is_that_of_numpy_with_both_halves_in_one_batch() -> None:
    learner = make_learner(alpha=0.3)
    batch, twin = make_batch(), copy.deepcopy(learner)
    loss, metrics, td_error = learner.regress(batch)
    action, log_prob = twin.sample_action(batch.next_obs)
    rows = np.concatenate(
        (
            np.concatenate((array(batch.obs)[0], array(batch.action)[0]), -1),
            np.concatenate((array(batch.next_obs)[0], array(action)[0]), -1),
        )
    )

    def normalised(h: Array) -> Array:
        result: Array = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-3)
        return result

    q = []
    critic: Any = twin.model.critic
    for member in range(2):
        first, last = (
            (array(layer.weight)[0, member], array(layer.bias)[0, member])
            for layer in critic.layers
        )
        hidden = normalised(np.maximum(normalised(rows) @ first[0] + first[1], 0))
        q.append((hidden @ last[0] + last[1])[:, 0])
    soft = np.minimum(*(each[B:] for each in q)) - 0.3 * array(log_prob)[0]
    target = array(batch.reward)[0] + 0.9 * soft
    errors = [each[:B] - target for each in q]
    assert loss.item() == pytest.approx(sum(np.square(e).mean() for e in errors), rel=1e-4)
    np.testing.assert_allclose(array(metrics["target_q_mean"])[0], target, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(array(td_error)[0], np.abs(errors).mean(0), rtol=1e-4, atol=1e-5)


def critic_gradient(learner: CrossQ, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss.sum(), list(learner.model.critic.parameters()))
    return torch.cat([gradient.flatten() for gradient in found])


def test_no_gradient_flows_through_the_target() -> None:
    learner = make_learner(alpha=0.3)
    batch, twin, other = make_batch(), copy.deepcopy(learner), copy.deepcopy(learner)
    gradient = critic_gradient(learner, learner.regress(batch)[0])

    def loss_of(model: CrossQ, *, detached: bool) -> Tensor:
        with torch.no_grad():
            action, log_prob = model.sample_action(batch.next_obs)
        obs = torch.cat((batch.obs, batch.next_obs), 1)
        with batch_statistics(model.model.critic):
            q = model.model.q_values(obs, torch.cat((batch.action, action), 1))
        soft = q[..., B:].amin(1) - 0.3 * log_prob
        target = batch.reward + 0.9 * (soft.detach() if detached else soft)
        return (q[..., :B] - target.unsqueeze(1)).square().mean(-1).sum(1)

    torch.testing.assert_close(gradient, critic_gradient(twin, loss_of(twin, detached=True)))
    through = critic_gradient(other, loss_of(other, detached=False))
    assert not torch.allclose(gradient, through)


def test_there_are_no_target_critics() -> None:
    learner = make_learner()
    assert not any("target" in name for name in learner.state_dict())


def test_the_joint_pass_alone_moves_the_critics_statistics_and_the_loss_the_actors() -> None:
    learner, batch = make_learner(), make_batch()
    actor, critic = learner.model.actor, learner.model.critic
    before = statistics_of(actor), statistics_of(critic)
    learner.regress(batch)
    assert same(before[0], statistics_of(actor)), "draws at s' are by running statistics"
    moved = statistics_of(critic)
    assert not same(before[1], moved)
    learner.actor_loss(batch)
    assert same(moved, statistics_of(critic)), "the actor's loss evaluates the critics"
    moved = statistics_of(actor)
    assert not same(before[0], moved)
    learner.act(batch.obs, explore=True)
    learner.act(batch.obs)
    assert same(moved, statistics_of(actor))


def test_batches_are_counted_by_each_network() -> None:
    learner = make_learner()
    for key in range(7):
        learner.update(make_batch(key=str(key)))
    assert {float(layer.steps) for layer in renorms(learner.model.critic)} == {7.0}
    assert {float(layer.steps) for layer in renorms(learner.model.actor)} == {2.0}


def test_acting_is_by_running_statistics() -> None:
    learner = make_learner()
    for key in range(4):
        learner.update(make_batch(key=str(key)))
    obs = make_batch().obs
    actor: Any = learner.model.actor
    layers = [(array(layer.weight)[0], array(layer.bias)[0]) for layer in actor.layers]

    def normalised(h: Array, layer: StackedBatchRenorm) -> Array:
        mean, var = array(layer.mean)[0], array(layer.variance)[0]
        scale, shift = array(layer.scale)[0], array(layer.shift)[0]
        result: Array = (h - mean) / np.sqrt(var + 1e-3) * scale + shift
        return result

    first, second = renorms(actor)
    h = np.maximum(normalised(array(obs)[0], first) @ layers[0][0] + layers[0][1], 0)
    out = normalised(h, second) @ layers[1][0] + layers[1][1]
    np.testing.assert_allclose(
        array(learner.act(obs))[0], np.tanh(out[:, :ACT]), rtol=1e-4, atol=1e-5
    )


def test_the_actor_moves_at_every_third_update() -> None:
    learner, moved = make_learner(), []
    for count in range(7):
        actor, critic = parameters_of(learner.model.actor), parameters_of(learner.model.critic)
        learner.update(make_batch(key=str(count)))
        assert not same(critic, parameters_of(learner.model.critic))
        if not same(actor, parameters_of(learner.model.actor)):
            moved.append(count)
    assert moved == [2, 5]


def test_a_drawn_subset_of_critics_gives_the_target() -> None:
    learner = make_learner(num_critics=4, num_target_critics=1, alpha=1e-6)
    batch, twin = make_batch(), copy.deepcopy(learner)
    _, metrics, _ = learner.regress(batch)
    with torch.no_grad():
        action, _ = twin.sample_action(batch.next_obs)
    obs = torch.cat((batch.obs, batch.next_obs), 1)
    with batch_statistics(twin.model.critic), torch.no_grad():
        q = twin.model.q_values(obs, torch.cat((batch.action, action), 1))[..., B:]
    member = int(twin.rng.permutation(4)[0, 0])
    expected = batch.reward + 0.9 * q[:, member]
    torch.testing.assert_close(metrics["target_q_mean"], expected, rtol=1e-4, atol=1e-4)


def test_there_is_nothing_that_tau_could_move() -> None:
    with pytest.raises(ConfigError, match="tau must be >= 1"):
        settings_of(CrossQ, tau=0.005)
    assert "tau" not in settings_of(CrossQ).may_vary()


def test_defaults_are_those_of_the_authors() -> None:
    config: Any = settings_of(CrossQ)
    assert (config.critic_hidden_sizes, config.hidden_sizes) == ((2048, 2048), (256, 256))
    assert (config.policy_delay, config.num_critics, config.actor_q) == (3, 2, "min")
    assert (config.renorm_momentum, config.renorm_warmup) == (0.99, 100_000)
    assert (config.learning_rate, config.learning_starts) == (1e-3, 5000)
    learner: Any = make_learner()
    assert learner.critic_optimizer.betas == learner.actor_optimizer.betas == (0.5, 0.999)
    assert learner.alpha_optimizer.betas == (0.9, 0.999)

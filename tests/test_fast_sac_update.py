"""FastSAC's update: the soft target's distribution, the policy's bounds, and limiting cases.

The projection and clipped double Q are tested in `test_fast_td3_update.py`, the rest in
`test_sac_update.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.settings import settings_of
from helpers.updates import ACT, OBS, B, last_layer, make_batch, make_constant, parameters_of, same
from rl_training.algorithms.fast_sac import FastSAC
from rl_training.models.categorical_critics import MLPFastSACModel
from rl_training.models.layers import StackedMLP
from rl_training.rng import Rng

K, LOW, HIGH = 7, -2.0, 4.0
ATOMS = np.linspace(LOW, HIGH, K)
Array = NDArray[np.float64]


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> FastSAC:
    settings = {"num_atoms": K, "v_min": LOW, "v_max": HIGH} | keywords
    atoms = {name: settings[name] for name in ("num_atoms", "v_min", "v_max")}
    model = MLPFastSACModel(
        OBS, ACT, (16,), use_layer_norm=True, rng=Rng(seeds, "networks"), **atoms
    )
    return FastSAC(model=model, seeds=seeds, **settings)


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def projected(moved: Array, probability: Array) -> Array:
    """Each atom's share by its distance, for one distribution."""
    place = np.clip(moved, LOW, HIGH)
    share = np.clip(1 - np.abs(place - ATOMS[:, None]) / (ATOMS[1] - ATOMS[0]), 0, None)
    out: Array = share @ probability
    return out


@pytest.mark.parametrize("use_cdq", [True, False])
@torch.no_grad()
def test_the_target_is_that_of_numpy(use_cdq: bool) -> None:
    learner = make_learner(initial_alpha=0.3, use_cdq=use_cdq)
    last_layer(learner.target_critic).weight.mul_(20)
    batch = make_batch(discount=torch.tensor([[0.9, 0.0] * (B // 2)]))  # every other row ends
    twin = copy.deepcopy(learner)
    target, metrics = learner.td_target(batch)
    action, log_prob = twin.sample_action(batch.next_obs)
    log_probs = twin.model.value_log_probs(batch.next_obs, action, twin.target_critic)
    probability, entropy = np.exp(array(log_probs[0])), -0.3 * array(log_prob[0])
    assert target.shape == (1, 1 if use_cdq else 2, B, K)
    for row in range(B):
        reward, discount = float(batch.reward[0, row]), float(batch.discount[0, row])
        moved = reward + discount * (ATOMS + entropy[row])
        each = [projected(moved, probability[critic, row]) for critic in range(2)]
        if use_cdq:
            each = [min(each, key=lambda p: float(p @ ATOMS))]
        np.testing.assert_allclose(array(target)[0, :, row], each, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(array(metrics["entropy_term"])[0], entropy, rtol=1e-5)


@torch.no_grad()
def test_with_room_on_both_sides_the_targets_mean_is_that_of_sac() -> None:
    learner = make_learner(v_min=-100.0, v_max=100.0, num_atoms=201, alpha=0.2, use_cdq=True)
    last_layer(learner.target_critic).weight.mul_(20)
    batch, twin = make_batch(), copy.deepcopy(learner)
    _, metrics = learner.td_target(batch)
    action, log_prob = twin.sample_action(batch.next_obs)
    q = twin.model.q_values(batch.next_obs, action, twin.target_critic)
    expected, _ = twin.soft_target(batch, q, log_prob)
    torch.testing.assert_close(metrics["target_q_mean"], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("actor_q", "expected"), [("min", 1.0), ("mean", 2.0)])
def test_the_actor_climbs_the_least_critic_or_the_mean(actor_q: str, expected: float) -> None:
    learner = make_learner(actor_q=actor_q, alpha=1e-6)
    certain = [-1e4] * (2 * K)
    certain[5] = certain[K + 3] = 0.0  # returns 3 and 1
    make_constant(learner.model.critic, certain)
    loss, metrics = learner.actor_loss(make_batch())
    assert loss.item() == pytest.approx(-expected, abs=1e-4)
    torch.testing.assert_close(metrics["q_mean"], torch.full((1, B), expected))


@torch.no_grad()
def test_the_policy_begins_near_zero_and_its_deviation_stays_in_its_range() -> None:
    learner = make_learner()
    mean, log_std = learner.model.policy(make_batch().obs)
    assert float(mean.abs().max()) < 0.2
    torch.testing.assert_close(log_std, torch.full_like(log_std, -2.5), atol=0.3, rtol=0)
    for raw, bound in ((100.0, 0.0), (-100.0, -5.0)):
        make_constant(learner.model.actor, [0.0] * ACT + [raw] * ACT)
        assert torch.equal(
            learner.model.policy(make_batch().obs)[1], torch.full((1, B, ACT), bound)
        )


def test_every_network_has_its_norms() -> None:
    model = make_learner().model
    for network in (model.actor, model.critic):
        assert isinstance(network, StackedMLP)
        assert len(network.norms) == 1


def test_the_policy_moves_in_every_fourth_update_and_targets_in_each() -> None:
    learner = make_learner()
    for count in range(8):
        actor, target = (parameters_of(m) for m in (learner.model.actor, learner.target_critic))
        learner.update(make_batch(key=f"{count}"))
        assert same(actor, parameters_of(learner.model.actor)) == (count % 4 != 3)
        assert not same(target, parameters_of(learner.target_critic))


def test_defaults_are_those_of_the_authors_code() -> None:
    config: Any = settings_of(FastSAC)
    assert (config.actor_hidden_sizes, config.critic_hidden_sizes) == (
        (512, 256, 128),
        (768, 384, 192),
    )
    assert (config.batch_size, config.gradient_updates_per_step) == (8_192, 8)
    assert (config.num_atoms, config.v_min, config.v_max) == (101, -20.0, 20.0)
    assert (config.tau, config.gamma, config.learning_rate) == (0.125, 0.97, 3e-4)
    assert (config.initial_alpha, config.target_entropy, config.policy_delay) == (0.001, 0.0, 4)
    assert (config.optimizer.type, config.optimizer.weight_decay) == ("adamw", 0.001)
    assert (config.optimizer.betas, config.activation) == ((0.9, 0.95), "silu")
    assert (config.use_layer_norm, config.use_cdq, config.actor_q) == (True, False, "mean")

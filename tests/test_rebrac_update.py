"""ReBRAC's update: the penalty of the next action, the policy's loss, limiting cases.

What it shares with TD3 is tested in `test_td3_update.py`.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.datasets import rebuilt, tiny_columns, toy_data, write_columns
from helpers.updates import ACT, OBS, B, actor_gradient, make_constant, parameters_of, same
from helpers.updates import make_batch as plain_batch
from rl_training.algorithms.rebrac import SPEC, ReBRAC, rebrac_loss
from rl_training.algorithms.td3 import TD3
from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.envs.factory import probe_env
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.config import load_config
from rl_training.models.actor_with_critics import MLPTD3Model
from rl_training.rng import Rng
from rl_training.runtime.replay import load_buffer


def make_model(seeds: tuple[int, ...] = (0,), act: int = ACT, obs: int = OBS) -> MLPTD3Model:
    return MLPTD3Model(obs, act, (16,), use_layer_norm=True, rng=Rng(seeds, "networks"))


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> ReBRAC:
    return ReBRAC(model=make_model(seeds), seeds=seeds, **keywords)


def make_batch(seeds: tuple[int, ...] = (0,), **changes: Tensor) -> TransitionBatch:
    """Random transitions; every third has no next action."""
    next_action = Rng(seeds, "next").uniform(B, ACT) * 2 - 1
    mask = (torch.arange(B) % 3 > 0).float().expand(len(seeds), -1)
    values = {"next_action": next_action, "next_action_mask": mask}
    return replace(plain_batch(seeds), **(values | changes))


def array(tensor: Tensor | None) -> np.ndarray[Any, Any]:
    assert tensor is not None
    return tensor.detach().double().numpy()


# The target


def test_the_target_by_hand() -> None:
    """One row of two entries: y = 1 + 0.9 (min(5, 7) - 0.5 (0.3^2 + 0.4^2)) = 5.3875."""
    learner = make_learner(beta_critic=0.5, policy_noise=0.0)
    make_constant(learner.target_critic, [5.0, 7.0])
    make_constant(learner.target_actor, [0.0, 0.0])
    next_action = torch.tensor([0.3, -0.4]).expand(1, B, ACT)
    ones = torch.ones(1, B)
    batch = make_batch(next_action=next_action, next_action_mask=ones, reward=ones)
    target, metrics = learner.td_target(batch)
    torch.testing.assert_close(target, torch.full((1, B), 5.3875))
    torch.testing.assert_close(metrics["next_action_penalty"], torch.full((1, B), 0.25))


def test_the_target_is_that_of_numpy_with_noise_and_mask() -> None:
    learner, batch = make_learner(beta_critic=0.7), make_batch()
    rng = copy.deepcopy(learner.rng)
    target, _ = learner.td_target(batch)
    noise = np.clip(0.2 * array(rng.normal(B, ACT)), -0.5, 0.5)
    policy = array(learner.model.policy(batch.next_obs, learner.target_actor))
    action = np.clip(policy + noise, -1, 1)
    q = array(
        learner.model.q_values(
            batch.next_obs, torch.from_numpy(action).float(), learner.target_critic
        )
    )
    penalty = np.zeros((1, B))
    for row in range(B):
        if array(batch.next_action_mask)[0, row]:
            for entry in range(ACT):
                penalty[0, row] += (action - array(batch.next_action))[0, row, entry] ** 2
    expected = array(batch.reward) + array(batch.discount) * (q.min(1) - 0.7 * penalty)
    np.testing.assert_allclose(array(target), expected, rtol=1e-5, atol=1e-5)


def test_without_its_penalty_the_critics_learn_as_td3s() -> None:
    ours, batch = make_learner(beta_critic=0.0), make_batch()
    theirs = TD3(model=make_model(), seeds=(0,))
    with torch.no_grad():
        target, other = ours.td_target(batch)[0], theirs.td_target(batch)[0]
    assert torch.equal(target, other)
    assert torch.equal(ours.critic_loss(batch, target)[0], theirs.critic_loss(batch, other)[0])


def test_the_penalty_lowers_the_target_in_proportion_to_its_weight() -> None:
    batch = make_batch()
    none, one, two = (make_learner(beta_critic=b).td_target(batch)[0] for b in (0.0, 1.0, 2.0))
    assert ((none - one)[batch.next_action_mask == 1] > 0).all()
    torch.testing.assert_close(none - two, 2 * (none - one), atol=1e-5, rtol=1e-4)


def test_a_row_without_a_next_action_has_td3s_target() -> None:
    batch = make_batch()
    with_penalty, without = (make_learner(beta_critic=b).td_target(batch)[0] for b in (9.0, 0.0))
    missing = batch.next_action_mask == 0
    assert torch.equal(with_penalty[missing], without[missing])
    assert not torch.isclose(with_penalty, without)[~missing].any()


def test_what_fills_a_masked_next_action_has_no_say() -> None:
    batch = make_batch()
    assert batch.next_action is not None
    assert batch.next_action_mask is not None
    other = torch.where(batch.next_action_mask.bool().unsqueeze(-1), batch.next_action, 100.0)
    first = make_learner().td_target(batch)[0]
    assert torch.equal(first, make_learner().td_target(replace(batch, next_action=other))[0])


def test_ends_of_recorded_episodes() -> None:
    """A termination is worth its reward alone; a truncation bootstraps without a penalty."""
    data = rebuilt(tiny_columns(), learner_units=True)
    buffer = DatasetBuffer(data, gamma=0.9, next_actions=True)
    batch = buffer.gather(torch.arange(5).unsqueeze(0))
    learner = ReBRAC(model=make_model(act=1, obs=1), beta_critic=2.0, policy_noise=0.0)
    make_constant(learner.target_critic, [10.0, 10.0])
    make_constant(learner.target_actor, [0.0])
    target, _ = learner.td_target(batch)
    after = np.array([0.2, 0.3, 0.0, 0.5, 0.0])  # actions of rows 1, 2, none, 4, none
    bootstrap = np.array([0.9, 0.9, 0.9, 0.9, 0.0]) * (10.0 - 2.0 * after**2)
    np.testing.assert_allclose(array(target)[0], data.rewards + bootstrap, rtol=1e-5)


def test_going_on_online_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"online .*: this method learns from recorded data alone"
    ):
        load_config("rebrac/pendulum", ["algo_kwargs.online={}"])


def test_a_batch_without_next_actions_is_refused() -> None:
    with pytest.raises(DataError, match="no next_actions, which rebrac needs"):
        make_learner().update(plain_batch())


def test_a_mapping_may_hold_next_actions() -> None:
    batch = make_batch()
    names = {"obs": "obs", "actions": "action", "rewards": "reward", "next_obs": "next_obs"}
    names |= {"discounts": "discount", "next_actions": "next_action"}
    names |= {"next_action_mask": "next_action_mask"}
    mapping = {key: getattr(batch, field)[0] for key, field in names.items()}
    one, two = make_learner(), make_learner()
    assert dict(one.update(mapping).metrics) == dict(two.update(batch).metrics)


# The policy


@pytest.mark.parametrize("normalize_q", [True, False])
def test_the_actor_loss_is_that_of_numpy(normalize_q: bool) -> None:
    learner, batch = make_learner(beta_actor=0.3, normalize_q=normalize_q), make_batch()
    policy = learner.model.policy(batch.obs)
    q = array(learner.model.q_values(batch.obs, policy)).min(1)
    weight = 1 / np.abs(q).mean() if normalize_q else 1.0
    distance = ((array(policy) - array(batch.action)) ** 2).sum(-1)
    loss, metrics = learner.actor_loss(batch)
    assert loss.item() == pytest.approx((0.3 * distance - weight * q).mean(), rel=1e-5)
    assert metrics["q_weight"].item() == pytest.approx(weight, rel=1e-5)
    assert metrics["bc_loss"].item() == pytest.approx(distance.mean(), rel=1e-5)


def test_no_gradient_flows_through_the_weight_of_q() -> None:
    learner, batch = make_learner(beta_actor=0.3), make_batch()
    action = learner.model.policy(batch.obs)
    q = learner.model.q_values(batch.obs, action).amin(1)
    weight = 1 / q.abs().mean().item()
    loss = 0.3 * (action - batch.action).square().sum(-1).mean() - weight * q.mean()
    gradients = torch.autograd.grad(loss, list(learner.model.actor.parameters()))
    expected = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(actor_gradient(learner, batch), expected)


def test_the_policy_follows_the_least_critic() -> None:
    learner, batch = make_learner(beta_actor=0.0, normalize_q=False), make_batch()
    make_constant(learner.model.critic, [4.0, 3.0])
    assert learner.actor_loss(batch)[0].item() == pytest.approx(-3.0)


def test_a_large_beta_learns_the_actions_of_the_data() -> None:
    learner = make_learner(beta_actor=1e6, learning_rate=0.01)
    batch = make_batch()
    batch = replace(batch, action=torch.full_like(batch.action, 0.4))
    for _ in range(400):
        learner.update(batch)
    torch.testing.assert_close(learner.act(batch.obs), batch.action, atol=0.03, rtol=0)


def test_without_cloning_the_policys_gradient_ignores_the_datas_actions() -> None:
    learner, batch = make_learner(beta_actor=0.0), make_batch()
    other = replace(batch, action=-batch.action)
    assert torch.equal(actor_gradient(learner, batch), actor_gradient(learner, other))


# What an update moves, data and seeds


def test_the_pure_losses_are_those_of_the_update_and_change_nothing() -> None:
    learner = make_learner(policy_delay=1)
    probe = copy.deepcopy(learner)
    losses = rebrac_loss(probe, make_batch())
    metrics = learner.update(make_batch()).metrics
    assert set(metrics) == set(SPEC.metrics) == set(losses)
    assert losses["critic_loss"].item() == pytest.approx(metrics["critic_loss"], rel=1e-6)
    assert same(parameters_of(probe.model), parameters_of(make_learner().model))


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


def test_the_weights_may_differ_between_members() -> None:
    weights = {"beta_actor": (0.1, 1.0), "beta_critic": (0.5, 0.0)}
    group = ReBRAC(model=make_model((5, 5)), seeds=(5, 5), varied=weights)
    batch = make_batch((5, 5))
    target, loss = group.td_target(batch)[0], group.actor_loss(batch)[0]
    for index in range(2):
        single = make_learner((5,), **{name: values[index] for name, values in weights.items()})
        alone = make_batch((5,))
        torch.testing.assert_close(target[index : index + 1], single.td_target(alone)[0])
        torch.testing.assert_close(loss[index : index + 1], single.actor_loss(alone)[0])


def test_a_run_draws_next_actions_and_refuses_rows_out_of_order(tmp_path: Path) -> None:
    env = probe_env("Pendulum-v1")
    config = load_config("rebrac/pendulum")
    learner = SPEC.build(env, config.algo_config, (0, 1))
    batch = load_buffer(learner, env)[0].sample(B)
    assert batch.next_action is not None
    assert batch.next_action.shape == (2, B, 1)
    data = toy_data(task=env)
    order = np.random.default_rng(0).permutation(len(data))
    columns = {name: column[order] for name, column in data.columns()}
    path = write_columns(tmp_path / "shuffled.npz", columns)
    shuffled = {"dataset_kind": "npz", "dataset_path": str(path), "dataset_size": 10_000}
    settings = SPEC.config_class(**dict(config.algo_config) | shuffled)
    with pytest.raises(DataError, match="the next action of each transition needs whole episodes"):
        load_buffer(SPEC.build(env, settings, (0,)), env)

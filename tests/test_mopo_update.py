"""MOPO: what the penalty does to rewards, what an update moves, what is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from helpers.imagining import ACTION, OBS, imagine, make_learner, rollout
from rl_training.algorithms.dynamics.imagination import Imagined, Rules, rows_that_count
from rl_training.algorithms.mopo import MOPO, MOPOConfig, mopo_model_loss
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError, SpecMismatch
from rl_training.rng import Rng
from rl_training.state import PerSeed
from rl_training.testing.contract import build, flat_state, make_batch


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 2.0])
def test_the_penalty_enters_the_reward_exactly(coefficient: float) -> None:
    learner = make_learner(MOPO, penalty_coef=coefficient)
    made = rollout([True] * 3, penalty=torch.tensor([[0.25, 1.0, 4.0]]))
    expected = torch.tensor([[0.0, 1.0, 2.0]]) - coefficient * torch.tensor([[0.25, 1.0, 4.0]])
    assert torch.equal(learner.imagination.worth(made), expected)


def test_the_penalty_is_the_largest_norm_over_all_members() -> None:
    learner = make_learner(MOPO)
    obs = Rng((0,), "test").normal(6, OBS)
    made = imagine(learner, obs, 1, Rules())
    _, logvar = learner.dynamics_model.predict_distribution(made.obs, made.action)
    norms = (0.5 * logvar).exp().square().sum(-1).sqrt()  # [1, M, B]
    torch.testing.assert_close(made.penalty, norms.amax(1))


def test_disagreement_is_the_spread_of_the_means() -> None:
    learner = make_learner(MOPO, penalty_kind="disagreement")
    obs = Rng((0,), "test").normal(6, OBS)
    made = imagine(learner, obs, 1, Rules())
    mean, _ = learner.dynamics_model.predict_distribution(made.obs, made.action)
    torch.testing.assert_close(made.penalty, mean.std(1, correction=0).mean(-1))


def test_the_papers_ablation_is_the_largest_distance_of_a_members_mean() -> None:
    learner = make_learner(MOPO, penalty_kind="mean_deviation")
    made = imagine(learner, Rng((0,), "test").normal(6, OBS), 1, Rules())
    mean, _ = learner.dynamics_model.predict_distribution(made.obs, made.action)
    mean = mean[..., :OBS].detach()  # without the reward
    expected = [
        max(float((m - mean[0, :, row].mean(0)).norm()) for m in mean[0, :, row])
        for row in range(6)
    ]
    torch.testing.assert_close(made.penalty[0], torch.tensor(expected))


def test_members_of_a_group_may_have_penalties_of_their_own() -> None:
    learner = make_learner(MOPO, seeds=(0, 1))
    learner.varied["penalty_coef"] = PerSeed((0.0, 2.0), "cpu")
    one = rollout([True] * 3, penalty=torch.tensor([[0.25, 1.0, 4.0]]))
    both = Imagined(**{f.name: getattr(one, f.name).repeat_interleave(2, 0) for f in fields(one)})
    worth = learner.imagination.worth(both)
    assert worth.tolist() == [[0.0, 1.0, 2.0], [-0.5, -1.0, -6.0]]


def test_an_update_of_the_policy_leaves_the_model_alone_and_the_other_way_round() -> None:
    learner, env = build("mopo")
    assert isinstance(learner, MOPO)
    batch = make_batch("mopo", env, (0,))
    assert isinstance(batch, TransitionBatch)
    before = flat_state(learner.state_dict())
    learner.update(batch)
    after = flat_state(learner.state_dict())
    changed = {name.split(".")[0] for name in before if not _same(before[name], after[name])}
    assert changed == {
        *("policy_model", "target_critic", "critic_optimizer", "actor_optimizer"),
        *("alpha_optimizer", "log_alpha", "rng", "num_updates"),
    }
    learner.update_model(batch)
    last = flat_state(learner.state_dict())
    changed = {name.split(".")[0] for name in after if not _same(after[name], last[name])}
    assert changed == {"dynamics_model", "imagination"}


def _same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return first == second


def test_the_names_of_the_public_contract_are_there() -> None:
    learner = MOPO(
        policy_model=make_learner(MOPO).policy_model,
        dynamics_model=make_learner(MOPO).dynamics_model,
        policy_learning_rate=1e-3,
        model_learning_rate=2e-3,
        gamma=0.9,
        alpha=0.2,
        tau=0.01,
        penalty_coef=0.5,
    )
    assert learner.critic_optimizer.base_learning_rate == 1e-3
    assert learner.actor_optimizer.base_learning_rate == 1e-3
    assert learner.imagination.trainer.optimizer.base_learning_rate == 2e-3
    batch = {
        "obs": torch.zeros(8, OBS),
        "actions": torch.zeros(8, ACTION),
        "rewards": torch.zeros(8),
        "next_obs": torch.zeros(8, OBS),
        "dones": torch.zeros(8),
    }
    names = {"mopo_model_loss", "reward_mae", "delta_obs_mae", "ensemble_disagreement"}
    loss = learner.update_model(batch)
    assert set(loss.metrics) == names
    assert learner.update(batch).metrics["mopo_model_loss"] == loss.metrics["mopo_model_loss"]
    rows = torch.zeros(1, 1, 4, 2 * OBS + ACTION + 2)
    assert set(mopo_model_loss(learner.dynamics_model, rows)) == names


def test_rows_that_do_not_count_are_replaced_by_ones_that_do() -> None:
    made = rows_that_count(rollout([True, False, True, False, False, False, True]))
    assert made.valid.all()
    assert made.reward.tolist() == [[0.0, 2.0, 6.0, 0.0, 2.0, 6.0, 0.0]]
    assert made.obs[0, :, 0].tolist() == made.reward[0].tolist()


def test_imagined_ends_end_and_the_end_of_a_rollout_does_not() -> None:
    learner = make_learner(MOPO)
    obs = Rng((0,), "test").normal(50, OBS)
    right = Rules(termination=lambda _, __, next_obs: next_obs[..., 0] > 0)
    made = imagine(learner, obs, 3, right)
    assert torch.equal(made.terminated, made.next_obs[..., 0] > 0)
    assert 0 < made.valid.sum() < made.valid.numel()
    assert not imagine(learner, obs, 3, Rules()).terminated.any()


def test_a_known_reward_replaces_the_models() -> None:
    learner = make_learner(MOPO)
    known = Rules(reward=lambda obs, _, __: obs[..., 0] * 2)
    made = imagine(learner, Rng((0,), "test").normal(5, OBS), 2, known)
    assert torch.equal(made.reward, made.obs[..., 0] * 2)


def test_a_group_imagines_what_its_members_would_alone() -> None:
    seeds = (3, 8)
    group = make_learner(MOPO, seeds)
    obs = Rng(seeds, "test").normal(10, OBS)
    made = imagine(group, obs, 3, Rules())
    for index, seed in enumerate(seeds):
        alone = make_learner(MOPO, (seed,))
        ours = imagine(alone, obs[index : index + 1], 3, Rules())
        torch.testing.assert_close(made.next_obs[index], ours.next_obs[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(made.member[index], ours.member[0])


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(SpecMismatch, match="mopo needs continuous actions, but CartPole-v1 has"):
        build("mopo", task="CartPole-v1")


def test_a_buffer_that_cannot_hold_a_refresh_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"synthetic_buffer_capacity must hold one refresh.*200"):
        MOPOConfig(rollout_batch_size=100, rollout_horizon=2, synthetic_buffer_capacity=199)
    assert MOPOConfig(rollout_batch_size=100, rollout_horizon=2).synthetic_capacity == 1000

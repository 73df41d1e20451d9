"""GAIL: the discriminator's loss, penalty and rewards against NumPy and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.algorithms.gail import GAIL, gail_loss
from rl_training.algorithms.gail.losses import (
    discriminator_loss,
    imitation_reward,
    interpolate,
    penalty_of_norm,
)
from rl_training.data.batch import RolloutBatch
from rl_training.data.replay.pairs import GeneratorReplay, Pairs
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.models import MLPActorCriticModel, MLPGAILDiscriminator
from rl_training.rng import Rng
from rl_training.testing.contract import build, flat_state, make_batch


def gail(seeds: tuple[int, ...] = (0,), **settings: Any) -> tuple[GAIL, EnvSpec]:
    learner, env = build("gail", seeds, **settings)
    assert isinstance(learner, GAIL)
    return learner, env


def rollout(env: EnvSpec, key: int = 0) -> RolloutBatch:
    batch = make_batch("gail", env, (0,), key)
    assert isinstance(batch, RolloutBatch)
    return batch


def normal(*shape: int) -> Tensor:
    return Rng((0,), "test").normal(*shape)


# Loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_numpys_cross_entropy(smoothing: float) -> None:
    expert, policy = 3 * normal(7), 3 * Rng((1,), "other").normal(7)
    d_expert = 1 / (1 + np.exp(-expert[0].double().numpy()))
    d_policy = 1 / (1 + np.exp(-policy[0].double().numpy()))
    wrong = -(1 - smoothing) * np.log(d_expert) - smoothing * np.log(1 - d_expert)
    expected = np.concatenate([wrong, -np.log(1 - d_policy)]).mean()
    loss = discriminator_loss(expert, policy, label_smoothing=smoothing)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_a_blind_discriminator_costs_log_two() -> None:
    assert float(discriminator_loss(torch.zeros(1, 3), torch.zeros(1, 3))) == pytest.approx(
        math.log(2)
    )


def test_a_weight_of_three_is_three_rows() -> None:
    expert, policy = normal(4), Rng((1,), "other").normal(4)
    weight = torch.tensor([[1.0, 1.0, 1.0, 3.0]])
    tripled = torch.cat([expert, expert[:, 3:], expert[:, 3:]], 1)
    torch.testing.assert_close(
        discriminator_loss(expert, policy, weight), discriminator_loss(tripled, policy)
    )


# Rewards


def test_the_three_rewards_of_a_logit() -> None:
    logit = torch.tensor([[-2.0, 0.0, 3.0]])
    d = torch.sigmoid(logit.double())
    expected = {"softplus": -(1 - d).log(), "log_d": d.log(), "airl": d.log() - (1 - d).log()}
    for form, value in expected.items():
        reward = imitation_reward(logit, form)  # type: ignore[arg-type]  # keys are the forms
        torch.testing.assert_close(reward.double(), value, rtol=1e-6, atol=1e-6)


def test_signs_of_rewards_are_those_of_their_survival_bias() -> None:
    logit = torch.linspace(-30, 30, 61).unsqueeze(0)
    assert (imitation_reward(logit, "softplus") >= 0).all()
    assert (imitation_reward(logit, "log_d") <= 0).all()
    airl = imitation_reward(logit, "airl")
    torch.testing.assert_close(airl, -airl.flip(1))


def test_the_optimal_discriminator_of_two_points_gives_the_log_ratio() -> None:
    # One state, two actions: the expert takes the first with 0.8, the policy with 0.3.
    discriminator = MLPGAILDiscriminator(1, 2, (), discrete=True)
    learner = GAIL(
        model=MLPActorCriticModel(1, 2, (4,), discrete=True),
        discriminator=discriminator,
        discriminator_learning_rate=0.05,
        normalize_discriminator_obs=False,
    )

    def pairs(first: int) -> Pairs:
        action = (torch.arange(10) >= first).long().unsqueeze(0)
        return Pairs(torch.zeros(1, 10, 1), action, torch.zeros(1, 10))

    for _ in range(1500):
        learner.discriminator_step(pairs(8), pairs(3), torch.zeros(1, 10, 1))
    both = Pairs(torch.zeros(1, 2, 1), torch.tensor([[0, 1]]), torch.zeros(1, 2))
    expected = torch.tensor([[math.log(0.8 / 0.3), math.log(0.2 / 0.7)]])
    torch.testing.assert_close(learner.reward(both), expected, atol=1e-3, rtol=1e-3)
    d = torch.tensor([0.8 / 1.1, 0.2 / 0.9])
    best = -0.5 * (0.8 * d[0].log() + 0.2 * d[1].log())
    best -= 0.5 * (0.3 * (1 - d[0]).log() + 0.7 * (1 - d[1]).log())
    torch.testing.assert_close(
        gail_loss(learner, pairs(8), pairs(3)).detach(), best.unsqueeze(0), atol=1e-4, rtol=1e-4
    )


def test_rewards_divided_by_their_deviation_keep_their_sign() -> None:
    plain, env = gail(reward_form="softplus")
    scaled, _ = gail(reward_form="softplus", normalize_reward=True)
    pairs = Pairs.of_rollout(rollout(env))
    before, after = plain.reward(pairs), scaled.reward(pairs)
    expected = before / before.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)


def test_conditional_rewards_average_to_zero_in_every_state() -> None:
    learner, env = gail(reward_form="conditional")
    pairs = Pairs.of_rollout(rollout(env))
    assert learner.model.discrete
    total = torch.zeros_like(pairs.ended)
    for action in range(learner.model.action_dim):
        same = pairs._replace(action=torch.full_like(pairs.action, action))
        chance = learner.model.log_prob_entropy(learner.normalize(pairs.obs), same.action)[0].exp()
        total += chance.detach() * learner.reward(same)
    assert learner.reward(pairs).abs().max() > 1e-3
    torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-6, rtol=0)


def test_conditional_rewards_do_not_pay_for_states() -> None:
    # A discriminator of the observation alone: who is alive, and where, is worth nothing.
    learner, env = gail(reward_form="conditional", discriminator_hidden_sizes=[8])
    with torch.no_grad():
        learner.discriminator._layers[0].weight[:, env.obs_dim :] = 0
    pairs = Pairs.of_rollout(rollout(env))
    assert learner.logits(pairs).std() > 1e-3
    torch.testing.assert_close(
        learner.reward(pairs), torch.zeros_like(pairs.ended), atol=1e-6, rtol=0
    )


def test_conditional_rewards_of_a_linear_logit_are_the_distance_from_the_mean_action() -> None:
    # l(s, a) = 2 a, pi = N(0, 1): r(s, a) = 2 a - 2 mean(drawn), whose error is 2 / sqrt(8).
    model = MLPActorCriticModel(1, 1, (4,), discrete=False)
    discriminator = MLPGAILDiscriminator(1, 1, (), discrete=False, action_limit=(math.inf,))
    learner = GAIL(model=model, discriminator=discriminator, reward_form="conditional")
    with torch.no_grad():
        discriminator._layers[0].weight.copy_(torch.tensor([[[0.0], [2.0]]]))
        discriminator._layers[0].bias.fill_(5.0)
        for parameter in model.actor.parameters():
            parameter.zero_()
    rows = 4000
    action = torch.linspace(-1, 1, rows).view(1, rows, 1)
    pairs = Pairs(torch.zeros(1, rows, 1), action, torch.zeros(1, rows))
    error = learner.reward(pairs) - 2 * action.squeeze(-1)
    assert abs(error.mean()) < 0.05
    assert abs(error.std() - 2 / math.sqrt(8)) < 0.05


def test_conditional_rewards_and_absorbing_states_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="reward_form conditional pays for actions alone"):
        gail(reward_form="conditional", absorbing_states=True)


# Gradient penalty and spectral norm


@pytest.mark.parametrize("spectral_norm", [False, True])
def test_the_written_gradient_is_autograds(spectral_norm: bool) -> None:
    discriminator = MLPGAILDiscriminator(
        3, 2, (16, 8), discrete=False, spectral_norm=spectral_norm, rng=Rng((0, 1), "test")
    )
    x = Rng((0, 1), "x").normal(5, 5).requires_grad_()
    (expected,) = torch.autograd.grad(discriminator.forward(x).sum(), x, create_graph=True)
    found = discriminator.input_gradient(x)
    torch.testing.assert_close(found, expected)
    # And so is the gradient of the penalty by the weights.
    weights = list(discriminator.parameters())[::2]
    ours = torch.autograd.grad(penalty_of_norm(found).sum(), weights, retain_graph=True)
    theirs = torch.autograd.grad(penalty_of_norm(expected).sum(), weights)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_the_penalty_of_a_linear_function_is_that_of_its_weights() -> None:
    discriminator = MLPGAILDiscriminator(2, 1, (), discrete=False)
    with torch.no_grad():
        next(iter(discriminator.parameters())).copy_(torch.tensor([[[3.0], [0.0], [4.0]]]))
    gradient = discriminator.input_gradient(normal(6, 3)).detach()
    assert float(penalty_of_norm(gradient)) == pytest.approx((5 - 1) ** 2)
    assert float(penalty_of_norm(gradient, norm=0.0)) == pytest.approx(25.0)


def test_interpolates_lie_between_their_ends() -> None:
    expert, policy = torch.ones(1, 2, 3), torch.zeros(1, 2, 3)
    mix = torch.tensor([[[0.25], [1.0]]])
    torch.testing.assert_close(interpolate(expert, policy, mix)[0, :, 0], torch.tensor([0.25, 1.0]))


def test_the_penalty_draws_the_gradient_to_its_norm() -> None:
    norms = {}
    for weight in (0.0, 10.0):
        learner, env = gail(gradient_penalty=weight, discriminator_learning_rate=3e-3)
        current = Pairs.of_rollout(rollout(env))
        for _ in range(60):
            learner.update_discriminator(current)
        rows = learner.inputs(learner.expert.take(torch.arange(64).unsqueeze(0)))
        norms[weight] = float(
            learner.discriminator.input_gradient(rows).detach().norm(dim=-1).mean()
        )
    assert abs(norms[10.0] - 1) < abs(norms[0.0] - 1)
    assert norms[10.0] == pytest.approx(1.0, abs=0.4)


def test_weights_of_unit_spectral_norm() -> None:
    discriminator = MLPGAILDiscriminator(3, 2, (16,), discrete=False, spectral_norm=True)
    for _ in range(200):
        discriminator.refresh()
    for index in range(2):
        largest = torch.linalg.matrix_norm(discriminator._weight(index).detach(), 2)
        assert float(largest) == pytest.approx(1.0, abs=1e-3)


# What the learner does with them


def test_rewards_of_the_environment_change_no_bit() -> None:
    states = []
    for scale in (1.0, -1e3):
        learner, env = gail(absorbing_states=True, normalize_reward=True)
        for key in range(3):
            batch = rollout(env, key)
            learner.update(replace(batch, reward=scale * batch.reward.flip(1)))
        states.append(flat_state(learner.state_dict()))
    assert compare_states(*states) == []


def test_without_demonstrations_an_update_says_what_to_do() -> None:
    model = MLPActorCriticModel(4, 2, (4,), discrete=True)
    learner = GAIL(model=model, discriminator=MLPGAILDiscriminator(4, 2, (4,), discrete=True))
    with pytest.raises(ConfigError, match=r"GAIL has no demonstrations; give it some with attach"):
        learner.update(rollout(build("gail")[1]))


def test_a_termination_is_paid_for_what_comes_after_it() -> None:
    learner, env = gail(absorbing_states=True, gamma=0.9)
    pairs = Pairs.of_rollout(rollout(env))
    nobody = pairs._replace(ended=torch.zeros_like(pairs.ended))
    absorbing = learner.discriminator.forward(learner.discriminator.absorbing_input()).detach()
    expected = learner.reward(nobody) + pairs.ended * 9.0 * absorbing
    torch.testing.assert_close(learner.reward(pairs), expected)
    assert pairs.ended.any()


def test_the_absorbing_state_is_the_side_whose_episodes_terminate() -> None:
    learner, env = gail(absorbing_states=True, discriminator_learning_rate=0.01)
    pairs = Pairs.of_rollout(rollout(env))
    never, always = torch.zeros_like(pairs.ended), torch.ones_like(pairs.ended)
    for _ in range(100):
        mix = torch.zeros(1, pairs.num_rows, 1)
        learner.discriminator_step(pairs._replace(ended=never), pairs._replace(ended=always), mix)
    logit = learner.discriminator.forward(learner.discriminator.absorbing_input())
    assert float(logit.detach()) < -2


def test_absorbing_states_need_a_discount() -> None:
    with pytest.raises(ConfigError, match="absorbing_states needs gamma < 1"):
        gail(absorbing_states=True, gamma=1.0)


def test_every_rate_follows_one_schedule_over_the_whole_run() -> None:
    learner, _ = gail(lr_schedule={"type": "linear"}, discriminator_learning_rate=0.01)
    for progress in (0.0, 0.5, 1.0):
        learner.set_progress(progress)
        assert learner.discriminator_optimizer.rate_of() == pytest.approx(0.01 * (1 - progress))
        assert learner.optimizer.rate_of() == pytest.approx(3e-4 * (1 - progress))


def test_a_warm_start_clones_the_mode_and_leaves_the_rest_alone() -> None:
    learner, _ = gail(bc_warmup_updates=200, bc_warmup_learning_rate=0.01)
    before = flat_state(learner.state_dict())
    expert = learner.expert.take(torch.arange(100).unsqueeze(0))
    first = learner.model.log_prob_entropy(expert.obs, expert.action)[0].mean()
    learner.clone_expert()
    assert learner.model.log_prob_entropy(expert.obs, expert.action)[0].mean() > first
    after = flat_state(learner.state_dict())
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {name.split(".")[1] for name in moved if name.startswith("model.")} == {"actor"}
    assert all(name.startswith(("model.actor", "rng.")) for name in moved)


# Replay of the policy's pairs


def pairs_of(value: float, rows: int = 2) -> Pairs:
    return Pairs(torch.full((1, rows, 1), value), torch.zeros(1, rows), torch.zeros(1, rows))


def test_the_replay_holds_the_last_rollouts_and_no_more() -> None:
    replay = GeneratorReplay(2)
    for value in (1.0, 2.0, 3.0):
        replay.add(pairs_of(value))
    kept = replay.with_current(pairs_of(4.0))
    assert kept.obs.flatten().tolist() == [2, 2, 3, 3, 4, 4]
    other = GeneratorReplay(2)
    other.load_state_dict(replay.state_dict())
    assert torch.equal(other.with_current(pairs_of(4.0)).obs, kept.obs)


def test_without_past_rollouts_only_the_current_one_is_drawn_from() -> None:
    replay = GeneratorReplay(0)
    replay.add(pairs_of(1.0))
    assert replay.with_current(pairs_of(2.0)).obs.flatten().tolist() == [2, 2]

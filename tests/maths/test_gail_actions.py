"""GAIL on continuous actions: the discriminator is shown what reached the environment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_training.algorithms.gail import GAIL
from rl_training.algorithms.gail.config import GAILConfig
from rl_training.data.batch import RolloutBatch
from rl_training.data.replay.pairs import Pairs
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.rng import Rng
from rl_training.testing.contract import build, make_batch


def box(low: tuple[float, ...] | None, high: tuple[float, ...] | None, size: int = 2) -> EnvSpec:
    """A task with a box of `size` actions; without bounds where they are None."""
    return EnvSpec(
        env_id="test",
        obs_shape=(2,),
        obs_dtype="float32",
        action_kind="continuous",
        action_shape=(size,),
        action_dtype="float32",
        action_low=low,
        action_high=high,
    )


ONE_SIDED, WITH_A_SINGLE_VALUE = box((-2.0, -1.0), (6.0, 1.0)), box((-2.0, 3.0), (6.0, 3.0))


@pytest.mark.parametrize("env", [ONE_SIDED, WITH_A_SINGLE_VALUE])
def test_an_expert_that_behaves_as_the_policy_does_cannot_be_told_from_it(env: EnvSpec) -> None:
    # The policy's mean is near a bound, so that the environment clips many of its draws.
    spec = get_algorithm_spec("gail")
    config = GAILConfig(
        initial_log_std=-1.0,
        reward_form="conditional",
        discriminator_hidden_sizes=(16,),
        discriminator_learning_rate=0.01,
    )
    learner = spec.build(env, config, (0,))
    assert isinstance(learner, GAIL)
    with torch.no_grad():
        next(reversed(list(learner.model.actor.parameters()))).fill_(0.95)  # the last bias
    rows, size = 4096, 256
    obs, ended = Rng((0,), "obs").normal(rows, 2), torch.zeros(1, rows)

    def executed(action: Tensor) -> Tensor:
        return torch.from_numpy(env.unscale_action(env.scale_action(action.numpy())))

    def draw() -> Tensor:
        return learner.act(obs, explore=True).detach()

    for _ in range(8):
        expert, policy = Pairs(obs, executed(draw()), ended), Pairs(obs, draw(), ended)
        for start in range(0, rows, size):
            part = start, start + size
            learner.discriminator_step(
                expert.slice(*part), policy.slice(*part), torch.zeros(1, size, 1)
            )
    expert, policy = Pairs(obs, executed(draw()), ended), Pairs(obs, draw(), ended)
    assert (policy.action.abs() > 1).any(-1).float().mean() > 0.4
    with torch.no_grad():
        recognised = (
            (learner.logits(expert) > 0).float().mean(),
            (learner.logits(policy) < 0).float().mean(),
        )
        assert abs(float(sum(recognised)) / 2 - 0.5) < 0.02
        # A step is worth the same in a rollout and in a recording of it.
        recorded = policy._replace(action=executed(policy.action))
        torch.testing.assert_close(learner.logits(policy), learner.logits(recorded))
        # The mean that this form takes off is over what the environment would be given.
        assert abs(float(learner.reward(policy).mean())) < 0.02


def test_actions_of_a_box_without_bounds_are_shown_as_they_are() -> None:
    spec = get_algorithm_spec("gail")
    learner = spec.build(box(None, None), spec.config_class(), (0,))
    assert isinstance(learner, GAIL)
    action = torch.tensor([[[-7.0, 0.5]]])
    assert torch.equal(learner.discriminator.inputs(torch.zeros(1, 1, 2), action)[..., 2:], action)


def test_densities_of_ppo_are_of_the_actions_drawn_and_not_of_the_clipped_ones() -> None:
    learner, env = build("gail", task="Pendulum-v1")
    batch = make_batch("gail", env, (0,))
    assert isinstance(learner, GAIL)
    assert isinstance(batch, RolloutBatch)
    wide = replace(batch, action=3 * batch.action)
    log_prob = learner.model.log_prob_entropy(wide.obs.flatten(1, 2), wide.action.flatten(1, 2))[0]
    assert (wide.action.abs() > 1).any()
    torch.testing.assert_close(learner.prepare(wide).log_prob, log_prob.detach())
    learner.update(wide)
    kept = learner.generator_replay.with_current(Pairs.of_rollout(wide))
    assert torch.equal(kept.action, wide.action.flatten(1, 2))

"""Gathering data with a policy that has a memory, and with random actions among its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_training.algorithms.dreamer import Dreamer
from rl_training.algorithms.dreamer.learner import DreamerState, encode_action
from rl_training.algorithms.pets.planned import Planned
from rl_training.algorithms.pets.planning import PlanningState
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.workflows import LoadedAgent
from rl_training.testing.contract import TASK, build, random_obs, small_config
from rl_training.tools.collect import CollectPlan, collect_dataset

DREAMED = [TASK[kind] for kind in get_algorithm_spec("dreamer").action_kinds]


def agent_of(algo: str, task: str, **settings: Any) -> LoadedAgent:
    learner, env = build(algo, task=task, **settings)
    return LoadedAgent(learner, small_config(algo, "runs", task=task), env, step=0)


def collect(agent: LoadedAgent, **plan: Any) -> OfflineDataset:
    kwargs = {"max_episode_steps": 5}
    return collect_dataset(
        CollectPlan(env_id=agent.config.env_id, env_kwargs=kwargs, **plan), agent
    )


@pytest.mark.parametrize("task", DREAMED)
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
def test_a_belief_follows_what_was_seen_and_done(
    task: str, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_of("dreamer", task)
    learner = agent.learner
    assert isinstance(learner, Dreamer)
    rssm = learner.world_model.rssm
    observe, remembered = rssm.observe_step, []

    def watched(belief: Any, action: torch.Tensor, *rest: Any) -> Any:
        remembered.append((float(belief.latent.abs().sum()), action.clone()))
        return observe(belief, action, *rest)

    monkeypatch.setattr(rssm, "observe_step", watched)
    rows = collect(agent, steps=12, epsilon=epsilon)
    assert len(remembered) == 12, "a step that was not looked at"
    executed = torch.from_numpy(agent.env_spec.unscale_action(rows.actions))
    encoded = encode_action(executed, learner.actor)
    for step, (memory, action) in enumerate(remembered):
        begins = step % 5 == 0
        assert (memory == 0) == begins
        expected = torch.zeros_like(encoded[0]) if begins else encoded[step - 1]
        torch.testing.assert_close(action[0, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", DREAMED)
def test_following_the_policys_own_action_is_acting(task: str) -> None:
    learner, env = build("dreamer", (0, 1), task=task)
    acts, follows = (learner.initial_acting_state(3) for _ in range(2))
    assert isinstance(acts, DreamerState)
    assert isinstance(follows, DreamerState)
    with torch.inference_mode():
        for key in range(3):
            obs = random_obs(env, (2, 3), torch.Generator().manual_seed(key))
            learner.follow(follows, obs, learner.act_from(acts, obs))
    assert compare_states(acts.state_dict(), follows.state_dict()) == []


def test_a_plan_moves_on_when_another_action_is_taken() -> None:
    learner, env = build("pets")
    assert isinstance(learner, Planned)
    state = learner.initial_acting_state(2)
    obs = random_obs(env, (1, 2), torch.Generator().manual_seed(0))
    with torch.inference_mode():
        learner.act_from(state, obs)
        plan = state.plan.clone()
        learner.follow(state, obs, torch.zeros(1, 2, 1))
    assert isinstance(state, PlanningState)
    assert torch.equal(state.plan[:, :, :-1], plan[:, :, 1:])
    assert not state.plan[:, :, -1].any()


@pytest.mark.expensive(only=("dreamer", "ppo"))
@pytest.mark.parametrize("algo", ["dreamer", "ppo", "pets"])
def test_the_plans_seed_gives_the_noise_and_the_agent_draws_on_undisturbed(algo: str) -> None:
    agent = agent_of(algo, TASK["continuous"])
    before = agent.learner.rng.state_dict()
    first, again, other = (collect(agent, steps=8, seed=seed).actions for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)
    assert compare_states(before, agent.learner.rng.state_dict()) == []

"""The contract of evaluation, for every registered algorithm: it is apart from training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.tiny import learner_digest, run_cli, tiny_config
from rl_training import PPO
from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.iqn import IQN
from rl_training.algorithms.pqn import PQN
from rl_training.algorithms.td3 import TD3
from rl_training.algorithms.value_based import ValueBased
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent
from rl_training.testing.contract import (
    TASK,
    build,
    flat_state,
    has_settings,
    make_batch,
    parts_tasks,
    pixel_task,
    random_obs,
    small_config,
    takes_pixels,
)
from rl_training.tools.collect import CollectPlan, collect_dataset

RANDOM = {"eval_epsilon": 0.5}
NOISY = {"noisy": True}


def has_one_action(learner: AnyLearner, settings: dict[str, Any]) -> bool:
    """Whether the learned policy is one action per state, unless a setting says otherwise."""
    is_greedy = isinstance(learner, ValueBased | PQN) and not isinstance(learner, IQN)
    return not settings and (is_greedy or isinstance(learner, TD3))


CASES = [
    pytest.param(name, TASK[kind], settings, id="-".join((name, kind, *settings)))
    for name in algorithm_names()
    for kind in get_algorithm_spec(name).action_kinds
    for settings in ({}, RANDOM, NOISY)
    if has_settings(name, settings)
] + [
    pytest.param(name, task, {}, id=f"{name}-{task.partition(':')[2] or 'pixels'}")
    for name in algorithm_names()
    for task in (*([pixel_task(name)] if takes_pixels(name) else []), *parts_tasks(name))
]


def returns_of(
    learner: AnyLearner, task: str, *, deterministic: bool, step: int = 7
) -> list[list[float]]:
    kwargs = {"max_episode_steps": 12}
    evaluator = Evaluator(task, kwargs, learner.seeds, deterministic=deterministic)
    try:
        return evaluator.evaluate(learner, 4, step)
    finally:
        evaluator.close()


@pytest.mark.expensive
@pytest.mark.parametrize(("algo", "task", "settings"), CASES)
def test_stochastic_evaluation_leaves_no_trace_and_can_be_repeated(
    algo: str, task: str, settings: dict[str, Any]
) -> None:
    (learner, env), (twin, _) = (build(algo, task=task, **settings) for _ in range(2))
    before = flat_state(learner.state_dict())
    sampled = returns_of(learner, task, deterministic=False)
    assert compare_states(before, flat_state(learner.state_dict())) == []
    assert sampled == returns_of(learner, task, deterministic=False)
    best = returns_of(learner, task, deterministic=True)
    assert best == returns_of(learner, task, deterministic=True)
    if has_one_action(learner, settings):
        assert sampled == best
    # What comes after is what would have come without it: exploring, and learning.
    obs = random_obs(env, (1, 5), torch.Generator().manual_seed(0))
    for one in (learner, twin):
        one.update(make_batch(algo, env, (0,)))
    with torch.inference_mode():
        states = [one.initial_acting_state(5) for one in (learner, twin)]
        pair = zip((learner, twin), states, strict=True)
        first, second = (one.act_from(state, obs, explore=True) for one, state in pair)
    assert torch.equal(first, second)
    assert compare_states(learner.state_dict(), twin.state_dict()) == []


@pytest.mark.parametrize(("algo", "task", "settings"), CASES)
def test_sampled_actions_differ_from_the_best_where_the_policy_has_noise(
    algo: str, task: str, settings: dict[str, Any]
) -> None:
    learner, env = build(algo, task=task, **settings)
    obs = random_obs(env, (1, 60), torch.Generator().manual_seed(0))
    with torch.inference_mode():
        best, sampled = learner.act(obs), [learner.draw_action(obs) for _ in range(2)]
    if has_one_action(learner, settings):
        assert torch.equal(sampled[0], best)
    elif algo != "iqn" or settings:  # its draws may agree on the best of two actions
        assert not torch.equal(sampled[0], best)
        assert not torch.equal(*sampled)


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("sac", {}),
    ("dreamer", {}),
    ("dqn", NOISY),
    ("iqn", RANDOM),
]


@pytest.mark.expensive
@pytest.mark.parametrize(("algo", "settings"), RUNS)
def test_a_run_is_the_same_however_it_is_evaluated(
    algo: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "sampled": {"eval_deterministic": False, "algo_kwargs": {**settings, "eval_interval": 20}},
        "never": {
            "eval_episodes": 0,
            "eval_deterministic": False,
            "algo_kwargs": settings,
        },
    }
    digests, means = {}, {}
    for way, changes in ways.items():
        config = small_config(algo, tmp_path, total_timesteps=64, run_name=way, **changes)
        result = train(config)
        digests[way] = learner_digest(result.checkpoint_path)
        means[way] = result.metrics.get("eval_return_mean")
    assert digests["sampled"] == digests["never"]
    # The checkpoint evaluates as its run does unless told otherwise; both are in the log.
    agent = load_agent(tmp_path / "sampled")
    evaluator = Evaluator(agent.config.env_id, agent.config.env_kwargs, (0,), deterministic=False)
    try:
        again = evaluator.evaluate(agent.learner, 2, agent.step)[0]
    finally:
        evaluator.close()
    assert means["sampled"] == pytest.approx(float(np.mean(again)), rel=1e-5)


def test_a_checkpoint_is_evaluated_as_its_run_was_unless_told_otherwise(tmp_path: Path) -> None:
    train(tiny_config("ppo", tmp_path, env_id="Pendulum-v1", eval_deterministic=False))
    words = ("eval", "--checkpoint", tmp_path / "run", "--episodes", 2, "--json")
    printed = {way: run_cli(*words, *way) for way in ((), ("--stochastic",), ("--deterministic",))}
    plain, sampled, best = (json.loads(outcome.out)["returns"] for outcome in printed.values())
    assert plain == sampled != best
    agent = PPO.load(tmp_path / "run")
    assert list(agent.evaluate(2).returns) == sampled
    assert list(agent.evaluate(2, deterministic=True).returns) == best


def test_a_loaded_value_based_agent_samples_its_policy_and_not_the_start_of_its_exploration(
    tmp_path: Path,
) -> None:
    train(tiny_config("dqn", tmp_path))
    agent = load_agent(tmp_path / "run")
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    best = agent.predict(obs)
    assert np.array_equal(agent.predict(obs, deterministic=False), best)
    plan = CollectPlan(env_id="CartPole-v1", steps=40)
    rows = collect_dataset(plan, agent)
    assert np.array_equal(rows.actions, agent.predict(rows.observations))

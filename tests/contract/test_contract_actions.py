"""The contract of continuous actions, for every algorithm that takes them: boxes of any shape."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium import spaces

from helpers.datasets import columns_of
from helpers.envs import GridActionEnv
from helpers.tiny import run_cli
from rl_training.data import load_transition_dataset
from rl_training.data.datasets.random import random_dataset
from rl_training.envs.factory import probe_env
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.ope.estimate import evaluate_offline
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent
from rl_training.testing.contract import small_config
from rl_training.tools.collect import CollectPlan, collect_dataset
from rl_training.tools.export import export_agent

GRID, OPEN = "helpers.envs:GridActionEnv", "helpers.envs:OpenActionEnv"
CONTINUOUS = [
    name for name in algorithm_names() if "continuous" in get_algorithm_spec(name).action_kinds
]
of_continuous_actions = pytest.mark.parametrize("algo", CONTINUOUS)


def settings_for(algo: str, path: Path) -> dict[str, Any]:
    """Settings of a method on this task: a file where it learns from one, no terminations."""
    wanted = {"termination_function": "never"}
    for prefix in ("dataset_", "expert_dataset_"):
        wanted |= {f"{prefix}kind": "npz", f"{prefix}path": str(path)}
    fields = get_algorithm_spec(algo).config_class.model_fields
    return {name: value for name, value in wanted.items() if name in fields}


@pytest.mark.expensive(only=("sac",))
@of_continuous_actions
def test_actions_of_two_axes_are_learned_acted_stored_and_exported(
    algo: str, tmp_path: Path
) -> None:
    box = GridActionEnv().action_space
    assert isinstance(box, spaces.Box)
    data = random_dataset(probe_env(GRID), 120, 0)
    columns = columns_of(data)
    # As a recorder of this task writes them, with both axes.
    columns["actions"] = columns["actions"].reshape(-1, 2, 3)
    path = tmp_path / "recorded.npz"
    np.savez(path, **columns)
    config = small_config(
        algo,
        tmp_path,
        task=GRID,
        env_kwargs={"length": 10},
        total_timesteps=60,
        eval_episodes=1,
        algo_kwargs=settings_for(algo, path),
        accelerate="off",
    )
    run = train(config)
    assert math.isfinite(run.metrics["eval_return_mean"]), run.metrics
    agent = load_agent(run.run_dir, device="cpu")
    obs = data.observations[:5]
    for deterministic in (True, False):
        actions = agent.predict(obs, deterministic=deterministic)
        assert actions.shape == (5, 2, 3)
        assert all(box.contains(action) for action in actions)
        assert agent.predict(obs[0], deterministic=deterministic).shape == (2, 3)
    gathered = collect_dataset(CollectPlan(env_id=GRID, steps=20, epsilon=0.3), agent)
    assert gathered.actions.shape == (20, 6)
    assert (gathered.actions >= box.low.ravel()).all()
    if agent.learner.initial_acting_state(1) is None:
        export_agent(agent, tmp_path / "policy.pt2", "torch")
        value = evaluate_offline(
            agent,
            load_transition_dataset("npz", path=path),
            gamma=0.9,
            updates=5,
            members=2,
            batch_size=8,
            hidden_sizes=(8,),
        )
        assert value.transitions == 120


@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_a_run_with_actions_of_two_axes_resumes_exactly(algo: str, tmp_path: Path) -> None:
    config = small_config(
        algo, tmp_path, task=GRID, env_kwargs={"length": 25}, num_envs=2, accelerate="off"
    )
    report = verify_resume(config, 70)
    assert report.identical, report.lines()


@of_continuous_actions
def test_actions_without_finite_bounds_are_refused_in_one_sentence(
    algo: str, tmp_path: Path
) -> None:
    """Online and offline: a policy in [-1, 1] could never reach what lies beyond."""
    config = small_config(algo, tmp_path, task=OPEN, env_kwargs={})
    file = tmp_path / "open.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    sentence = run_cli("train", "--config", file, "--quiet").sentence()
    assert "no finite bounds at entry 0 (-1 to inf)" in sentence
    assert "give it finite ones" in sentence

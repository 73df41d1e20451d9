"""Recorded data of tasks with masks, and of actions of several whole numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.datasets import columns_of, rebuilt, write_columns
from helpers.tiny import run_cli
from rl_training.data.datasets.check import check_dataset
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.random import random_dataset
from rl_training.data.datasets.view import view_of
from rl_training.data.replay.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.factory import probe_env
from rl_training.envs.spec import EnvSpec
from rl_training.errors import DataError
from rl_training.runtime.train import train
from rl_training.runtime.workflows import LoadedAgent
from rl_training.testing.contract import build, small_config
from rl_training.tools.collect import CollectPlan, collect_dataset

MODULE = "rl_training.testing.contract"
TASKS = {name: f"{MODULE}:{name}" for name in ("Parts", "SwitchedParts", "Switches")}
MASKED = [TASKS["Parts"], TASKS["SwitchedParts"]]
every_masked = pytest.mark.parametrize("task", MASKED, ids=["one number", "two numbers"])


def forbidden(data: OfflineDataset, spec: EnvSpec) -> list[int]:
    """Rows whose action the mask does not allow, by a loop."""
    parts, rows = spec.observation, []
    assert parts is not None
    for row in range(len(data)):
        mask = parts.allowed(data.observations[row]).tolist()
        numbers = np.ravel(spec.unscale_action(np.asarray(data.actions[row])))
        for size, number in zip(spec.choices, numbers.astype(int).tolist(), strict=True):
            if not mask[number] and row not in rows:
                rows.append(row)
            mask = mask[size:]
    return rows


@every_masked
def test_made_up_data_has_allowed_actions_alone(task: str) -> None:
    spec = probe_env(task)
    data = random_dataset(spec, 500, 0)
    assert forbidden(data, spec) == []
    taken = {tuple(np.ravel(action).tolist()) for action in data.actions}
    assert len(taken) == np.prod(spec.choices), "and all of them somewhere"


@every_masked
@pytest.mark.parametrize("algo", [None, "ppo", "recurrent_ppo"])
def test_collected_data_has_allowed_actions_alone(task: str, algo: str | None) -> None:
    """With the policy's own actions and random ones between them; the task refuses all others."""
    agent = None
    if algo is not None:
        learner, env = build(algo, task=task)
        agent = LoadedAgent(learner, small_config(algo, "runs", task=task), env, step=0)
    epsilon = 0.0 if agent is None else 0.5
    data = collect_dataset(CollectPlan(env_id=task, steps=150, epsilon=epsilon), agent)
    assert forbidden(data, probe_env(task)) == []
    assert len({tuple(np.ravel(action).tolist()) for action in data.actions}) > 2
    assert "forbidden" not in {f.check for f in check_dataset(data, probe_env(task))}


def test_random_actions_of_several_numbers_are_uniform() -> None:
    data = collect_dataset(CollectPlan(env_id=TASKS["Switches"], episodes=None, steps=600))
    spec = probe_env(TASKS["Switches"])
    index = spec.unscale_action(data.actions)
    counts = np.bincount(index[:, 0] * 2 + index[:, 1], minlength=6)
    expected = len(data) / 6
    assert ((counts - expected) ** 2 / expected).sum() < 20.5, "99.9 % of chi-square with 5"


def spoiled(task: str) -> tuple[OfflineDataset, EnvSpec, list[int]]:
    """Data in which some actions are those of other rows."""
    spec = probe_env(task)
    columns: dict[str, Any] = columns_of(random_dataset(spec, 120, 0))
    columns["actions"][20:40] = columns["actions"][40:60]
    data = rebuilt(columns)
    rows = forbidden(data, spec)
    assert rows
    assert set(rows) <= set(range(20, 40))
    return data, spec, rows


@every_masked
def test_forbidden_actions_in_data_are_found(task: str) -> None:
    data, spec, rows = spoiled(task)
    (finding,) = [f for f in check_dataset(data, spec) if f.check == "forbidden"]
    assert (finding.level, finding.count, list(finding.rows)) == ("error", len(rows), rows[:10])
    message = rf"row {rows[0]}: action .* is not allowed .* \({len(rows)} of 120"
    for refused in (lambda: data.in_learner_units(spec), lambda: view_of([data], spec)):
        with pytest.raises(DataError, match=message):
            refused()


def test_an_action_that_the_task_does_not_have_is_found_as_such() -> None:
    spec = probe_env(TASKS["Parts"])
    columns = columns_of(random_dataset(spec, 120, 0))
    columns["actions"][7] = 99
    findings = {finding.check for finding in check_dataset(rebuilt(columns), spec)}
    assert "outside_box" in findings
    assert "forbidden" not in findings


@every_masked
@pytest.mark.parametrize("algo", ["bc", "gail"])
def test_a_run_on_forbidden_actions_is_refused_in_one_sentence(
    task: str, algo: str, tmp_path: Path
) -> None:
    data, _, rows = spoiled(task)
    file = write_columns(tmp_path / "spoiled.npz", columns_of(data))
    key = "dataset" if algo == "bc" else "expert_dataset"
    sentence = run_cli(
        *("train", "--algo", algo, "--env", task, "--total-timesteps", 64, "--quiet"),
        *("--set", f"output_dir={tmp_path}", "--set", f"{key}_kind=npz"),
        *("--set", f"{key}_path={file}", "--set", "threads=1"),
    ).sentence()
    assert f"row {rows[0]}: action" in sentence
    assert "remove these rows" in sentence


@pytest.mark.parametrize("buffer_class", [ReplayBuffer, PrioritizedReplayBuffer])
def test_what_is_bootstrapped_n_steps_ahead_has_the_mask_of_that_state(
    buffer_class: type[ReplayBuffer],
) -> None:
    """The rows of an image's bytes, drawn uniformly or by priority, with episodes of 20 steps."""
    spec, n_step, steps = probe_env(TASKS["Parts"]), 3, 60
    rows = spec.example_observations(steps + 1, 0)
    buffer = buffer_class(
        steps, spec.obs_shape, action_dtype=torch.int64, obs_dtype=torch.uint8, n_step=n_step
    )
    for step in range(steps):
        over, no = np.array([[step % 20 == 19]]), np.zeros((1, 1), bool)
        seen, following = rows[None, step : step + 1], rows[None, step + 1 : step + 2]
        buffer.add(
            seen, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32), following, over, no
        )
    batch = buffer.sample(200)
    place = {row.tobytes(): number for number, row in enumerate(rows)}
    assert spec.observation is not None
    ahead = set()
    for obs, next_obs in zip(batch.obs[0].numpy(), batch.next_obs[0].numpy(), strict=True):
        first = place[obs.tobytes()]
        # The last rows of the ring have fewer steps after them.
        last = min(first + n_step, first - first % 20 + 20, steps)
        ahead.add(last - first)
        expected = spec.observation.allowed(rows[last])
        np.testing.assert_array_equal(spec.observation.allowed(next_obs), expected)
    assert ahead == {1, 2, 3}


@pytest.mark.parametrize("task", [*MASKED[1:], TASKS["Switches"]])
def test_actions_of_several_numbers_in_files_are_learned_from(task: str, tmp_path: Path) -> None:
    spec = probe_env(task)
    file = write_columns(tmp_path / "rows.npz", columns_of(random_dataset(spec, 200, 0)))
    from_file = {"dataset_kind": "npz", "dataset_path": str(file)}
    changes: dict[str, Any] = {"total_timesteps": 20, "eval_episodes": 1, "accelerate": "off"}
    config = small_config("bc", tmp_path, task=task, algo_kwargs=from_file, **changes)
    assert train(config).metrics["gradient_steps"] == 20
    rows = view_of([random_dataset(spec, 200, 0)] * 2, spec, weights=(1.0, 3.0))
    assert rows.kind("actions").dtype == np.int64
    for data in (rows, rows.to_dataset()):
        actions = data.read("actions", slice(0, 400))
        assert actions.dtype == np.int64
        assert actions.shape == (400, 2)
        assert ((actions >= 0) & (actions < spec.action_sizes)).all()

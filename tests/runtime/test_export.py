"""Exported policies do what the original does; `predict` over files and stdin."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from helpers.tiny import ROOT, run_cli, run_python, tiny_config
from rl_training.algorithms.spec import Loop
from rl_training.errors import DataError, MissingExtraError, SpecMismatch
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.train import train
from rl_training.runtime.workflows import LoadedAgent, load_agent
from rl_training.testing.contract import (
    build,
    parts_task,
    parts_tasks,
    small_config,
    takes_parts,
)
from rl_training.tools import export as exporting
from rl_training.tools.export import FORMATS, describe, export_agent, require_function

MEMORIES = {"recurrent_ppo", "recurrent_dqn", "recurrent_sac"}
NOT_FUNCTIONS = {"pets", "dreamer", *MEMORIES}
"""Methods whose action depends on more than the observation."""


def untrained(algo: str, **settings: Any) -> LoadedAgent:
    learner, env = build(algo, **settings)
    return LoadedAgent(learner, small_config(algo, "nowhere"), env, 5)


def run_onnx(path: Path, obs: NDArray[Any]) -> NDArray[Any]:
    session = onnxruntime.InferenceSession(path)
    result: NDArray[Any] = session.run(["action"], {"obs": obs})[0]
    return result


@pytest.mark.expensive(only=("sac",))
def test_every_method_is_exported(algo: str, tmp_path: Path) -> None:
    agent = untrained(algo)
    stateful = agent.learner.initial_acting_state(1) is not None
    for name, ending in FORMATS.items():
        target = tmp_path / f"policy{ending}"
        made = export_agent(agent, target, name)
        assert made.checked >= (5 if stateful else 256)
        assert made.largest_difference <= 1e-6
        assert target.is_file()
        assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.expensive(only=("dqn",))
def test_observations_of_several_parts_are_inputs_by_name(algo: str, tmp_path: Path) -> None:
    if not takes_parts(algo):
        pytest.skip("takes vectors alone")
    agent = untrained(algo, task=parts_task(algo))
    parts = agent.env_spec.observation
    assert parts is not None
    for name, ending in FORMATS.items():
        made = export_agent(agent, tmp_path / f"policy{ending}", name)
        assert made.checked >= (5 if algo in NOT_FUNCTIONS else 256)
        assert made.largest_difference <= 1e-6
    inputs = describe(agent)["obs_parts"]
    assert inputs["camera"] == {"shape": [8, 8, 3], "dtype": "uint8"}
    # What another program would give the file: the parts as the task has them, by name.
    obs = parts.examples(4, np.random.default_rng(3))
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    state = {
        f"state_{name}": np.zeros((4, *part["shape"]) if name != "draws" else (), part["dtype"])
        for name, part in describe(agent).get("state", {}).items()
    }
    given = {f"obs/{name}": value for name, value in obs.items()} | state
    assert {entry.name for entry in session.get_inputs()} == set(given)
    [action] = session.run(["action"], given)
    assert set(inputs) == set(parts.names())
    expected = agent.predict(parts.nested(obs))
    np.testing.assert_allclose(action, expected, atol=1e-6)


def test_only_planners_world_models_and_memories_have_a_state() -> None:
    stateful = {
        name for name in algorithm_names() if build(name)[0].initial_acting_state(1) is not None
    }
    assert stateful == NOT_FUNCTIONS
    for name in stateful:
        with pytest.raises(SpecMismatch, match="has no policy module: its action depends on"):
            require_function(untrained(name))


def onnx_episode(
    path: Path, facts: dict[str, Any], observations: NDArray[Any]
) -> tuple[list[NDArray[Any]], dict[str, NDArray[Any]]]:
    """Act through an episode with the file alone, as another program would."""
    session = onnxruntime.InferenceSession(path)
    count = observations.shape[1]
    state = {
        name: np.zeros((count, *part["shape"]) if name != "draws" else (), part["dtype"])
        for name, part in facts["state"].items()
    }
    actions = []
    for obs in observations:
        given = {"obs": obs} | {f"state_{name}": part for name, part in state.items()}
        action, *after = session.run(["action", *(f"next_{name}" for name in state)], given)
        actions.append(action)
        state = dict(zip(state, after, strict=True))
    return actions, state


@pytest.mark.matrix
def test_a_world_model_is_a_program_with_a_state(tmp_path: Path) -> None:
    agent = untrained("dreamer")
    made = export_agent(agent, tmp_path / "policy.onnx")
    assert made.largest_difference <= 1e-6
    facts = describe(agent)
    assert facts["batch"] is None
    assert set(facts["state"]) == {"draws", "deter", "latent", "action"}
    observations = np.random.default_rng(0).normal(size=(6, 4, 4)).astype(np.float32)
    actions, after = onnx_episode(tmp_path / "policy.onnx", facts, observations)
    state = agent.learner.initial_acting_state(4)
    expected = [agent.predict(obs, state) for obs in observations]
    assert np.array_equal(actions, expected)
    assert np.allclose(after["deter"], vars(state)["deter"][0], atol=1e-6)
    assert after["draws"] == vars(state)["rng"].counter


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["gru", "lstm"])
def test_a_policy_with_a_memory_is_a_program_with_a_state(memory: str, tmp_path: Path) -> None:
    agent = untrained("recurrent_ppo", memory=memory, normalize_observations=True)
    for name, ending in FORMATS.items():
        made = export_agent(agent, tmp_path / f"policy{ending}", name)
        assert made.largest_difference <= 1e-6
    facts = describe(agent)
    assert facts["batch"] is None
    assert set(facts["state"]) == {"memory"}
    observations = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)
    actions, after = onnx_episode(tmp_path / "policy.onnx", facts, observations)
    state = agent.learner.initial_acting_state(5)
    expected = [agent.predict(obs, state) for obs in observations]
    assert np.array_equal(actions, expected)
    assert np.allclose(after["memory"], vars(state)["memory"][0], atol=1e-6)


def masked_or_remembering() -> list[tuple[str, str]]:
    """Every method with masks or a memory, with each task of all kinds of parts that it takes."""
    return [
        (algo, task)
        for algo in algorithm_names()
        for task in parts_tasks(algo)
        if algo in MEMORIES or not task.endswith("SteeredParts")
    ]


def learned(algo: str, task: str, folder: Path) -> LoadedAgent:
    """An agent on standardised observations, of a short run where that needs no data."""
    spec = get_algorithm_spec(algo)
    names = {"normalize_observations"} & spec.config_class.model_fields.keys()
    settings = dict.fromkeys(names, True)
    if spec.loop is Loop.OFFLINE:
        return untrained(algo, task=task, **settings)
    changes: dict[str, Any] = {"total_timesteps": 48, "eval_episodes": 1, "accelerate": "off"}
    config = small_config(algo, folder, task=task, algo_kwargs=settings, **changes)
    return load_agent(train(config).run_dir, device="cpu")


@pytest.mark.expensive(only=("recurrent_dqn",))
@pytest.mark.parametrize(("algo", "task"), masked_or_remembering())
def test_masks_and_memories_leave_with_the_policy(algo: str, task: str, tmp_path: Path) -> None:
    """The file alone acts as the checkpoint does, step after step from its own state."""
    agent = learned(algo, task, tmp_path)
    parts = agent.env_spec.observation
    assert parts is not None
    made = export_agent(agent, tmp_path / "policy.onnx")
    assert made.largest_difference <= 1e-6
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    program = {
        name: np.zeros((7, *part["shape"]), part["dtype"])
        for name, part in describe(agent).get("state", {}).items()
    }
    state = agent.learner.initial_acting_state(7)
    assert (state is not None) == bool(program)
    largest, rng = made.largest_difference, np.random.default_rng(0)
    for _ in range(6):
        obs = parts.examples(7, rng)
        given = {f"obs/{name}": value for name, value in obs.items()}
        given |= {f"state_{name}": value for name, value in program.items()}
        action, *after = session.run(["action", *(f"next_{name}" for name in program)], given)
        program = dict(zip(program, after, strict=True))
        expected = agent.predict(parts.nested(obs), state)
        assert action.dtype == expected.dtype
        pairs = [(action, expected)] + [
            (value, vars(state)[name][0].numpy()) for name, value in program.items()
        ]
        largest = max(largest, *(float(np.abs(ours - theirs).max()) for ours, theirs in pairs))
        if "action_mask" in obs:
            first = np.cumsum((0, *agent.env_spec.choices[:-1]))
            places = action.reshape(7, -1) - 2 + first  # actions of these tasks count from 2
            assert np.take_along_axis(obs["action_mask"], places, 1).all()
    assert largest <= 1e-6


SHORT: dict[str, Any] = {"planning_horizon": 3, "planning_iterations": 2}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"planner": "cem"}, marks=pytest.mark.matrix),
        pytest.param({"planner": "icem"}, marks=pytest.mark.matrix),
        pytest.param({"planner": "mppi", "trajectory_sampling": "ts1"}, marks=pytest.mark.matrix),
    ],
    ids=lambda settings: str(settings["planner"]),
)
def test_a_planner_is_a_program_with_a_state(settings: dict[str, Any], tmp_path: Path) -> None:
    agent = untrained("pets", **SHORT, **settings)
    for name, ending in FORMATS.items():
        made = export_agent(agent, tmp_path / f"policy{ending}", name)
        assert made.largest_difference <= 1e-6
    facts = describe(agent)
    assert facts["batch"] == 1
    observations = np.random.default_rng(0).normal(size=(4, 1, 3)).astype(np.float32)
    actions, _ = onnx_episode(tmp_path / "policy.onnx", facts, observations)
    state = agent.learner.initial_acting_state(1)
    expected = [agent.predict(obs, state) for obs in observations]
    assert np.allclose(actions, expected, atol=1e-5)  # the host rounds normal numbers otherwise
    module = torch.export.load(tmp_path / "policy.pt2").module()
    start = exporting.StatefulPolicy(agent).initial(1)
    with torch.no_grad():
        action, after = module(torch.from_numpy(observations[0]), start)
    assert np.allclose(action, expected[0], atol=1e-5)
    assert after["draws"] > 0


def test_the_inverse_error_function_is_right_to_a_rounding() -> None:
    x = torch.linspace(-0.9999999, 0.9999999, 200_001, dtype=torch.float64)
    exact = torch.erfinv(x)
    relative = (exporting.erfinv(x) - exact).abs() / exact.abs().clamp(min=1e-12)
    assert relative.max() < 1.5e-7
    assert exporting.erfinv(x.float()).dtype == torch.float32


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("algo", "setting"),
    [
        *(("ppo", "normalize_obs"), ("iql", "normalize_observations")),
        *(("sac", "normalize_observations"), ("td3", "normalize_observations")),
    ],
)
def test_normalisers_and_scaling_are_inside(algo: str, setting: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {setting: True}
    built, env = build(algo, task="Pendulum-v1", **settings)
    agent = LoadedAgent(built, small_config(algo, "nowhere", task="Pendulum-v1"), env, 5)
    learner: Any = built
    learner.obs_norm.mean.fill_(40.0)
    learner.obs_norm.variance.fill_(9.0)
    spec = agent.env_spec.model_copy(update={"action_low": (-5.0,), "action_high": (1.0,)})
    agent = replace(agent, env_spec=spec)
    export_agent(agent, tmp_path / "policy.onnx")
    obs = np.random.default_rng(0).normal(40, 30, (50, 3)).astype(np.float32)
    found = run_onnx(tmp_path / "policy.onnx", obs)
    np.testing.assert_allclose(found, agent.predict(obs), atol=1e-5)
    assert found.std() > 1e-3
    assert found.min() >= -5.0
    assert found.max() <= 1.0


def test_images_are_exported_as_bytes(tmp_path: Path) -> None:
    learner, env = build("dqn", task="rl_training/Catch-v0")
    config = small_config("dqn", "nowhere", task="rl_training/Catch-v0")
    agent = LoadedAgent(learner, config, env, 5)
    export_agent(agent, tmp_path / "policy.onnx")
    obs = np.zeros((2, *env.obs_shape), env.obs_dtype)
    assert np.array_equal(run_onnx(tmp_path / "policy.onnx", obs), agent.predict(obs))


def test_critics_are_not_in_the_file_and_the_agent_keeps_them(tmp_path: Path) -> None:
    agent = untrained("sac")
    export_agent(agent, tmp_path / "policy.pt2", "torch")
    weights = torch.export.load(tmp_path / "policy.pt2").state_dict
    assert weights
    assert not [name for name in weights if "critic" in name]
    assert all(parameter is not None for parameter in vars(agent.learner)["model"].parameters())
    agent.predict(np.zeros(3))


def test_a_policy_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting.Policy, "forward", lambda self, obs: obs[:, :1] * 0.001)
    with pytest.raises(DataError, match=r"differs from the original|the original gives"):
        export_agent(untrained("sac"), tmp_path / "policy.pt2", "torch")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"onnxruntime; pip install .*\[export\]"):
        export_agent(untrained("bc"), tmp_path / "policy.onnx")


# The command line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_config("sac", tmp_path_factory.mktemp("export"))).run_dir


def test_the_loader_of_the_docs_works_without_this_package(run: Path, tmp_path: Path) -> None:
    done = run_cli("export", "--checkpoint", run, "-o", tmp_path / "policy.onnx")
    assert done.code == 0, done.err
    assert float(done.values["largest_difference"]) < 1e-6
    page = (ROOT / "docs/deployment.md").read_text()
    code, *_ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert "rl_training" not in code.replace('["rl_training"]', "")
    assert len(code.splitlines()) <= 10
    printed = run_python("-c", code, cwd=tmp_path)
    assert printed.code == 0, printed.err
    expected = load_agent(run).predict(np.zeros(3))
    assert np.allclose(json.loads(printed.out), expected, atol=1e-6)


def test_the_description_is_printed_and_inside(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "a" / "policy.pt2"
    done = run_cli("export", "--checkpoint", run, "--format", "torch", "-o", target, "--json")
    facts = json.loads(done.out)["policy"]
    extra = {"rl_training": ""}
    torch.export.load(target, extra_files=extra)
    assert json.loads(extra["rl_training"]) == facts
    assert (facts["algo"], facts["obs_shape"], facts["obs_dtype"]) == ("sac", [3], "float32")


def test_mistakes_are_one_sentence(run: Path, tmp_path: Path) -> None:
    wrong = run_cli("export", "--checkpoint", run, "--format", "tflite").sentence()
    assert "--format must be onnx or torch, got 'tflite'" in wrong
    assert "no folder" in run_cli("export", "--checkpoint", tmp_path / "no").sentence()
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "policy.pt2"
    options = ["--format", "torch", "-o", target]
    assert "cannot be written" in run_cli("export", "--checkpoint", run, *options).sentence()


def test_predict_takes_files_of_lines_and_of_numbers(run: Path, tmp_path: Path) -> None:
    obs = np.random.default_rng(1).normal(size=(1500, 3)).astype(np.float32)
    np.save(tmp_path / "obs.npy", obs)
    lines = "\n".join(json.dumps(row.tolist()) for row in obs)
    (tmp_path / "obs.jsonl").write_text(lines + "\n")
    expected = load_agent(run).predict(obs)
    options = ["predict", "--checkpoint", run, "--input"]
    printed = run_cli(*options, tmp_path / "obs.jsonl").out.splitlines()
    assert np.array_equal(np.array([json.loads(line) for line in printed], np.float32), expected)
    assert run_cli(*options, tmp_path / "obs.npy", "-o", tmp_path / "act.npy").code == 0
    assert np.array_equal(np.load(tmp_path / "act.npy"), expected)


def test_predict_answers_each_line_of_stdin(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "[1, 0, 0]\n\n[[0, 1, 0], [0, 0, 1]]\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    done = run_cli("predict", "--checkpoint", run, "--input", "-")
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [np.shape(answer) for answer in answers] == [(1,), (2, 1)]


def test_bad_batches_are_one_sentence(run: Path, tmp_path: Path) -> None:
    options = ["predict", "--checkpoint", run]
    assert "either --obs" in run_cli(*options).sentence()
    assert "--output belongs to --input" in run_cli(*options, "--obs", "[]", "-o", "x").sentence()
    assert "cannot be read" in run_cli(*options, "-i", tmp_path / "no.jsonl").sentence()
    lines = tmp_path / "lines.jsonl"
    lines.write_text("[1, 2, 3]\n[1, 2\n")
    assert "lines.jsonl:2 is not JSON" in run_cli(*options, "-i", lines).sentence()
    lines.write_text("[1, 2, 3]\n[1, 2]\n")
    assert "must be numbers of shape (3,)" in run_cli(*options, "-i", lines).sentence()
    lines.write_text("")
    assert "holds no observation" in run_cli(*options, "-i", lines).sentence()
    (tmp_path / "bad.npy").write_bytes(b"what")
    assert (
        "bad.npy holds no observations" in run_cli(*options, "-i", tmp_path / "bad.npy").sentence()
    )

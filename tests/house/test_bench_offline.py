"""The offline lane of the benchmark: equal sizes on all sides, and the learning table.

Nothing here looks at how fast anything is or how much is learned.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench.evidence.offline
import numpy as np
import pytest
import torch
from bench.evidence.offline import (
    DEFAULTS,
    PEER,
    Data,
    main,
    make_jobs,
    make_parser,
    prepare,
    run,
    table,
)
from bench.evidence.offline_job import METHODS, Job, evaluate, make_job
from bench.evidence.offline_ours import WEIGHTS, offline_config, train_offline
from bench.speed.compare import require_same_sizes
from bench.speed.noise import noise_columns
from bench.speed.options import BenchError
from bench.speed.sizes import OFFLINE, SAC
from bench.speed.updates import noise_buffer, prepare_updates, update_config

from helpers.tiny import ROOT
from rl_training.experiment.config import load_config

CPU = torch.device("cpu")
ENV = "Pendulum-v1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two episodes of Pendulum's shapes; the first returns -20, the second -40."""
    rng, path = np.random.default_rng(0), tmp_path / "given" / "small.npz"
    path.parent.mkdir()
    states = rng.standard_normal((2, 21, 3), np.float32)
    np.savez(
        path,
        observations=states[:, :-1].reshape(40, 3),
        next_observations=states[:, 1:].reshape(40, 3),
        actions=rng.uniform(-3, 3, (40, 1)).astype(np.float32),
        rewards=np.repeat(np.array([-1, -2], np.float32), 20),
        terminations=np.zeros(40, bool),
        truncations=np.arange(40) % 20 == 19,
    )
    return path


# Rows


def linear(*sizes: int) -> int:
    """Parameters of a chain of layers."""
    return sum((before + 1) * after for before, after in pairwise(sizes))


OUTPUTS = {"sac": 2, "cql": 2, "iql": 1, "td3_bc": 1}
"""Numbers of the policy per entry of an action."""


@pytest.mark.parametrize("algo", OUTPUTS)
def test_our_side_has_the_sizes_of_the_comparison(algo: str) -> None:
    updates = prepare_updates(update_config(algo, accelerate="off"), CPU)
    outputs = OUTPUTS[algo] * SAC.action
    expected = {
        "parameters of actor": linear(SAC.obs, *SAC.hidden, outputs),
        "parameters of critics": 2 * linear(SAC.obs + SAC.action, *SAC.hidden, 1),
        "rows": SAC.buffer,
        "batch": SAC.batch,
    }
    if algo == "iql":
        expected["parameters of actor"] += SAC.action  # the deviation, which no state changes
        expected["parameters of value"] = linear(SAC.obs, *SAC.hidden, 1)
    assert updates.sizes() == expected
    updates.close()


def test_methods_are_held_to_the_peers_settings() -> None:
    cql: Any = update_config("cql").algo_config
    td3_bc: Any = update_config("td3_bc").algo_config
    assert (cql.num_cql_samples, cql.cql_alpha) == (OFFLINE.cql_samples, OFFLINE.cql_weight)
    assert (cql.alpha, cql.cql_target_gap) == ("auto", None)
    assert td3_bc.policy_delay == OFFLINE.policy_delay


def test_our_rows_are_those_that_the_peers_learn_from() -> None:
    noise, buffer = noise_columns(), noise_buffer(update_config("iql"), CPU)
    for name, column in (("obs", "observations"), ("action", "actions"), ("reward", "rewards")):
        torch.testing.assert_close(buffer.rows[name][0], torch.from_numpy(noise[column]))
    continues = torch.from_numpy(1 - noise["terminals"])
    torch.testing.assert_close(buffer.rows["continues"][0].float(), continues)
    torch.testing.assert_close(buffer.rows["next_obs"][0, :-1], buffer.rows["obs"][0, 1:])


def test_sides_of_different_sizes_are_not_compared() -> None:
    require_same_sizes({"off": {"batch": 256}, "d3rlpy": {"batch": 256}, "sb3": {}})
    with pytest.raises(BenchError, match=r"differ in size.*'batch': 255"):
        require_same_sizes({"off": {"batch": 256}, "d3rlpy": {"batch": 255}})


# Jobs


def options(**changes: Any) -> Namespace:
    found = make_parser().parse_args([])
    vars(found).update(changes)
    return found


DATA = Data(name="small@12345678", behaviour=-30.0, path=Path("small.npz"))


def test_sides_differ_in_nothing_but_the_side() -> None:
    jobs = make_jobs(options(peer="python", seeds=[4]), [DATA])
    sides = {method: [job.side for job in jobs if job.method == method] for method in METHODS}
    assert sides == {
        "cql": ["ours", PEER, DEFAULTS],
        "iql": ["ours", PEER],
        "td3_bc": ["ours", PEER],
    }
    for method in METHODS:
        same = {replace(job, side="") for job in jobs if job.method == method}
        assert len(same) == 1, method
    assert {job.updates for job in jobs if job.method != "cql"} == {12_000}
    assert {job.side for job in make_jobs(options(), [DATA])} == {"ours"}


def test_a_job_survives_json() -> None:
    job = make_job("ours", "cql", "small@12345678", 3, hidden=(8, 4))
    assert Job.from_json(job.to_json()) == job


def test_our_run_has_the_jobs_sizes() -> None:
    job = make_job("ours", "cql", "small", 3, hidden=(8, 4), batch=7, updates=5)
    config = offline_config(job, "small.npz", "runs")
    settings: Any = config.algo_config
    assert (settings.hidden_sizes, settings.batch_size, config.total_timesteps) == ((8, 4), 7, 5)
    assert (settings.cql_alpha, settings.reward_scale, settings.actor_learning_rate) == (
        *(job.weight, job.reward_scale),
        job.learning_rate,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_job_trains_and_gives_a_policy_in_the_tasks_units(
    method: str, file: Path, tmp_path: Path
) -> None:
    data = prepare(file, ENV, tmp_path)
    assert data.behaviour == -30
    job = make_job("ours", method, data.name, 0, hidden=(8,), batch=4, updates=3)
    policy = train_offline(job, str(data.path))
    actions = policy(np.full((2, 3), 100, np.float32))
    assert actions.shape == (2, 1)
    assert np.abs(actions).max() <= 2


def test_all_sides_read_a_copy_whose_actions_are_inside_the_box(file: Path, tmp_path: Path) -> None:
    with np.load(file) as original, np.load(prepare(file, ENV, tmp_path).path) as copy:
        assert np.abs(original["actions"]).max() > 2
        np.testing.assert_array_equal(copy["actions"], original["actions"].clip(-2, 2))
        np.testing.assert_array_equal(copy["truncations"], original["truncations"])


def test_every_policy_meets_the_same_episodes() -> None:
    def still(obs: Any) -> Any:
        return np.zeros((len(obs), 1), np.float32)

    first = evaluate(still, ENV, 3)
    assert len(set(first)) == 3
    assert evaluate(still, ENV, 3) == first
    assert evaluate(lambda obs: still(obs) + 1, ENV, 3) != first


def test_the_peer_runs_with_its_own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "{\\"path\\": \\"$PYTHONPATH\\", \\"module\\": \\"$3\\"}"\n')
    fake.chmod(0o755)
    job = make_job(DEFAULTS, "cql", DATA.name, 0)
    given = options(peer=str(fake), peer_path=f"a{os.pathsep}/b")
    expected = f"{Path('a').absolute()}{os.pathsep}/b"
    answer = run(job, DATA.path, given)
    assert answer == {"path": expected, "module": "bench.peers.d3rlpy_offline"}
    assert run(job, DATA.path, options(peer=str(fake)))["path"] == ""


def test_the_peers_module_knows_every_method() -> None:
    assert set(importlib.import_module("bench.peers.d3rlpy_offline").CONFIGS) == set(METHODS)


# The table


def test_a_line_has_the_data_and_both_sides_with_every_seed() -> None:
    jobs = make_jobs(options(peer="python", seeds=[0, 1], methods=["cql"]), [DATA])
    returns = {("ours", 0): [-1.0, -3.0], ("ours", 1): [-4.0], (PEER, 0): [-9.0]}
    results = {
        job.to_json(): {"returns": returns[job.side, job.seed]}
        for job in jobs
        if (job.side, job.seed) in returns
    }
    *_, line = table(jobs, [DATA], results).splitlines()
    assert " ".join(line.split()) == "cql small -30 -3 (-2 -4) -9 (-9)"


def test_finished_jobs_are_kept_and_a_failed_one_is_done_again(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def fake(job: Job, path: Path, given: Namespace) -> dict[str, Any]:
        calls.append(job.seed)
        if job.seed == 1 and calls.count(1) == 1:
            raise RuntimeError("no luck")
        return {"returns": [float(job.seed)], "training_seconds": 1.0}

    monkeypatch.setattr(bench.evidence.offline, "run", fake)
    report = file.with_suffix(".json")
    command = ["--data", str(file), "--methods", "iql", "--jobs", "1", "--json", str(report)]
    assert main(command) == 1
    assert "seed 1 failed: no luck" in capsys.readouterr().out
    assert main(command) == 0
    assert calls == [0, 1, 2, 1]
    assert "1 (0 1 2)" in capsys.readouterr().out
    assert len(json.loads(report.read_text())["results"]) == 3


def test_without_data_it_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 2
    assert "--data FILE" in capsys.readouterr().out
    assert main(["--data", str(tmp_path / "absent.npz")]) == 2
    assert "absent.npz" in capsys.readouterr().out


def test_commands_of_the_docs_parse() -> None:
    found = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for line in page.read_text().replace("\\\n", " ").splitlines():
            if "python -m bench.evidence.offline " in line and "`" not in line:
                command = line.partition("python -m bench.evidence.offline ")[2]
                make_parser().parse_args(shlex.split(command, comments=True))
                found += 1
    assert found >= 2


@pytest.mark.parametrize("method", METHODS)
def test_the_table_has_the_settings_of_the_presets(method: str) -> None:
    preset: Any = load_config(f"{method}/pendulum").algo_config
    table: Any = offline_config(
        make_job("ours", method, "small", 0), "small.npz", "runs"
    ).algo_config
    # TD3+BC and IQL are compared with what their presets had then.
    names = ["reward_scale"]
    names += [WEIGHTS[method]] if method != "td3_bc" else ["hidden_sizes", "learning_rate", "tau"]
    names += ["batch_size", "hidden_sizes", "learning_rate", "tau"] if method == "cql" else []
    assert {n: getattr(table, n) for n in names} == {n: getattr(preset, n) for n in names}

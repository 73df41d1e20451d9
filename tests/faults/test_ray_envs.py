"""Environments in Ray actors: the same bits as in this process, also when an actor dies."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny import learner_digest, run_cli, tiny_config, write_tiny
from rl_training.envs.backends import ray_actors as ray_envs
from rl_training.envs.backends.lanes import Task, split
from rl_training.envs.backends.ray_actors import RayEnvs
from rl_training.envs.factory import probe_env
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.errors import EnvError, full_traceback, last_own_frame
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("PYTHONPATH", f"{TESTS.parent / 'src'}:{TESTS}")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def make(mode: Any, **changes: Any) -> SeedVectorEnv:
    values: dict[str, Any] = {"env_id": "Pendulum-v1", "env_kwargs": {"max_episode_steps": 7}}
    values |= changes
    return SeedVectorEnv.make(values["env_id"], values["env_kwargs"], 3, (5, 6), mode)


def rows(envs: SeedVectorEnv, count: int, start: int = 0) -> list[np.ndarray[Any, Any]]:
    found = []
    for step in range(start, start + count):
        actions = np.random.default_rng(step).uniform(-1, 1, (2, 3, 1)).astype(np.float32)
        made = envs.step(actions)
        found += [made.obs, made.reward, made.truncated, made.final_obs]
    return found


def test_lanes_are_shared_out_in_order() -> None:
    task = Task(
        env_id="Pendulum-v1",
        env_kwargs={},
        spec=probe_env("Pendulum-v1", {}),
        num_envs=3,
        seeds=(5, 6),
    )
    parts = split(task, 4)
    assert [len(part.lanes) for part in parts] == [2, 2, 1, 1]
    assert [lane for part in parts for lane in part.lanes] == [
        (seed, index) for seed in (5, 6) for index in range(3)
    ]


@pytest.mark.slow
def test_steps_and_snapshots_are_those_of_this_process(cluster: None) -> None:
    here, there = make("sync"), make("ray")
    seeds = [11, 12]
    assert np.array_equal(here.reset(seeds), there.reset(seeds))
    for a, b in zip(rows(here, 10), rows(there, 10), strict=True):
        assert np.array_equal(a, b)
    state = there.snapshot()
    expected = rows(here, 6, 10)
    again = make("sync")
    again.restore(state)
    for a, b, c in zip(expected, rows(there, 6, 10), rows(again, 6, 10), strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    there.close()


@pytest.mark.slow
def test_an_actor_that_dies_leaves_no_trace(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_envs, "MOST_CALLS", 8)  # so that a state is fetched in between
    here, there = make("sync"), make("ray")
    assert np.array_equal(here.reset([1, 2]), there.reset([1, 2]))
    backend = there.backend
    assert isinstance(backend, RayEnvs)
    for start in (0, 5, 15):
        for a, b in zip(rows(here, 5 + start, start), rows(there, 5 + start, start), strict=True):
            assert np.array_equal(a, b)
        ray.kill(backend._parts[start % 2].handle)
    assert np.array_equal(here.backend.observations(), there.backend.observations())
    there.close()


@pytest.mark.slow
def test_a_failing_environment_is_named(cluster: None) -> None:
    kwargs = {"fault": "raises", "at": 40}
    envs = SeedVectorEnv.make("helpers.envs:BrokenEnv", kwargs, 2, (0,), "ray")
    envs.reset([0])
    for _ in range(39):
        envs.step(np.zeros((1, 2), np.int64))
    with pytest.raises(EnvError, match=r"BrokenEnv.*100% broken") as caught:
        envs.step(np.zeros((1, 2), np.int64))
    frame = last_own_frame(caught.value)
    assert frame is not None
    assert re.search(r"helpers/envs\.py:\d+, in step$", frame)
    assert "in another process:" in full_traceback(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_a_run_is_the_same_to_the_bit_and_resumes(cluster: None, algo: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"num_envs": 2, "seeds": (1, 2)}
    here = train(tiny_config(algo, tmp_path, run_name="here", **values)).run_dir
    config = tiny_config(algo, tmp_path, run_name="there", vector_mode="ray", **values)
    there = train(config, stop_at=40).run_dir
    resume_training(there)
    for seed in (1, 2):
        member = f"seed_{seed}"
        assert learner_digest(here / member) == learner_digest(there / member)


@pytest.mark.slow
def test_the_command_line_collects_on_a_cluster(cluster: None, tmp_path: Path) -> None:
    done = run_cli("train", "-c", write_tiny(tmp_path), "--collect", "ray", "-q")
    assert done.code == 0, done.err
    assert "vector_mode: ray" in (Path(done.values["run_dir"]) / "config.yaml").read_text()


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    sentence = run_cli("train", "-c", write_tiny(tmp_path), "--collect", "ray").sentence()
    assert 'vector_mode ray needs Ray; pip install "rl-training[ray]"' in sentence
    assert (
        "vector_mode must be one of"
        in run_cli("train", "-c", write_tiny(tmp_path), "--collect", "dask").sentence()
    )

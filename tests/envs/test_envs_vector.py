"""`VectorEnv`: resets, flags, seeding, failures and worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from helpers.envs import CounterEnv
from helpers.steps import random_actions, same_steps
from helpers.vector_env import VectorEnv
from rl_training.envs import SeedVectorEnv, env_seed
from rl_training.envs.backends import kinds as backends
from rl_training.envs.backends import processes as worker_processes
from rl_training.envs.backends.kinds import Mode, SyncEnvs
from rl_training.envs.backends.mujoco_batch import usable_cores
from rl_training.errors import ConfigError, EnvError, NonFiniteError

MODULE = CounterEnv.__module__
COUNTER = f"{MODULE}:CounterEnv"
SOURCE = Path(backends.__file__).parents[3]
HELPERS = Path(__file__).resolve().parents[1]
MODES: tuple[Mode, ...] = ("sync", "async")


def step_four_times(env: VectorEnv) -> None:
    for _ in range(4):
        env.step(np.ones(env.num_envs, dtype=np.int64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_no_transition_crosses_a_reset(mode: Mode, num_envs: int) -> None:
    env = VectorEnv(COUNTER, {"length": 3}, num_envs, seed=0, mode=mode)
    obs = env.reset()
    assert obs.tolist() == [[1.0, 0.0]] * num_envs
    for t in range(1, 13):
        step = env.step(np.zeros(num_envs, dtype=np.int64))
        successor = obs + np.array([0, 1], dtype=np.float32)
        assert np.array_equal(step.final_obs, successor)
        ended = t % 3 == 0
        assert step.terminated.tolist() == [ended] * num_envs
        assert not step.truncated.any()
        assert step.reward.tolist() == successor[:, 1].tolist()
        fresh = np.stack([obs[:, 0] + 1, np.zeros(num_envs)], axis=1)
        assert np.array_equal(step.obs, fresh if ended else successor)
        obs = step.obs
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_both_flags_are_reported_as_they_are(mode: Mode) -> None:
    kwargs = {"length": 2, "terminated": True, "truncated": True}
    env = VectorEnv(COUNTER, kwargs, 2, seed=0, mode=mode)
    env.reset()
    first, second = (env.step(np.zeros(2, dtype=np.int64)) for _ in range(2))
    assert not first.terminated.any()
    assert not first.truncated.any()
    assert second.terminated.all()
    assert second.truncated.all()
    env.close()


def test_time_limit_on_the_terminal_step_reports_both_flags() -> None:
    env = VectorEnv(COUNTER, {"length": 3, "max_episode_steps": 3}, 1, seed=0)
    env.reset()
    steps = [env.step(np.zeros(1, dtype=np.int64)) for _ in range(3)]
    assert (bool(steps[2].terminated[0]), bool(steps[2].truncated[0])) == (True, True)


def test_environments_that_end_at_different_times_are_reset_one_by_one() -> None:
    env = VectorEnv("CartPole-v1", {}, 3, seed=1, mode="sync")
    env.reset()
    partial = 0
    for actions in random_actions(env.spec, (200, 3)):
        step = env.step(actions)
        ended = step.terminated | step.truncated
        same = (step.final_obs == step.obs).all(axis=1)
        assert (same == ~ended).all()
        partial += int(ended.any() and not ended.all())
    assert partial > 5


@pytest.mark.parametrize("mode", MODES)
def test_async_gives_the_bits_of_sync(mode: Mode) -> None:
    reference = VectorEnv("Pendulum-v1", {"max_episode_steps": 20}, 2, seed=5, mode="sync")
    other = VectorEnv("Pendulum-v1", {"max_episode_steps": 20}, 2, seed=5, mode=mode)
    assert np.array_equal(reference.reset(), other.reset())
    for actions in random_actions(reference.spec, (50, 2)):
        assert same_steps(reference.step(actions), other.step(actions))
    other.close()


def test_seeds_differ_by_environment_and_by_seed_and_are_used_once() -> None:
    assert len({env_seed(s, i) for s in range(50) for i in range(50)}) == 2500
    env = VectorEnv("Pendulum-v1", {}, 2, seed=0)
    first, again = env.reset(), env.reset()
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, again)
    assert np.array_equal(VectorEnv("Pendulum-v1", {}, 2, seed=0).reset(), first)
    assert np.array_equal(VectorEnv("Pendulum-v1", {}, 1, seed=0).reset()[0], first[0])


@pytest.mark.parametrize("num_envs", [1, 4])
def test_reset_with_a_seed_begins_anew_as_if_made_with_it(num_envs: int) -> None:
    env = VectorEnv("CartPole-v1", {}, num_envs, seed=0)
    env.reset()
    again, made = env.reset(seed=7), VectorEnv("CartPole-v1", {}, num_envs, seed=7)
    assert np.array_equal(again, made.reset())
    assert np.array_equal(env.reset(), made.reset())
    both = SeedVectorEnv.make("CartPole-v1", {}, num_envs, [0, 1])
    both.reset()
    assert np.array_equal(both.reset([7, 8])[0], again)


@pytest.mark.parametrize(
    ("env_id", "num_envs", "mode"),
    [
        (COUNTER, 2, "sync"),
        (COUNTER, 2, "async"),
        (f"{MODULE}:ReusedBufferEnv", 1, "sync"),
        (f"{MODULE}:ReusedBufferEnv", 2, "sync"),
        (f"{MODULE}:ReusedBufferEnv", 2, "async"),
        ("CartPole-v1", 4, "auto"),
    ],
)
def test_arrays_are_not_written_to_later(env_id: str, num_envs: int, mode: Mode) -> None:
    kwargs = {"max_episode_steps": 3} if env_id == "CartPole-v1" else {}
    env = VectorEnv(env_id, kwargs, num_envs, seed=0, mode=mode)
    kept = [env.reset()]
    for _ in range(7):
        kept += env.step(np.zeros(num_envs, dtype=np.int64))
    copies = [array.copy() for array in kept]
    for _ in range(4):
        env.step(np.ones(num_envs, dtype=np.int64))
    assert all(np.array_equal(a, b) for a, b in zip(kept, copies, strict=True))
    env.close()


def test_step_has_the_promised_dtypes_and_shapes() -> None:
    for env_id, n in (("HalfCheetah-v5", 2), ("CartPole-v1", 4), ("CartPole-v1", 1)):
        if env_id.startswith("Half"):
            pytest.importorskip("mujoco")
        env = VectorEnv(env_id, {}, n, seed=0)
        env.reset()
        step = env.step(random_actions(env.spec, (n,)))
        assert step.obs.shape == (n, *env.spec.obs_shape)
        assert step.obs.dtype == np.float32  # what learners take, whatever the task gives
        assert step.obs.flags.c_contiguous
        assert step.reward.dtype == np.float32
        assert step.terminated.dtype == step.truncated.dtype == np.bool_
        assert step.reward.shape == step.terminated.shape == step.truncated.shape == (n,)


def test_discrete_actions_are_shifted_to_the_start_of_the_space() -> None:
    env = VectorEnv(COUNTER, {"start": 5}, 1, seed=0, mode="sync")
    env.reset()
    env.step(np.array([1]))
    assert isinstance(env.backend, SyncEnvs)
    assert env.backend.envs[0].get_wrapper_attr("actions_seen") == [6]


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_raises_is_named(mode: Mode) -> None:
    kwargs = {"fault": "raises", "at": 4}
    env = VectorEnv(f"{MODULE}:BrokenEnv", kwargs, 2, seed=11, mode=mode)
    env.reset()
    with pytest.raises(EnvError, match=r"index 0, seed 11.*100% broken.*last action was.*1"):
        step_four_times(env)
    assert no_processes(env)
    env.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["nan_obs", "nan_reward", "wrong_shape", "four_values"])
def test_a_contract_broken_in_mid_run_is_one_clear_error(mode: Mode, fault: str) -> None:
    env = VectorEnv(f"{MODULE}:BrokenEnv", {"fault": fault, "at": 4}, 1, seed=2, mode=mode)
    env.reset()
    for _ in range(3):
        env.step(np.zeros(1, dtype=np.int64))
    with pytest.raises(EnvError, match=r"index 0, seed 2"):
        env.step(np.zeros(1, dtype=np.int64))
    env.close()


def test_non_finite_values_name_environment_and_step() -> None:
    env = VectorEnv("Pendulum-v1", {}, 3, seed=4)
    env.reset()
    env.step(np.zeros((3, 1), dtype=np.float32))
    bad = np.array([[0.0], [np.nan], [0.0]], dtype=np.float32)
    message = (
        r"environment 1 of Pendulum-v1 \(seed 4\).*step 1.*lower learning_rate, or resume from"
    )
    with pytest.raises(NonFiniteError, match=message):
        env.step(bad)


def test_the_seed_is_named_when_several_run_side_by_side() -> None:
    env = SeedVectorEnv.make("Pendulum-v1", {}, 2, [4, 6])
    env.reset()
    bad = np.zeros((2, 2, 1), dtype=np.float32)
    bad[1, 0] = np.inf
    with pytest.raises(NonFiniteError, match=r"environment 0 of Pendulum-v1 \(seed 6\).*step 0"):
        env.step(bad)


@pytest.mark.parametrize("fault", ["nan_obs", "nan_reward", "raises"])
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_of_one_seed_names_environment_seed_and_step(mode: Mode, fault: str) -> None:
    kwargs = {"fault": fault, "at": 3}
    env = SeedVectorEnv.make(f"{MODULE}:BrokenEnv", kwargs, 1, [4, 6], mode)
    healthy = SeedVectorEnv.make(f"{MODULE}:BrokenEnv", kwargs, 1, [4, 6], mode)
    for envs in (env, healthy):
        envs.reset()
        envs.step(np.zeros((2, 1), dtype=np.int64))
    env.step(np.zeros((2, 1), dtype=np.int64))
    # The second seed is one step further than the first, so that it fails first.
    parts = [healthy.snapshot()["per_seed"][0], env.snapshot()["per_seed"][1]]
    env.restore({"per_seed": parts})
    step = "" if fault == "raises" else r".*not finite at step 2"
    with pytest.raises(EnvError, match=rf"index 0, seed 6{step}.*last action was np.int64\(1\)"):
        env.step(np.ones((2, 1), dtype=np.int64))
    env.close()
    healthy.close()


def test_environments_with_different_spaces_are_refused() -> None:
    with pytest.raises(EnvError, match=r"GrowingEnv has other spaces every time it is made"):
        VectorEnv(f"{MODULE}:GrowingEnv", {}, 2)


def processes(env: VectorEnv) -> list[Any]:
    return list(getattr(env.backend, "processes", []))


def no_processes(env: VectorEnv) -> bool:
    return not any(process.is_alive() for process in processes(env))


@pytest.mark.parametrize("kill", [True, False])
def test_a_dead_worker_is_named_and_leaves_no_process(
    kill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "usable_cores", lambda: 2)
    kwargs = {"fault": "" if kill else "dies", "at": 4}
    env = VectorEnv(f"{MODULE}:BrokenEnv", kwargs, 2, seed=9, mode="async")
    env.reset()
    if kill:
        os.kill(processes(env)[1].pid, signal.SIGKILL)
    with pytest.raises(EnvError, match=r"seed 9.*worker process died \(exit code (-9|7)\)"):
        step_four_times(env)
    assert no_processes(env)
    env.close()


def test_a_hanging_worker_is_an_error_after_the_time_limit() -> None:
    kwargs = {"fault": "hangs", "at": 4}
    env = VectorEnv(f"{MODULE}:BrokenEnv", kwargs, 2, seed=9, mode="async", timeout=0.5)
    env.reset()
    with pytest.raises(EnvError, match=r"gave no answer within 0.5 s"):
        step_four_times(env)
    assert no_processes(env)


def test_workers_outlive_signals_to_the_group() -> None:
    env = VectorEnv(COUNTER, {}, 2, seed=0, mode="async")
    env.reset()
    for process in processes(env):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(process.pid, number)
    time.sleep(0.1)
    env.step(np.zeros(2, dtype=np.int64))
    env.snapshot()
    env.close()
    assert no_processes(env)
    env.close()


@pytest.mark.parametrize("way", ["forgets to close", "is killed"])
def test_workers_end_with_their_owner(way: str) -> None:
    program = f"""
        import os, signal
        from helpers.vector_env import VectorEnv
        env = VectorEnv("CartPole-v1", {{}}, 2, 0, "async")
        env.reset()
        print(*[process.pid for process in env.backend.processes], flush=True)
        if {way == "is killed"}:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE), str(HELPERS)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == min(2, usable_cores())
    assert done.returncode == (0 if way == "forgets to close" else -9)
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("mode", MODES)
def test_seeds_side_by_side_equal_seeds_alone(mode: Mode) -> None:
    together = SeedVectorEnv.make("CartPole-v1", {"max_episode_steps": 7}, 2, [3, 8], mode)
    alone = [VectorEnv("CartPole-v1", {"max_episode_steps": 7}, 2, s, "sync") for s in (3, 8)]
    assert np.array_equal(together.reset(), np.stack([env.reset() for env in alone]))
    for actions in random_actions(together.spec, (30, 2, 2)):
        step = together.step(actions)
        for s, env in enumerate(alone):
            expected = env.step(actions[s])
            assert np.array_equal(step.obs[s], expected.obs)
            assert np.array_equal(step.final_obs[s], expected.final_obs)
            assert np.array_equal(step.reward[s], expected.reward)
            assert np.array_equal(step.truncated[s], expected.truncated)
    together.close()


def test_final_obs_is_obs_when_no_episode_ended() -> None:
    env = SeedVectorEnv.make(COUNTER, {"length": 3}, 2, [0, 1])
    env.reset()
    steps = [env.step(np.zeros((2, 2), dtype=np.int64)) for _ in range(3)]
    assert steps[0].obs.shape == (2, 2, 2)
    assert steps[0].reward.shape == (2, 2)
    assert [step.final_obs is step.obs for step in steps] == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs must be >= 1, got 0"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"mode": "fast"}, "mode must be one of auto, native, sync, async, ray, got 'fast'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VectorEnv(COUNTER, {}, **arguments)

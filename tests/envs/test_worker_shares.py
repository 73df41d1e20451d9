"""`vector_mode: async`: shares of the lanes in processes, with the results of one after another."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from helpers.envs import CounterEnv
from helpers.steps import random_actions, same_steps
from rl_training.envs import SeedVectorEnv, env_seed
from rl_training.envs.backends import kinds, processes
from rl_training.envs.backends.kinds import Mode, SyncEnvs
from rl_training.envs.backends.processes import WorkerEnvs, worker_count
from rl_training.envs.factory import probe_env
from rl_training.envs.given import name_of
from rl_training.envs.step import Step
from rl_training.errors import CheckpointError, EnvError, full_traceback, last_own_frame

MODULE = CounterEnv.__module__
COUNTER = probe_env(f"{MODULE}:CounterEnv", {})


def whole(value: int) -> Any:
    """A case of the whole matrix."""
    return pytest.param(value, marks=pytest.mark.matrix)


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)


def make(
    env_id: str = "Pendulum-v1",
    kwargs: dict[str, Any] | None = None,
    num_envs: int = 3,
    seeds: tuple[int, ...] = (5, 6),
    mode: Mode = "async",
    **changes: Any,
) -> SeedVectorEnv:
    return SeedVectorEnv.make(env_id, kwargs, num_envs, seeds, mode, **changes)


def begun_and_played(envs: SeedVectorEnv, actions: Any) -> list[Step]:
    envs.reset()
    return played(envs, actions)


def played(envs: SeedVectorEnv, actions: Any) -> list[Step]:
    return [envs.step(action) for action in actions]


def all_same(left: list[Step], right: list[Step]) -> bool:
    return all(same_steps(a, b) for a, b in zip(left, right, strict=True))


def pids(envs: SeedVectorEnv) -> list[int]:
    assert isinstance(envs.backend, WorkerEnvs)
    return [process.pid or 0 for process in envs.backend.processes]


def all_end(workers: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(_runs(pid) for pid in workers)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_there_are_as_many_processes_as_shorten_a_step() -> None:
    given = [(64, 0), (64, 3), (8, 0), (9, 0), (6, 5), (3, 0), (3, 1), (3, 99), (1, 0)]
    assert [worker_count(*one) for one in given] == [8, 3, 8, 5, 3, 3, 1, 3, 1]


@pytest.mark.parametrize("threads", [1, 2, whole(4), whole(6)])
@pytest.mark.parametrize(
    "env_id", ["Pendulum-v1", f"{MODULE}:NoiseEnv", f"{MODULE}:ImageEnv", f"{MODULE}:CounterEnv"]
)
def test_results_do_not_depend_on_the_number_of_processes(env_id: str, threads: int) -> None:
    kwargs = {"max_episode_steps": 7}
    alone = make(env_id, kwargs, mode="sync")
    spread = make(env_id, kwargs, threads=threads)
    assert len(pids(spread)) == {1: 1, 2: 2, 4: 3, 6: 6}[threads]
    assert np.array_equal(alone.reset(), spread.reset())
    actions = random_actions(alone.spec, (40, 2, 3))
    assert all_same(played(alone, actions[:20]), played(spread, actions[:20]))
    # An end by step 21 is between the two: what is snapshotted is the episode after it.
    states = [alone.snapshot(), spread.snapshot()]
    expected = played(alone, actions[20:])
    assert all_same(expected, played(spread, actions[20:]))
    for state in states:
        for other in (make(env_id, kwargs, mode="sync"), make(env_id, kwargs, threads=4)):
            assert other.restore(state).restarted == []
            assert all_same(expected, played(other, actions[20:]))
            other.close()
    assert np.array_equal(alone.reset(), spread.reset())
    assert np.array_equal(alone.reset([8, 9]), spread.reset([8, 9]))
    spread.close()


def test_an_environment_may_keep_its_actions() -> None:
    both = [make(f"{MODULE}:KeepsActionsEnv", mode=mode) for mode in ("sync", "async")]
    for envs in both:
        envs.reset()
    actions = random_actions(both[0].spec, (12, 2, 3))
    assert all_same(played(both[0], actions), played(both[1], actions))
    both[1].close()


FAULTS = {
    "raises": r"step failed with RuntimeError: 100% broken",
    "wrong_shape": r"step failed with ValueError: observation of shape \(1,\)",
    "flag_is_text": r"step failed with ValueError: truncated must be a bool",
    "reset_raises": r"reset failed with RuntimeError: no reset today",
    "nan_obs": r"gave a observation that is not finite at step 3",
    "dies": r"failed at step 3: its worker process died \(exit code 7\)",
    "hangs": r"failed at step 3: gave no answer within 1 s",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("lane", [whole(0), 1, whole(4)])
def test_the_environment_that_fails_is_named_among_those_of_its_process(
    fault: str, lane: int
) -> None:
    seed, index = divmod(lane, 3)
    kwargs = {"fault": fault, "at": 4, "chosen": env_seed(seed + 5, index)}
    envs = make(f"{MODULE}:SingledOutEnv", kwargs, threads=2, timeout=1.0, spec=COUNTER)
    workers = pids(envs)
    where = rf"\(index {index}, seed {seed + 5}\).*"
    with pytest.raises(EnvError, match=where + FAULTS[fault]) as caught:
        begun_and_played(envs, np.ones((5, 2, 3), np.int64))
    if "reset" not in fault:
        assert "the last action was" in str(caught.value)
    if fault != "nan_obs":  # which the owner notices
        assert all_end(workers)
    envs.close()
    envs.close()
    assert all_end(workers)


def test_an_error_comes_back_with_its_own_line_and_traceback() -> None:
    envs = make(f"{MODULE}:BrokenEnv", {"fault": "raises", "at": 1}, spec=COUNTER)
    envs.reset()
    with pytest.raises(EnvError, match="100% broken") as caught:
        played(envs, np.ones((1, 2, 3), np.int64))
    frame = last_own_frame(caught.value)
    assert frame is not None
    assert re.search(r"helpers/envs\.py:\d+, in step$", frame)
    assert "in another process:\nTraceback" in full_traceback(caught.value)


def test_an_error_that_cannot_be_sent_is_described() -> None:
    envs = make(f"{MODULE}:SecretiveEnv", threads=2)
    envs.reset()
    with pytest.raises(EnvError, match=r"index 0, seed 5.*OddError: no state today") as caught:
        envs.snapshot()
    assert "in get_state" in str(last_own_frame(caught.value))


@pytest.mark.matrix
def test_each_environment_has_the_whole_time_limit() -> None:
    patient, hasty = (
        make(f"{MODULE}:SlowEnv", {"seconds": 0.4}, threads=1, timeout=timeout, spec=COUNTER)
        for timeout in (1.2, 0.3)
    )
    begun_and_played(patient, np.zeros((1, 2, 3), np.int64))  # 2.4 seconds in all
    patient.close()
    hasty.reset()
    with pytest.raises(EnvError, match=r"index 0, seed 5.*no answer within 0.3 s"):
        played(hasty, np.zeros((1, 2, 3), np.int64))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", r"HomeEnv.*RuntimeError: not away from home"),
        ("exits", r"HomeEnv.*SystemExit: 3"),
        ("dies", r"index 0, seed 5\) cannot be made: its worker process died \(exit code 7\)"),
        ("hangs", r"index 0, seed 5\) cannot be made: gave no answer within 0.5 s"),
        ("grows", r"HomeEnv has other spaces every time it is made"),
    ],
)
def test_an_environment_that_cannot_be_made_there_is_one_error(fault: str, message: str) -> None:
    before = psutil.Process().children()
    with pytest.raises(EnvError, match=message):
        make(f"{MODULE}:HomeEnv", {"fault": fault}, threads=2, timeout=0.5)
    assert psutil.Process().children() == before


def test_a_snapshot_that_does_not_fit_ends_the_processes() -> None:
    other = make(f"{MODULE}:OwnStateEnv", mode="sync")
    other.reset()
    envs = make(f"{MODULE}:OwnStateEnv", {"max_episode_steps": 5})
    workers = pids(envs)
    with pytest.raises(CheckpointError, match="wrappers are"):
        envs.restore(other.snapshot())
    assert all_end(workers)


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_nothing_is_left_behind() -> None:
    def left() -> tuple[int, int, list[str]]:
        gc.collect()
        files = len(os.listdir("/proc/self/fd"))
        return files, len(psutil.Process().children()), sorted(os.listdir("/dev/shm"))

    def use(end: Callable[[SeedVectorEnv], None]) -> None:
        envs = make()
        envs.reset()
        end(envs)

    def fail(envs: SeedVectorEnv) -> None:
        os.kill(pids(envs)[1], signal.SIGKILL)
        with pytest.raises(EnvError, match=r"index 1, seed 5.*died \(exit code -9\)"):
            envs.step(np.zeros((2, 3, 1), np.float32))

    use(SeedVectorEnv.close)
    before = left()
    for _ in range(3):
        use(SeedVectorEnv.close)
        use(fail)
    assert left() == before


def test_processes_end_when_nobody_holds_their_environments_any_more() -> None:
    first, second = make(), make()
    workers = pids(first)
    del first
    gc.collect()
    assert all_end(workers), "the second's processes must not keep the pipes of the first open"
    second.reset()
    second.close()


def test_an_environment_handed_over_in_python_reaches_the_processes() -> None:
    class HandedOver(CounterEnv):
        """Known by no name elsewhere."""

    def make_handed_over() -> HandedOver:
        return HandedOver(length=2)

    for given in (HandedOver, make_handed_over):
        envs = make(name_of(given))
        assert envs.reset().shape == (2, 3, 2)
        envs.step(np.zeros((2, 3), np.int64))
        envs.close()


@pytest.mark.matrix
def test_processes_may_be_started_in_another_way_than_by_forking() -> None:
    program = """
        import multiprocessing
        import numpy as np
        from rl_training.envs import SeedVectorEnv
        if __name__ == "__main__":
            multiprocessing.set_start_method("spawn")
            envs = SeedVectorEnv.make("Pendulum-v1", {"max_episode_steps": 3}, 2, (0,), "async")
            alone = SeedVectorEnv.make("Pendulum-v1", {"max_episode_steps": 3}, 2, (0,), "sync")
            same = np.array_equal(envs.reset(), alone.reset())
            for _ in range(5):
                action = np.zeros((1, 2, 1), np.float32)
                same &= np.array_equal(envs.step(action).obs, alone.step(action).obs)
            envs.close()
            print(same)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(Path(kinds.__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_note_says_how_many_processes_step_how_many() -> None:
    for threads, way in (
        (0, "6 processes with 1 each"),
        (4, "3 processes with 2 each"),
        (1, "one process beside this one"),
    ):
        envs = make(threads=threads)
        assert envs.note == f"6 environments run in vector_mode async: in {way}"
        envs.close()
    envs = make(num_envs=5, seeds=(0,), threads=3)
    assert "in 3 processes with at most 2 each" in str(envs.note)
    envs.close()
    assert isinstance(make(mode="auto").backend, SyncEnvs)

"""Disks that are full or refuse, locks, and readers beside a trainer (R9, R10)."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers.faults import Tried, final_state, setting
from helpers.fork_server import ForkServer
from rl_training.errors import CheckpointError, RLTrainingError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import (
    list_checkpoints,
    open_checkpoint,
    verify_checkpoint,
)
from rl_training.experiment.registry import algorithm_names
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.checkpoints.saver import bytes_of_checkpoints
from rl_training.runtime.replay import make_replay
from rl_training.runtime.results import TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent, resume_training
from rl_training.testing.contract import build, small_config

LOADS = setting("LOADS", 1000)


@contextmanager
def refusing(code: int, when: Callable[[Path], bool]) -> Iterator[list[Path]]:
    """Refuse to write files as long as `when` says so; yields those refused."""
    original, refused = files.write_file, list[Path]()

    def write(path: Path, chunks: Any) -> Any:
        if when(path):
            refused.append(path)
            path.write_bytes(b"half of it")
            raise OSError(code, os.strerror(code))
        return original(path, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_file", write)
        yield refused


def at_file(name: str) -> Callable[[Path], bool]:
    """Refuse this file of the checkpoints from step 100 on."""
    return lambda path: path.name == name and ".tmp-step_1" in str(path)


def steps_of(run: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(run)]


def checkpoints_held(path: Path) -> int:
    return len(list_checkpoints(path.parents[2]))


def run_config(algo: str, folder: Path, name: str = "run", **changes: Any) -> Any:
    return small_config(algo, folder, run_name=name, eval_episodes=0, **changes)


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "free space"), (errno.EROFS, "accessible"), (errno.EIO, "check the disk")],
)
@pytest.mark.parametrize("algo", ["dqn", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_disk_that_refuses_ends_the_run_with_advice_and_loses_nothing(
    algo: str, code: int, advice: str, tried: Tried, tmp_path: Path
) -> None:
    whole = train(run_config(algo, tmp_path, "whole"))
    with (
        refusing(code, lambda path: ".tmp-step_1" in str(path)),  # from step 100 on
        pytest.raises(CheckpointError, match=advice) as caught,
    ):
        train(run_config(algo, tmp_path))
    assert "\n" not in str(caught.value)
    run = tmp_path / "run"
    for entry in list_checkpoints(run):
        verify_checkpoint(entry.path)
    assert not [name for name in os.listdir(run / "checkpoints") if name.startswith(".tmp")]
    resumed = resume_training(run)
    found = compare_states(final_state(whole.run_dir), final_state(resumed.run_dir))
    tried("disk that refuses", algo, 1, len(found))
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algo", algorithm_names())
def test_a_full_disk_at_any_file_of_a_save_loses_nothing(
    algo: str, tried: Tried, tmp_path: Path
) -> None:
    expected = final_state(train(run_config(algo, tmp_path, "whole")).run_dir)
    names = [p.name for p in list_checkpoints(tmp_path / "whole")[-1].path.glob("*") if p.is_file()]
    failed = 0
    for name in names:
        with (
            refusing(errno.ENOSPC, at_file(name)),
            pytest.raises(CheckpointError, match="free space"),
        ):
            train(run_config(algo, tmp_path, name))
        resume_training(tmp_path / name)
        failed += compare_states(expected, final_state(tmp_path / name)) != []
    tried("disk that refuses", algo, len(names), failed)
    assert failed == 0


def test_a_full_disk_is_made_room_on_by_dropping_older_checkpoints(tmp_path: Path) -> None:
    """The disk holds two checkpoints; the third fits once the first is gone."""
    config = run_config("dqn", tmp_path, checkpoint_interval=30, keep_checkpoints=3)
    with refusing(
        errno.ENOSPC, lambda path: checkpoints_held(path) > 1 and in_save(path)
    ) as refused:
        result = train(config)
    assert refused
    assert result.metrics["global_step"] == 160
    assert len(steps_of(tmp_path / "run")) == 2
    whole = train(run_config("dqn", tmp_path, "whole", checkpoint_interval=30))
    assert compare_states(final_state(whole.run_dir), final_state(tmp_path / "run")) == []


def in_save(path: Path) -> bool:
    return path.parent.name.startswith(".tmp-step_")


def test_making_room_never_takes_the_last_step_that_all_seeds_have(tmp_path: Path) -> None:
    config = run_config("dqn", tmp_path, seeds=[1, 2], keep_checkpoints=3)

    def second_is_full(path: Path) -> bool:
        return in_save(path) and "seed_2" in str(path) and ".tmp-step_150" in str(path)

    with refusing(errno.ENOSPC, second_is_full), pytest.raises(CheckpointError, match="free space"):
        train(config)
    run = tmp_path / "run"
    assert steps_of(run / "seed_1") == [100, 150]
    assert steps_of(run / "seed_2") == [100]
    assert resume_training(run).metrics["global_step"] == 160


def test_a_disk_that_will_be_too_small_is_spoken_of_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listener(Callback):
        heard: ClassVar[list[str]] = []

        def on_message(self, state: TrainerState, text: str) -> None:
            self.heard.append(text)

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000))
    settings = {"buffer_capacity": 1000, "learning_starts": 10}
    config = run_config("dqn", tmp_path, total_timesteps=16, algo_kwargs=settings)
    train(config, callbacks=[Listener()])
    assert [text for text in Listener.heard if "checkpoints of this run will need" in text]
    # 1000 rows of 4 + 4 numbers of the observations, the action, and 3 of reward and flags.
    expected = 1000 * (4 * 11 + 8)
    learner, env = build("dqn", buffer_capacity=1000)
    replay = make_replay(learner.config, env, 1, learner)  # type: ignore[arg-type]
    assert bytes_of_checkpoints({"learner": learner, "replay": replay}, -2) == expected
    Listener.heard.clear()
    monkeypatch.undo()
    train(config.replace(run_name="roomy"), callbacks=[Listener()])
    assert not [text for text in Listener.heard if "will need" in text]


def test_two_processes_cannot_train_in_one_folder(server: ForkServer, tmp_path: Path) -> None:
    config = run_config("dqn", tmp_path, total_timesteps=10**7).resolved()
    thread = threading.Thread(target=lambda: server.run(tmp_path / "run", config))
    thread.start()
    wait_for(lambda: bool(list_checkpoints(tmp_path / "run")))
    with pytest.raises(RLTrainingError, match="is in use by another process"):
        resume_training(tmp_path / "run")
    assert load_agent(tmp_path / "run").step > 0  # reading is free
    server.kill()
    thread.join()
    # The lock of a process that was killed holds nobody up.
    assert open_checkpoint(tmp_path / "run").step > 0
    resumed = server.run(tmp_path / "run", delay=0.3)
    assert resumed.code in (0, -9)


def wait_for(condition: Callable[[], bool]) -> None:
    import time

    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    raise TimeoutError("nothing happened")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_readers_beside_a_trainer_never_fail(
    server: ForkServer, tried: Tried, tmp_path: Path
) -> None:
    config = run_config(
        "dqn", tmp_path, total_timesteps=20_000, checkpoint_interval=20, keep_checkpoints=1
    )
    lives: list[Any] = []
    thread = threading.Thread(
        target=lambda: lives.append(server.run(tmp_path / "run", config.resolved()))
    )
    thread.start()
    wait_for(lambda: bool(list_checkpoints(tmp_path / "run")))
    count, warnings, seen = 0, list[str](), set[int]()
    while count < LOADS:
        seen.add(load_agent(tmp_path / "run", warn=warnings.append).step)
        count += 1
    thread.join()
    tried("loads beside a trainer", "dqn", count, len(warnings))
    assert warnings == []
    assert len(seen) > 10
    assert lives[0].code == 0


def test_the_only_whole_checkpoint_outlives_every_save_that_fails(tmp_path: Path) -> None:
    result: TrainResult = train(run_config("dqn", tmp_path, total_timesteps=50, keep_checkpoints=1))
    before = final_state(result.run_dir)
    for _ in range(3):
        with refusing(errno.ENOSPC, in_save), pytest.raises(CheckpointError):
            resume_training(result.run_dir, total_timesteps=100)
        assert steps_of(result.run_dir) == [50]
        assert compare_states(before, final_state(result.run_dir)) == []

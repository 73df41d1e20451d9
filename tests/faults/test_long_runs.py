"""Workers that die in a run (R21), and runs that go on for long (R22)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.faults import Tried, setting
from rl_training.errors import EnvError
from rl_training.experiment.checkpointing import list_checkpoints, verify_checkpoint
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.train import train
from rl_training.testing.contract import small_config

SOAK = setting("SOAK", 1_000_000)
FAULTS = {"dies": "its worker process died", "raises": "100% broken", "wrong_shape": "of shape"}


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_worker_ends_the_run_by_name_and_leaves_nothing_behind(
    fault: str, tried: Tried, tmp_path: Path
) -> None:
    before = shared_memory()
    config = small_config(
        "dqn",
        tmp_path,
        run_name="run",
        task="helpers.envs:BrokenEnv",
        env_kwargs={"fault": fault, "at": 60},
        num_envs=2,
        vector_mode="async",
        total_timesteps=400,
        eval_episodes=0,
    )
    with pytest.raises(EnvError, match=FAULTS[fault]) as caught:
        train(config)
    assert "index 0, seed 0" in str(caught.value)
    assert psutil.Process().children() == []
    assert shared_memory() - before == set()
    bundle = json.loads((tmp_path / "run" / "diagnostics").glob("*.json").__next__().read_text())
    assert bundle["error"] == "EnvError"
    entries = list_checkpoints(tmp_path / "run")
    for entry in entries:
        verify_checkpoint(entry.path)
    tried("broken worker", fault, 1, int(not entries))
    assert entries


class Meter(Callback):
    """Notes memory and open files at every log line, the garbage being what it is."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.memory: list[int] = []
        self.handles: list[int] = []

    def on_log(self, state: TrainerState, values: Any) -> None:
        self.memory.append(self.process.memory_info().rss)
        self.handles.append(self.process.num_fds())


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("algo", ["dqn", "ppo", "sac"])
def test_a_long_run_takes_no_more_memory_and_files_than_a_short_one(
    algo: str, tried: Tried, tmp_path: Path
) -> None:
    meter, every = Meter(), max(SOAK // 100, 1000)
    config = small_config(
        algo,
        tmp_path,
        run_name="run",
        total_timesteps=SOAK,
        num_envs=8,
        log_interval=every,
        checkpoint_interval=5 * every,
        algo_kwargs={"eval_interval": 10 * every}
        | ({} if algo == "ppo" else {"train_frequency": 64, "buffer_capacity": 10_000}),
    )
    train(config, callbacks=[meter])
    third = len(meter.memory) // 3
    early, late = max(meter.memory[third : 2 * third]), max(meter.memory[2 * third :])
    grown = late - early
    print(f"{algo}: {SOAK} steps, {late / 2**20:.0f} MiB, {grown / 2**20:+.1f} in the last third")
    tried("soak, steps", algo, SOAK, int(grown > 16 * 2**20))
    assert grown < 16 * 2**20
    assert len(set(meter.handles[third:])) <= 2
    assert os.path.getsize(tmp_path / "run" / "metrics.jsonl") < 2**20
    assert len(list_checkpoints(tmp_path / "run")) <= config.keep_checkpoints + 1

"""kill -9 at random moments, resume each time, and compare with the uninterrupted run to the bit.

`make faults` runs the long form (20 kills each); the fast suite runs three kills of one algorithm.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rl_training.experiment.checkpointing import load_checkpoint, resolve_checkpoint
from rl_training.experiment.state_tree import compare_states

COMMON = ["eval_episodes=2", "checkpoint_interval=40", "log_interval=40", "tensorboard=false"]
RUNS = {
    "sac": (
        "sac/pendulum",
        12_000,
        ["batch_size=32", "hidden_sizes=[32,32]", "learning_starts=100"],
    ),
    "ppo": ("ppo/cartpole", 1_000_000, ["num_steps=32", "minibatch_size=64", "update_epochs=2"]),
    "dqn": (
        "dqn/cartpole",
        40_000,
        ["batch_size=32", "hidden_sizes=[32,32]", "learning_starts=100"],
    ),
}


def command(algo: str, folder: Path, name: str, steps: int) -> list[str]:
    preset, _, settings = RUNS[algo]
    options = [*COMMON, f"run_name={name}", *(f"algo_kwargs.{text}" for text in settings)]
    options.append(f"algo_kwargs.eval_interval={steps // 5}")
    if algo == "ppo":
        options[1] = f"checkpoint_interval={steps // 50}"
    sets = [part for option in options for part in ("--set", option)]
    base = [sys.executable, "-m", "rl_training", "train", "--config", preset, *sets]
    return [*base, "--output-dir", str(folder), "--total-timesteps", str(steps)]


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_with_kills(algo: str, folder: Path, steps: int, kills: int, longest: float) -> int:
    """Train, killing the process `kills` times; returns how often it was really killed."""
    chance = random.Random(f"{algo}{kills}")
    run = folder / "killed"
    done = 0
    process = start(command(algo, folder, "killed", steps))
    while done < kills:
        time.sleep(chance.uniform(0.5, longest))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        done += 1
        process = start(resume_command(algo, folder, run, steps))
    assert process.wait(timeout=600) == 0, "the last resume did not finish"
    return done


def resume_command(algo: str, folder: Path, run: Path, steps: int) -> list[str]:
    if not (run / "config.yaml").is_file():  # killed before the run had begun
        return command(algo, folder, "killed", steps)
    return [sys.executable, "-m", "rl_training", "resume", "--checkpoint", str(run)]


def final_state(run: Path) -> dict[str, Any]:
    loaded = load_checkpoint(resolve_checkpoint(run))
    rows = {
        f"{table.name} rows": [dict(part) for _, part in loaded.read_segments(table.name)]
        for table in loaded.manifest.segments
    }
    return {**loaded.states, **rows}


def log_lines(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def check(algo: str, folder: Path, steps: int, kills: int, longest: float, least: int) -> None:
    assert start(command(algo, folder, "whole", steps)).wait(timeout=600) == 0
    done = run_with_kills(algo, folder, steps, kills, longest)
    print(f"{algo}: {done} kills in {steps} steps")
    assert done >= least, f"the run ended after {done} kills: give it more steps"
    assert compare_states(final_state(folder / "whole"), final_state(folder / "killed")) == []
    assert log_lines(folder / "whole") == log_lines(folder / "killed")


def test_three_kills_leave_no_trace(tmp_path: Path) -> None:
    check("dqn", tmp_path, 3_000, 3, 3.0, least=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algo", sorted(RUNS))
def test_twenty_kills_leave_no_trace(algo: str, tmp_path: Path) -> None:
    check(algo, tmp_path, RUNS[algo][1], 20, 6.0, least=20)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    from helpers.contract import small_config
    from rl_training.experiment.runs import create_run_folder
    from rl_training.runtime.train import train
    from rl_training.runtime.workflows import resume_training

    config = small_config("dqn", tmp_path)
    folder = create_run_folder(config)
    (folder / "metrics.jsonl").write_text('{"step": 40, "half a li')
    notes: list[str] = []
    resumed = resume_training(folder, warn=notes.append)
    whole = train(config)
    assert "from its beginning" in notes[0]
    assert compare_states(final_state(resumed.run_dir), final_state(whole.run_dir)) == []
    assert log_lines(resumed.run_dir) == log_lines(whole.run_dir)

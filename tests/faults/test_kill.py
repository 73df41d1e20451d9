"""SIGKILL at any moment, resume, and compare with the uninterrupted run to the bit (R1, R2).

The fast form kills every algorithm a few times.  The long form (`make faults`) kills each
`RL_FAULTS_KILLS` times in runs of `RL_FAULTS_STEPS` steps, at random moments of wall-clock time and
at random file operations, evaluations and restores; another `RL_FAULTS_SEED` draws others.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import Tried, final_state, log_lines, setting
from helpers.fork_server import ForkServer
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.registry import algorithm_names
from rl_training.experiment.runs import create_run_folder
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import small_config

KILLS = setting("KILLS", 15)
STEPS = setting("STEPS", 1500)
SEED = setting("SEED", 0)
FILES = "rl_training.experiment.checkpoint.files"
RESTORE = "rl_training.runtime.checkpoints.saver:Saver.take_up"
EVALUATE = "rl_training.runtime.evaluator:Evaluator._run_chunk"
POINTS = {
    f"{FILES}:write_file": 15,
    f"{FILES}:rename": 5,
    f"{FILES}:make_dir": 5,
    f"{FILES}:fsync_dir": 8,
    f"{FILES}:remove_tree": 3,
    "rl_training.runtime.checkpoints.saver:Saver.save": 3,
    "rl_training.experiment.logging:MetricLogger.log": 3,
    "rl_training.experiment.logging:MetricLogger.sync": 3,
    "rl_training.runtime.session:Session.tick": 40,
    EVALUATE: 2,
    RESTORE: 1,
}
"""Where a process ends itself, before or after one of its first so many calls."""
FAST: list[dict[str, Any]] = [
    {"die_at": f"{FILES}:publish", "count": 2},
    {"die_at": RESTORE, "count": -1},
    {"die_at": EVALUATE, "count": 1},
]
"""While the second checkpoint is put in place, in the middle of a resume, and in an evaluation."""


def run_config(algo: str, folder: Path, name: str, steps: int, **changes: Any) -> dict[str, Any]:
    changes = {"total_timesteps": steps, "keep_checkpoints": 2, "checkpoint_interval": 30} | changes
    return small_config(algo, folder, run_name=name, **changes).resolved()


def plan(algo: str, kills: int, seconds: float) -> list[dict[str, Any]]:
    """Moments and points of death: half by the clock, half at a point of the code."""
    chance = random.Random(f"{algo} {kills}" + (f" {SEED}" if SEED else ""))
    orders: list[dict[str, Any]] = [
        {"delay": chance.uniform(0.0, 1.6 * seconds / kills)} for _ in range(kills // 2)
    ]
    for _ in range(kills - len(orders)):
        point = chance.choice(list(POINTS))
        count = chance.choice((-1, 1)) * chance.randint(1, POINTS[point])
        orders.append({"die_at": point, "count": count})
    chance.shuffle(orders)
    # The first life restores nothing, so it would not die there.
    return [{"die_at": f"{FILES}:write_file", "count": 12}, *orders[1:]]


def kill_and_resume(
    server: ForkServer, config: dict[str, Any], orders: list[dict[str, Any]], run: Path
) -> int:
    """Carry out the orders and let the run end; returns how often it was killed."""
    killed = 0
    for order in orders:
        life = server.run(run, config, **order)
        assert life.code in (0, -signal.SIGKILL), f"{order}: exit code {life.code}"
        killed += life.killed
    assert server.run(run, config).code == 0, "the last resume did not end well"
    return killed


def differences(whole: Path, killed: Path) -> list[Any]:
    found: list[Any] = list(compare_states(final_state(whole), final_state(killed)))
    if log_lines(whole) != log_lines(killed):
        found.append("the logs differ")
    return found


def check(
    server: ForkServer, algo: str, folder: Path, steps: int, kills: int
) -> tuple[int, list[Any]]:
    begun = server.run(folder / "whole", run_config(algo, folder, "whole", steps))
    assert begun.code == 0
    orders = plan(algo, kills, begun.seconds) if kills else FAST
    config = run_config(algo, folder, "killed", steps)
    done = kill_and_resume(server, config, orders, folder / "killed")
    return done, differences(folder / "whole", folder / "killed")


@pytest.mark.expensive(only=("dqn",))
@pytest.mark.parametrize("algo", algorithm_names())
def test_kills_in_a_save_a_resume_and_an_evaluation_leave_no_trace(
    algo: str, server: ForkServer, tried: Tried, tmp_path: Path
) -> None:
    done, found = check(server, algo, tmp_path, 90, kills=0)
    tried("kill -9, fast", algo, done, len(found))
    assert found == []
    assert done == len(FAST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algo", algorithm_names())
def test_many_kills_leave_no_trace(
    algo: str, server: ForkServer, tried: Tried, tmp_path: Path
) -> None:
    done, found = check(server, algo, tmp_path, STEPS, KILLS)
    tried("kill -9", algo, done, len(found))
    assert found == []
    assert done >= KILLS // 2, f"only {done} of {KILLS} lives were cut short: give it more steps"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algo", algorithm_names())
def test_kills_of_a_group_leave_no_trace(
    algo: str, server: ForkServer, tried: Tried, tmp_path: Path
) -> None:
    group = {"seeds": [3, 8]}
    begun = server.run(tmp_path / "whole", run_config(algo, tmp_path, "whole", STEPS // 4, **group))
    assert begun.code == 0
    config = run_config(algo, tmp_path, "killed", STEPS // 4, **group)
    orders = plan(f"{algo} group", 6, begun.seconds)
    done = kill_and_resume(server, config, orders, tmp_path / "killed")
    found = [
        difference
        for member in ("seed_3", "seed_8")
        for difference in differences(tmp_path / "whole" / member, tmp_path / "killed" / member)
    ]
    tried("kill -9 of a group of seeds", algo, done, len(found))
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_of_the_command_line_leave_no_trace(tried: Tried, tmp_path: Path) -> None:
    sets = ["eval_episodes=2", "checkpoint_interval=100", "log_interval=100", "tensorboard=false"]
    sets += [f"algo_kwargs.{text}" for text in ("batch_size=32", "hidden_sizes=[32,32]")]

    def command(name: str) -> list[str]:
        words = ["train", "--config", "dqn/cartpole", "--total-timesteps", "6000"]
        words += ["--output-dir", str(tmp_path), "--set", f"run_name={name}"]
        words += [word for text in sets for word in ("--set", text)]
        return [sys.executable, "-m", "rl_training", *words]

    def start(words: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start(command("whole")).wait(timeout=600) == 0
    chance, killed, run = random.Random(0), 0, tmp_path / "killed"
    resume = [sys.executable, "-m", "rl_training", "resume", "--checkpoint", str(run)]
    while killed < 5:
        # Only the first kill may come before there is a run: on a busy machine all of them would.
        process = start(resume if run.exists() else command("killed"))
        time.sleep(chance.uniform(0.5, 5.0))
        while killed and not run.exists() and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        killed += 1
    assert start(resume).wait(timeout=600) == 0
    found = differences(tmp_path / "whole", run)
    tried("kill -9 of the command", "dqn", killed, len(found))
    assert found == []


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    config = small_config("dqn", tmp_path)
    folder = create_run_folder(config)
    (folder / "metrics.jsonl").write_text('{"step": 40, "half a li')
    notes: list[str] = []
    resumed = resume_training(folder, warn=notes.append)
    whole = train(config)
    assert "from its beginning" in notes[0]
    assert differences(resumed.run_dir, whole.run_dir) == []


@pytest.mark.matrix
def test_a_group_killed_in_its_first_save_starts_again(server: ForkServer, tmp_path: Path) -> None:
    """One member has the first checkpoint and the other has none."""
    group: dict[str, Any] = {"seeds": [3, 8]}
    whole = train(small_config("dqn", tmp_path, run_name="whole", total_timesteps=90, **group))
    config = small_config("dqn", tmp_path, run_name="killed", total_timesteps=90, **group)
    orders = [{"die_at": f"{FILES}:publish", "count": -1}] * 2
    assert kill_and_resume(server, config.resolved(), orders, tmp_path / "killed") == 2
    for member in ("seed_3", "seed_8"):
        assert differences(whole.run_dir / member, tmp_path / "killed" / member) == []


def test_a_difference_of_one_bit_would_be_seen(tmp_path: Path) -> None:
    whole = final_state(train(small_config("dqn", tmp_path, total_timesteps=64)).run_dir)
    other = final_state(train(small_config("dqn", tmp_path, total_timesteps=64)).run_dir)
    assert compare_states(whole, other) == []
    other["learner"]["q_network"][next(iter(other["learner"]["q_network"]))].view(-1)[0] += 1e-7
    assert len(compare_states(whole, other)) == 1

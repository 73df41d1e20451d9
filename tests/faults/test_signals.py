"""Signals in any phase of a run: saved, exit code 75, and resumed to the bit (R20)."""

from __future__ import annotations

import importlib.abc
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import Tried, final_state
from helpers.fork_server import ForkServer
from helpers.tiny import run_cli
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import list_checkpoints, verify_checkpoint
from rl_training.experiment.registry import algorithm_names
from rl_training.runtime.train import train
from rl_training.testing.contract import small_config

PHASES = {
    "stepping": ("rl_training.runtime.session:Session.tick", 2),
    "updating": ("rl_training.algorithms.optim:{optimizer}.apply", 5),
    "saving": ("rl_training.experiment.checkpoint.files:write_file", 6),
    "publishing": ("rl_training.experiment.checkpoint.files:rename", 2),
    "evaluating": ("rl_training.runtime.evaluator:Evaluator._run_chunk", 1),
    "logging": ("rl_training.experiment.logging:MetricLogger.log", 1),
}
OPTIMIZERS = {"dreamer": "LaProp"}
"""Classes of methods whose optimizer is not Adam."""
NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


def config_of(algo: str, folder: Path, name: str) -> dict[str, Any]:
    return small_config(algo, folder, run_name=name, total_timesteps=120).resolved()


def point_of(algo: str, phase: str) -> tuple[str, int]:
    """The function in which the signal comes, and the call of it."""
    point, count = PHASES[phase]
    return point.format(optimizer=OPTIMIZERS.get(algo, "Adam")), count


def is_lossless(
    server: ForkServer, algo: str, folder: Path, phase: str, number: int, expected: dict[str, Any]
) -> bool:
    """Interrupt a run in a phase; whether it was saved in time and ended as if nothing had been."""
    point, count = point_of(algo, phase)
    name = f"{phase}-{number}"
    config = config_of(algo, folder, name)
    life = server.run(folder / name, config, die_at=point, count=count, signal_number=number)
    assert life.code == 75, (phase, number, life)
    assert life.seconds < 60
    verify_checkpoint(list_checkpoints(folder / name)[-1].path)
    assert server.run(folder / name).code == 0
    return compare_states(expected, final_state(folder / name)) == []


@pytest.mark.matrix
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_a_signal_in_any_phase_is_a_saved_run(
    algo: str, server: ForkServer, tried: Tried, tmp_path: Path
) -> None:
    assert server.run(tmp_path / "whole", config_of(algo, tmp_path, "whole")).code == 0
    expected = final_state(tmp_path / "whole")
    lost = 0
    for index, phase in enumerate(PHASES):
        number = NUMBERS[index % len(NUMBERS)]
        lost += not is_lossless(server, algo, tmp_path, phase, number, expected)
    tried("signal in a phase", algo, len(PHASES), lost)
    assert lost == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algo", algorithm_names())
def test_every_signal_in_every_phase_is_a_saved_run(
    algo: str, server: ForkServer, tried: Tried, tmp_path: Path
) -> None:
    assert server.run(tmp_path / "whole", config_of(algo, tmp_path, "whole")).code == 0
    expected = final_state(tmp_path / "whole")
    cases = [(phase, number) for phase in PHASES for number in NUMBERS]
    lost = sum(
        not is_lossless(server, algo, tmp_path, phase, number, expected) for phase, number in cases
    )
    tried("signal in a phase", algo, len(cases), lost)
    assert lost == 0


@pytest.mark.matrix
def test_a_second_signal_ends_the_process_at_once(server: ForkServer, tmp_path: Path) -> None:
    point, _ = point_of("dqn", "updating")
    config = config_of("dqn", tmp_path, "run")
    life = server.run(
        tmp_path / "run", config, die_at=point, count=60, signal_number=signal.SIGTERM, twice=True
    )
    # Both came within one pass or the next, before or while it was saved: the default is back.
    assert life.code in (75, -signal.SIGTERM)
    tick = "rl_training.experiment.checkpoint.files:write_file"
    config = config_of("dqn", tmp_path, "saving")
    life = server.run(
        tmp_path / "saving", config, die_at=tick, count=8, signal_number=signal.SIGTERM, twice=True
    )
    assert life.code == -signal.SIGTERM
    # What was whole is whole, and the run goes on.
    assert server.run(tmp_path / "saving").code == 0
    whole = train(small_config("dqn", tmp_path, run_name="whole", total_timesteps=120))
    assert compare_states(final_state(whole.run_dir), final_state(tmp_path / "saving")) == []


class Interrupting(importlib.abc.MetaPathFinder):
    """Ctrl-C while the commands are imported."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "rl_training.cli.commands":
            raise KeyboardInterrupt


def test_an_interrupt_while_the_commands_are_imported_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "rl_training.cli.commands", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    done = run_cli("list", "algos")
    assert (done.code, done.err) == (130, "")

"""What user code raises beside plain errors, exits above all, is an error and not a success."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import run_cli, tiny_config, write_tiny
from rl_training.envs.backends import processes
from rl_training.errors import RLTrainingError
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.train import train

SOURCE = """
import sys
from gymnasium.envs.classic_control import CartPoleEnv

class Leaves(CartPoleEnv):
    def __init__(self, where="", after=0, **kwargs):
        self.where, self.left = where, after
        self.leave("__init__")
        super().__init__(**kwargs)

    def leave(self, where):
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                sys.exit(0)

    def reset(self, **kwargs):
        self.leave("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.leave("step")
        return super().step(action)

    def close(self):
        self.leave("close")

    def get_state(self):
        self.leave("get_state")
        return {}

    def set_state(self, state):
        pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "leaving_tasks.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "leaving_module.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "leaving_tasks:Leaves"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_environment_that_exits_ends_the_run_with_an_error(
    tmp_path: Path, module: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 2)
    cases = [("__init__", 0), ("reset", 0), ("reset", 1), ("step", 0), ("step", 25), ("close", 0)]
    for where, after in [*cases, ("get_state", 0)]:
        kwargs = {"where": where, "after": after, "max_episode_steps": 20}
        changes: dict[str, Any] = {"vector_mode": mode, "num_envs": 2, "eval_episodes": 0}
        path = write_tiny(tmp_path, "dqn", env_id=module, env_kwargs=kwargs, **changes)
        done = run_cli("train", "--config", path, "--output-dir", tmp_path / f"{where}{after}")
        note = "note: 2 environments run in vector_mode async: in 2 processes with 1 each\n"
        said = replace(done, err=done.err.removeprefix(note)).sentence()
        words = ("SystemExit", "sys.exit(0)", "its worker process died (exit code 0)")
        assert any(word in said for word in words), (where, after, said)


def test_an_exit_in_evaluation_is_an_error(tmp_path: Path, module: str) -> None:
    kwargs = {"where": "step", "after": 40, "max_episode_steps": 20}
    changes: dict[str, Any] = {"env_id": module, "total_timesteps": 32, "eval_episodes": 0}
    run = train(tiny_config("dqn", tmp_path, env_kwargs=kwargs, **changes)).run_dir
    for command in (
        ("eval", "--checkpoint", run, "--episodes", 200),
        ("data", "collect", "--checkpoint", run, "--steps", 100, tmp_path / "x.npz"),
    ):
        assert "SystemExit" in run_cli(*command).sentence()


def test_a_module_that_exits_is_an_error(tmp_path: Path, module: str) -> None:
    path = write_tiny(tmp_path, "dqn", env_id="leaving_module:Task")
    assert "SystemExit" in run_cli("train", "--config", path).sentence()


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_log", "on_checkpoint", "on_end"])
def test_a_callback_that_exits_is_an_error(tmp_path: Path, event: str) -> None:
    callback = Callback()
    setattr(callback, event, lambda *_: sys.exit(0))
    config = tiny_config("dqn", tmp_path, eval_episodes=0)
    with pytest.raises(RLTrainingError, match=r"training was ended by sys\.exit\(0\)"):
        train(config, callbacks=[callback])


ODD_ERRORS = """
from asyncio import CancelledError
from gymnasium.envs.classic_control import CartPoleEnv

class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

class Raises(CartPoleEnv):
    def __init__(self, error="", after=0, **kwargs):
        self.error, self.left = {"Mute": Mute, "CancelledError": CancelledError}[error], after
        super().__init__(**kwargs)

    def step(self, action):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().step(action)
"""


@pytest.mark.parametrize("after", [0, 25], ids=["tried", "training"])
@pytest.mark.parametrize("error", ["Mute", "CancelledError"])
def test_errors_without_text_and_those_that_are_no_exceptions_are_one_sentence(
    error: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`except Exception` misses asyncio's CancelledError, and `str` of an error may fail."""
    (tmp_path / "raising_tasks.py").write_text(ODD_ERRORS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    changes: dict[str, Any] = {"env_id": "raising_tasks:Raises", "eval_episodes": 0}
    kwargs = {"error": error, "after": after, "max_episode_steps": 20}
    path = write_tiny(tmp_path, "dqn", env_kwargs=kwargs, **changes)
    assert error in run_cli("train", "--config", path).sentence()

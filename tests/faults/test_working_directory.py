"""The user's code may change what a whole process shares; a run goes on as it should."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from helpers.tiny import run_cli, tiny_config, write_tiny
from rl_training.runtime.train import train

SOURCE = """
import os
from gymnasium.envs.classic_control import CartPoleEnv

class Moves(CartPoleEnv):
    def __init__(self, where, folder, after=0, **kwargs):
        self.where, self.folder, self.left = where, folder, after
        super().__init__(**kwargs)
        self.move("__init__")

    def move(self, where):
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                os.chdir(self.folder)

    def reset(self, **kwargs):
        self.move("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.move("step")
        return super().step(action)
"""


@pytest.mark.parametrize(("where", "after"), [("__init__", 0), ("reset", 0), ("step", 25)])
def test_an_environment_that_changes_it_does_not_move_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, after: int
) -> None:
    (tmp_path / "moving_tasks.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    kwargs = {"where": where, "after": after, "folder": str(away), "max_episode_steps": 20}
    path = write_tiny(
        tmp_path,
        "dqn",
        env_id="moving_tasks:Moves",
        env_kwargs=kwargs,
        run_name="run",
        checkpoint_interval=16,
    )
    monkeypatch.chdir(home)  # also the way back at the end of the test
    collect = ("data", "collect", "data.npz", "--checkpoint", "runs/run", "--steps", 30)
    for command in (
        ("train", "--config", path, "--output-dir", "runs", "--quiet"),
        ("resume", "--checkpoint", "runs/run", "--total-timesteps", 96, "--quiet"),
        ("eval", "--checkpoint", "runs/run", "--episodes", 1),
        collect,
    ):
        os.chdir(home)
        done = run_cli(*command)
        assert done.code == 0, (command, done)
    assert list(away.iterdir()) == []
    assert sorted(p.name for p in home.iterdir()) == ["data.npz", "runs"]
    assert (home / "runs" / "run" / "checkpoints" / "step_96").is_dir()


def test_a_module_that_switches_gradients_off_does_not_stop_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that act with a network of their own often do, at their top level."""
    source = "import torch\ntorch.set_grad_enabled(False)\n"
    source += "from gymnasium.envs.classic_control import CartPoleEnv as Task\n"
    (tmp_path / "inferring_tasks.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_config("dqn", tmp_path, env_id="inferring_tasks:Task", eval_episodes=0)
    try:
        assert train(config).metrics["gradient_steps"] > 0
        assert not torch.is_grad_enabled()  # as its module left it
    finally:
        torch.set_grad_enabled(True)

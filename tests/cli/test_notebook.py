"""Progress in a notebook: one display that is rewritten, and nothing else in the cell."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from helpers.tiny import ROOT
from helpers.warm import run_warm
from rl_training import PPO, SAC
from rl_training.cli.display import NotebookDisplay, QuietDisplay, display_for
from rl_training.runtime.callbacks import TrainerState

CELL = """
from rl_training import SAC

agent = SAC("Pendulum-v1", learning_starts=10, batch_size=8, hidden_sizes=(8,), eval_interval=50,
            eval_episodes=1, env_kwargs={"max_episode_steps": 10})
result = agent.learn(150)
"""


class Handle:
    """What IPython gives for a display that can be rewritten."""

    def __init__(self, shown: list[dict[str, str]]) -> None:
        self.shown = shown

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(data)


@pytest.fixture
def displays(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The displays of a notebook, each with everything that it has shown."""
    found: list[list[dict[str, str]]] = []

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        found.append([data])
        return Handle(found[-1])

    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    module: Any = ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return found


def agent(tmp_path: Path) -> Any:
    return SAC(
        "Pendulum-v1",
        learning_starts=10,
        batch_size=8,
        hidden_sizes=(8,),
        eval_interval=20,
        eval_episodes=1,
        env_kwargs={"max_episode_steps": 10},
        output_dir=str(tmp_path),
    )


def test_a_run_has_one_display_that_is_rewritten(
    displays: list[list[dict[str, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent(tmp_path).learn(60)
    (shown,) = displays
    last = shown[-1]["text/plain"]
    assert last.startswith("sac on Pendulum-v1, seed 0: training, 60 steps; run folder ")
    assert "100%  60/60" in last
    assert last.count("eval return") == 3
    assert "<pre" in shown[-1]["text/html"]
    assert capsys.readouterr() == ("", "")


def test_without_progress_a_notebook_shows_nothing(
    displays: list[list[dict[str, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent(tmp_path).learn(20, progress=False)
    assert displays == []
    assert capsys.readouterr() == ("", "")


def test_names_cannot_become_markup_and_old_lines_go(
    displays: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    display = NotebookDisplay()
    state = TrainerState("sac", "<b>Task</b>", (0,), tmp_path, 100)
    display.on_start(state)
    for number in range(30):
        display.on_message(state, f"<i>{number}</i>")
    (shown,) = displays
    page = shown[-1]["text/html"]
    assert "<b>" not in page
    assert "<i>" not in page
    assert re.findall(r"&lt;i&gt;(\d+)", page) == [str(n) for n in range(20, 30)]


def test_the_bar_moves_at_most_twice_a_second(
    displays: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    now = [0.0]
    display = NotebookDisplay(clock=lambda: now[0])
    state = TrainerState("sac", "Task-v0", (0,), tmp_path, 1_000)
    display.on_start(state)
    for _ in range(100):
        now[0] += 0.1
        state.step += 5
        display.on_step(state)
    assert 15 <= len(displays[0]) <= 21
    assert "50 steps/s" in displays[0][-1]["text/plain"]


@pytest.mark.matrix
def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    assert isinstance(display_for(Console(file=io.StringIO()), quiet=False), QuietDisplay)
    done = run_warm("-c", CELL, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("step=")]
    assert [line.split()[0] for line in lines] == ["step=50", "step=100", "step=150"]
    assert "\x1b" not in done.err


def test_a_real_notebook_shows_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs where nbclient and ipykernel happen to be installed; they belong to no extra."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    client = nbclient.NotebookClient(page, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    (output,) = page.cells[0].outputs
    assert output.output_type == "display_data"
    assert output.data["text/plain"].count("eval return") == 3


def test_the_class_of_another_method_shows_the_same(
    displays: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    small: dict[str, Any] = {"num_steps": 8, "minibatch_size": 8, "update_epochs": 1}
    learner = PPO(
        "CartPole-v1", output_dir=str(tmp_path), hidden_sizes=(8,), eval_episodes=1, **small
    )
    learner.learn(16)
    learner.learn(16)
    assert len(displays) == 2
    assert "resuming at step 16" in displays[1][-1]["text/plain"]


SCRIPT = ROOT / "examples" / "own_environment.py"


@pytest.mark.matrix
def test_a_script_like_a_notebook_runs_from_an_own_environment_to_a_policy(tmp_path: Path) -> None:
    """In a process of its own, where the environment is a class of `__main__`."""
    done = run_warm(SCRIPT, cwd=tmp_path)
    assert done.code == 0, done.err
    said = dict(line.split(" ", 1) for line in done.out.splitlines())
    assert said["steps"] == "4000"
    assert float(said["mean"].split()[-1]) > 0.9
    assert said["played"] == "5 steps, return 0.95"
    assert said["actions"].startswith("[1, 1, 1, 1, 1")
    assert "DQN(python:Corridor, 4,000 steps" in done.out
    (run,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "callback"] == [
        1000,
        2000,
        3000,
        4000,
    ]


def test_the_script_is_a_notebook_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in a real kernel, where nbclient and ipykernel happen to be installed."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    cells = re.split(r"^# %%.*\n", SCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells[1:]])
    nbclient.NotebookClient(page, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in page.cells for output in cell.outputs]
    assert [o.output_type for o in outputs].count("display_data") == 1
    assert "played 5 steps" in "".join(o.get("text", "") for o in outputs)

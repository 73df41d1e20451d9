"""What `list`, `describe` and the help look like, and that they need no PyTorch."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import gymnasium
import pytest
from bench.evidence.page import PACKAGED, packaged_text
from bench.evidence.record import read_earlier, read_records
from rich.console import Console

from helpers.tiny import ROOT, run_cli, run_python, write_tiny
from rl_training.cli import outcome, tables
from rl_training.cli.commands import COMMANDS
from rl_training.cli.options import START
from rl_training.experiment.config import load_config
from rl_training.experiment.presets import preset_facts
from rl_training.experiment.registry import (
    algorithm_names,
    algorithm_summaries,
    get_algorithm_spec,
)
from rl_training.resources import preset_names

WIDTH = 80
WITHOUT_TORCH = """
import sys
from rl_training.cli import main
sys.argv = ["rl-training", *{words!r}]
main()
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("runs")
    assert run_cli("train", "-c", write_tiny(folder), "-q").code == 0
    return folder / "runs"


@pytest.mark.parametrize(
    "words",
    [
        *(["list"], ["list", "presets"], ["list", "envs"], ["leaderboard", "RUNS"], ["--help"]),
        ["config", "show", "sac/pendulum"],
        ["zoo", "list", "--zoo", str(ROOT / "zoo")],
    ],
    ids=" ".join,
)
def test_looking_things_up_does_not_import_torch(words: list[str], runs: Path) -> None:
    given = [str(runs) if word == "RUNS" else word for word in words]
    done = run_python("-c", WITHOUT_TORCH.format(words=given))
    assert done.code == 0, done.err
    assert done.out


def test_a_preset_is_shown_as_it_resolves() -> None:
    for name in preset_names():
        text = run_cli("config", "show", name).out
        assert text.strip() == load_config(name).to_yaml().strip(), name


def test_an_override_is_checked_as_ever() -> None:
    shown = run_cli("config", "show", "sac/pendulum", "-s", "batch_size=32")
    assert "batch_size: 32" in shown.out
    wrong = run_cli("config", "show", "sac/pendulum", "-s", "batch_sise=32").sentence()
    assert "batch_size" in wrong


@pytest.mark.parametrize(
    "words",
    [
        *(["list"], ["list", "presets"], ["list", "envs"], ["--help"]),
        *(["describe", name] for name in algorithm_names()),
        *([name, "--help"] for _, group in COMMANDS for name, _ in group),
        ["data", "--help"],
    ],
    ids=" ".join,
)
def test_tables_fit_into_eighty_columns(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERMINAL_WIDTH", str(WIDTH))
    done = run_cli(*words)
    assert done.code == 0, done.err
    assert max(len(line) for line in done.out.splitlines()) <= WIDTH
    assert "<bool>" not in done.out


def test_the_help_has_groups_and_begins_with_train() -> None:
    text = run_cli("--help").out
    places = [text.index(f" {group} ") for group, _ in COMMANDS]
    assert places == sorted(places)
    assert COMMANDS[0][0] == START
    assert COMMANDS[0][1][0][0] == "train"


def test_a_list_says_what_the_declarations_say() -> None:
    for summary in algorithm_summaries():
        spec = get_algorithm_spec(summary.name)
        assert (spec.title, spec.paper, spec.summary) == (
            summary.title,
            summary.paper,
            summary.summary,
        )
        assert spec.action_kinds == summary.action_kinds


# Presets


def test_packaged_figures_are_those_of_the_records() -> None:
    evidence = ROOT / "docs" / "evidence"
    assert (ROOT / PACKAGED).read_text() == packaged_text(evidence)
    known = {*read_records(evidence), *read_earlier(evidence)}
    assert {f.name for f in preset_facts() if f.measured is not None} == known


def test_presets_are_listed_with_task_steps_return_and_time() -> None:
    rows = {row["preset"]: row for row in json.loads(run_cli("list", "presets", "--json").out)}
    ppo = rows["ppo/cartpole"]
    assert (ppo["task"], ppo["steps"], ppo["made_up_data"]) == ("CartPole-v1", 100_000, False)
    assert ppo["measured_return"] == 500
    assert ppo["measured_seconds"] > 0
    plain = {line.split()[0]: line for line in run_cli("list", "presets").out.splitlines() if line}
    assert "(*)" not in plain["ppo/cartpole"]
    assert "(*)" in plain["cql/pendulum"]
    for name, row in rows.items():
        assert ("(*)" in plain[name]) == row["made_up_data"]


# Environments


def test_listed_environments_can_be_made_or_name_their_extra() -> None:
    rows = json.loads(run_cli("list", "envs", "--json").out)
    names = {row["environment"] for row in rows}
    assert {"CartPole-v1", "Pendulum-v1", "rl_training/Catch-v0"} <= names
    assert not {"Ant-v2", "Ant-v4", "CartPole-v0", "GymV21Environment-v0"} & names
    for row in rows:
        # Box2D's modules and OGBench's tasks raise warnings, which would be errors here.
        family = str(gymnasium.spec(row["environment"]).entry_point)
        if row["extra"] is None and "box2d" not in family and "ogbench" not in family:
            gymnasium.make(row["environment"]).close()


def test_an_environment_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    without = lambda name: None if name == "mujoco" else real(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    rows = {row["environment"]: row["extra"] for row in tables.list_rows("envs")}
    assert rows["Ant-v5"] == "mujoco"
    assert rows["CartPole-v1"] is None
    shown = "".join(run_cli("list", "envs").out.split())  # long names beside it break its lines
    assert 'pipinstall"rl-training[mujoco]"' in shown


@pytest.mark.parametrize(
    ("missing", "word"),
    [
        ("imageio_ffmpeg", "record"),
        ("pygame", "record"),
        ("jinja2", "report"),
        ("huggingface_hub", "push"),
        ("tensorboard", "tensorboard"),
    ],
)
def test_what_next_names_only_what_is_installed(
    missing: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "tensorboard").mkdir()

    def said(*absent: str) -> str:
        there = lambda *modules: not set(modules) & set(absent)  # noqa: E731
        monkeypatch.setattr(outcome, "_has", there)
        monkeypatch.setattr(outcome, "err", Console(file=sys.stderr, width=200))
        outcome.print_next(tmp_path, tmp_path)
        return capsys.readouterr().err

    assert f"{word} " in said()
    assert f"{word} " not in said(missing)
    assert "eval " in said(missing)


def test_a_run_without_tensorboard_files_has_no_such_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outcome, "_has", lambda *modules: True)
    monkeypatch.setattr(outcome, "err", Console(file=sys.stderr, width=200))
    outcome.print_next(tmp_path, tmp_path)
    assert "--logdir" not in capsys.readouterr().err

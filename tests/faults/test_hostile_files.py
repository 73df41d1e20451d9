"""Hostile files: nothing runs, little is spent, and the error is one sentence (R12, R13)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import Tried
from helpers.hostile import CANARY, OBS, Case, corpus
from helpers.tiny import ROOT, tiny_config
from helpers.warm import run_warm
from rl_training.api import DQN
from rl_training.errors import EnvError
from rl_training.experiment.checkpointing import load_single_file, save_single_file
from rl_training.runtime.train import train
from rl_training.runtime.workflows import evaluate_checkpoint, load_agent

Report = dict[str, Any]
pytestmark = [pytest.mark.timeout(600), pytest.mark.matrix]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Case], list[Report], Path]:
    """The corpus, what became of each of its files, and where it lies."""
    base = tmp_path_factory.mktemp("hostile")
    run = train(tiny_config("dqn", base))
    agent = base / "agent.rlt"
    DQN.load(run.checkpoint_path).save(agent)
    folder = base / "corpus"
    (folder / "checkpoints").mkdir(parents=True)
    cases = corpus(folder, run.checkpoint_path, agent)
    good = write_good(base)
    orders = {
        "warm": [
            ["predict", "--checkpoint", str(agent), "--obs", OBS],
            ["predict", "--checkpoint", str(run.run_dir), "--obs", OBS],
            ["resume", "--checkpoint", str(run.run_dir)],
            *(["data", "inspect", str(path)] for path in good),
        ],
        "warm_errors": [["train", "--config", str(base / "nothing.yaml")]],
        "cases": [[case.name, list(case.words)] for case in cases],
    }
    (base / "orders.json").write_text(json.dumps(orders))
    child = ROOT / "tests" / "helpers" / "hostile_child.py"
    done = run_warm(child, base / "orders.json", timeout=600)
    assert done.code == 0, done.err[-3000:]
    return cases, [json.loads(line) for line in done.out.splitlines()], folder


def write_good(base: Path) -> list[Path]:
    from helpers.datasets import columns_of, toy_data, write_columns
    from rl_training.data.datasets.writers import save_dataset

    data = toy_data(50)
    made = [write_columns(base / "good.npz", columns_of(data))]
    for name in ("good.hdf5", "good_folder"):
        save_dataset(data, base / name, "hdf5" if name.endswith("hdf5") else "npy")
        made.append(base / name)
    return made


def test_there_are_enough_of_them(outcome: tuple[list[Case], list[Report], Path]) -> None:
    cases, reports, _ = outcome
    assert len(cases) >= 40
    assert [report["name"] for report in reports] == [case.name for case in cases]
    assert len({case.name for case in cases}) == len(cases)


def test_nothing_is_executed_written_or_removed(
    outcome: tuple[list[Case], list[Report], Path], tried: Tried
) -> None:
    _, reports, folder = outcome
    bad = {report["name"]: report["events"] for report in reports if report["events"]}
    tried("hostile files", "-", len(reports), len(bad))
    assert bad == {}
    assert not list(folder.rglob(CANARY))


def test_each_is_refused_in_one_sentence(outcome: tuple[list[Case], list[Report], Path]) -> None:
    wrong = {
        report["name"]: (report["code"], report["said"])
        for report in outcome[1]
        if report["code"] != 2
        or not report["said"].startswith("error: ")
        or "Traceback" in report["said"]
        or len(report["said"].strip().splitlines()) != 1
        or len(report["said"]) > 2000
    }
    assert wrong == {}


def test_predicting_imports_nothing_that_a_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "modules" / "named_by_a_file.py"
    source.parent.mkdir()
    source.write_text(f"import os\nos.mkdir({str(tmp_path / CANARY)!r})\n")
    monkeypatch.syspath_prepend(source.parent)
    run = train(tiny_config("dqn", tmp_path, total_timesteps=16, eval_episodes=0))
    DQN.load(run.checkpoint_path).save(tmp_path / "agent")
    agent = load_single_file(tmp_path / "agent")
    config = agent.header["config"] | {"env_id": "named_by_a_file:Env"}
    header = agent.header | {"config": config}
    path = save_single_file(tmp_path / "forged", header=header, states=agent.states)
    assert load_agent(path).predict([0.0] * 4).shape == ()
    assert not (tmp_path / CANARY).exists()
    with pytest.raises(EnvError):  # evaluating does need the module: see SECURITY.md
        evaluate_checkpoint(path, 1)
    assert (tmp_path / CANARY).exists()


def test_each_costs_little(outcome: tuple[list[Case], list[Report], Path]) -> None:
    dear = {
        report["name"]: (round(report["seconds"], 2), report["grown"] // 2**20)
        for report in outcome[1]
        if report["seconds"] > 3.0 or report["grown"] > 500 * 2**20
    }
    assert dear == {}

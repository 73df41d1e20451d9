"""The same services by their real packages, where the extras are installed, read back by theirs.

What is sent is compared with `metrics.jsonl`, number by number and step by step.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import clean_environment, run_python, tiny_config, write_tiny
from helpers.wandb_files import read_offline_runs
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.trackers import MLFLOW_FILE, MlflowTracker, TrackedRun
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training

# Neither package is free of deprecated calls to its own dependencies.
pytestmark = pytest.mark.filterwarnings("default")
History = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """MLflow's tables, made once: that takes it seconds."""
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path.read_bytes()


@pytest.fixture
def database(tmp_path: Path, empty_database: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mlflow.db"
    path.write_bytes(empty_database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def tracked(folder: Path, *names: str, **changes: Any) -> TrainConfig:
    return tiny_config("dqn", folder, trackers=names, **changes)


def logged(run: Path) -> History:
    """What the run's own log has, by the names the services get."""
    history: History = {}
    for row in read_metrics(run):
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "step":
                full = name if "/" in name else f"{row['kind']}/{name}"
                history.setdefault(full, []).append((row["step"], value))
    return history


def without_times(history: History) -> History:
    """Leave out what differs when steps are done again after a kill."""
    return {name: rows for name, rows in history.items() if not name.startswith("time/")}


def mlflow_run(run: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient().get_run((run / MLFLOW_FILE).read_text(encoding="utf-8"))


def mlflow_history(run: Path) -> History:
    from mlflow import MlflowClient

    client, found = MlflowClient(), mlflow_run(run)
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }


def steps(history: History) -> dict[str, list[int]]:
    return {name: [step for step, _ in rows] for name, rows in history.items()}


def test_mlflow_has_the_log_the_settings_and_the_tags_of_each_seed(
    tmp_path: Path, database: Path
) -> None:
    train(tracked(tmp_path, "mlflow", seeds=(1, 2), tags=("x", "y")))
    for seed in (1, 2):
        folder = tmp_path / "run" / f"seed_{seed}"
        found = mlflow_run(folder)
        assert mlflow_history(folder) == logged(folder)
        assert found.data.params["seed"] == str(seed)
        assert found.data.params["algo_kwargs.batch_size"] == "8"
        tags = {"group": "run", "tags": "x, y", "mlflow.runName": f"run-seed_{seed}"}
        assert tags.items() <= found.data.tags.items()
        assert found.info.status == "FINISHED"


def test_wandb_has_the_log_the_settings_and_the_tags_of_each_seed(
    tmp_path: Path, offline: None
) -> None:
    train(tracked(tmp_path, "wandb", seeds=(1, 2), tags=("x", "y")))
    for seed in (1, 2):
        folder = tmp_path / "run" / f"seed_{seed}"
        (found,) = read_offline_runs(folder)
        assert found.metrics == logged(folder)
        assert (found.name, found.group, found.tags) == (f"run-seed_{seed}", "run", ["x", "y"])
        assert found.config["seed"] == seed
        assert found.config["algo_kwargs"]["batch_size"] == 8
        assert found.exit_code == 0


def killed_at(folder: Path, config: Path, step: int) -> None:
    """Train in a process of its own and kill it once its log has come to a step."""
    command = [sys.executable, "-m", "rl_training", "train", "-c", str(config)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=clean_environment(), stdout=quiet, stderr=quiet)
    until = time.monotonic() + 60
    while not any(row["step"] >= step for row in read_metrics(folder)):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_killed_and_resumed_run_is_one_run_with_every_step_once(
    tmp_path: Path, database: Path, offline: None
) -> None:
    config = write_tiny(
        tmp_path,
        "dqn",
        trackers=["wandb", "mlflow"],
        total_timesteps=2500,
        log_interval=50,
        checkpoint_interval=500,
    )
    run = tmp_path / "runs" / "run"
    killed_at(run, config, 800)
    before = mlflow_run(run).info
    resume_training(run)
    own = logged(run)
    assert own["train/epsilon"][-1][0] == 2500
    assert mlflow_run(run).info.run_id == before.run_id
    assert before.status == "RUNNING"
    assert without_times(mlflow_history(run)) == without_times(own)
    assert steps(mlflow_history(run)) == steps(own)
    *_, newest = files = read_offline_files(run)
    assert len({found.run_id for found in files}) == 1
    assert newest.metrics == own


def read_offline_files(run: Path) -> list[Any]:
    """The offline files that have come to the disk; a killed process may leave a bare header."""
    for path in run.glob("wandb/offline-run-*/run-*.wandb"):
        if path.stat().st_size <= 7:
            path.unlink()
    return read_offline_runs(run)


def test_what_mlflow_missed_in_the_middle_is_made_good_by_a_resume(
    tmp_path: Path, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rename_table(old: str, new: str) -> None:
        connection = sqlite3.connect(database, timeout=20)
        connection.execute(f"ALTER TABLE {old} RENAME TO {new}")
        connection.commit()
        connection.close()

    run = train(tracked(tmp_path, "mlflow"), stop_at=32).run_dir
    rename_table("metrics", "gone")
    resume_training(run)
    rename_table("gone", "metrics")
    said = [record.message for record in caplog.records if record.message.startswith("mlflow ")]
    assert len(said) == 1
    assert "the run continues without it" in said[0]
    assert logged(run)["train/epsilon"][-1][0] == 64
    assert max(step for rows in mlflow_history(run).values() for step, _ in rows) == 32
    resume_training(run)
    assert mlflow_history(run) == logged(run)


def test_mlflow_takes_more_settings_than_one_request_may_hold(
    tmp_path: Path, database: Path
) -> None:
    settings = {f"setting_{index}": index for index in range(250)}
    MlflowTracker(TrackedRun(folder=tmp_path, config=settings)).close()
    assert len(mlflow_run(tmp_path).data.params) == 250


def refused(tmp_path: Path, name: str) -> str:
    """The sentence of a run that could not begin, which must leave nothing behind."""
    config = write_tiny(tmp_path, "dqn", trackers=[name], seeds=[1, 2])
    # In a process of its own: wandb keeps the settings it first saw.
    outcome = run_python("-m", "rl_training", "train", "-c", config)
    assert not list((tmp_path / "runs").iterdir())
    return outcome.sentence()


def test_no_login_is_one_sentence_before_training(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "wandb cannot be used here (UsageError: No API key" in refused(tmp_path, "wandb")


def test_a_store_that_cannot_be_made_is_one_sentence_before_training(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")
    assert "mlflow cannot be used here (" in refused(tmp_path, "mlflow")


def test_a_silent_server_is_one_sentence_before_training(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert "Connection refused" in refused(tmp_path, "mlflow")

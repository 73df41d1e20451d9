"""Services beside the run's own log: what they are told, and that they cannot cost a run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.tiny import run_cli, tiny_config, write_tiny
from rl_training.errors import ConfigError, RLTrainingError
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import METRICS_FILE, open_loggers, read_metrics
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training


class FakeWandb(ModuleType):
    """The part of wandb that is used, as its documentation has it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []
        self.fails = False
        self.begins = 0

    def init(self, **keywords: Any) -> Any:
        run: dict[str, Any] = {"keywords": keywords, "rows": [], "finished": 0}
        self.runs.append(run)

        def log(values: dict[str, float], step: int) -> None:
            if self.fails:
                raise ConnectionError("no route")
            run["rows"].append((step, values))

        def finish() -> None:
            run["finished"] += 1

        return SimpleNamespace(log=log, finish=finish, step=self.begins)


class FakeReader:
    """What of that client reads."""

    latest: Callable[[], dict[str, int]]

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(metrics=self.latest()))

    def get_metric_history(self, run_id: str, key: str) -> Any:
        return [SimpleNamespace(step=self.latest()[key])]


class FakeMlflow(ModuleType):
    """The part of mlflow's client that is used, as its documentation has it."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.entities = ModuleType("mlflow.entities")
        self.entities.Metric = lambda *values: values  # type: ignore[attr-defined]
        self.entities.Param = lambda *values: values  # type: ignore[attr-defined]
        self.experiments: dict[str, Any] = {}
        self.calls: list[tuple[str, Any]] = []
        self.metrics: list[Any] = []
        self.params: dict[str, str] = {}
        outer = self

        class Client(FakeReader):
            latest = outer.latest

            def get_experiment_by_name(self, name: str) -> Any:
                return outer.experiments.get(name)

            def create_experiment(self, name: str) -> str:
                outer.experiments[name] = SimpleNamespace(experiment_id="7")
                return "7"

            def create_run(self, experiment_id: str, run_name: str, tags: Any) -> Any:
                outer.calls.append(("create", (experiment_id, run_name)))
                return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

            def update_run(self, run_id: str, status: str) -> None:
                outer.calls.append(("update", (run_id, status)))

            def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
                outer.metrics += metrics
                outer.params |= dict(params)

            def set_terminated(self, run_id: str) -> None:
                outer.calls.append(("end", run_id))

        self.MlflowClient = Client

    def latest(self) -> dict[str, int]:
        return {name: step for name, *_, step in self.metrics}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    module = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", module.entities)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return module


def tracked(folder: Path, *names: str, **changes: Any) -> TrainConfig:
    return tiny_config("sac", folder, trackers=names, **changes)


def test_a_service_gets_what_the_log_gets(tmp_path: Path, wandb: FakeWandb) -> None:
    run = train(tracked(tmp_path, "wandb")).run_dir
    (made,) = wandb.runs
    assert made["keywords"]["project"] == "rl-training"
    assert made["keywords"]["name"] == "run"
    assert made["keywords"]["config"]["algo_kwargs"]["batch_size"] == 8
    assert made["finished"] == 1
    sent = {step: values for step, values in made["rows"] if "train/critic_loss" in values}
    logged = {r["step"]: r["critic_loss"] for r in read_metrics(run) if "critic_loss" in r}
    assert {step: values["train/critic_loss"] for step, values in sent.items()} == logged


def test_a_resumed_run_is_the_same_run_there(
    tmp_path: Path, wandb: FakeWandb, mlflow: FakeMlflow
) -> None:
    run = train(tracked(tmp_path, "wandb", "mlflow"), stop_at=40).run_dir
    resume_training(run)
    first, second = (made["keywords"]["id"] for made in wandb.runs)
    assert first == second
    assert [name for name, _ in mlflow.calls] == ["create", "end", "update", "end"]
    assert mlflow.calls[2][1] == ("abc", "RUNNING")
    assert mlflow.params["algo_kwargs.batch_size"] == "8"
    assert max(step for *_, step in mlflow.metrics) == 64


def test_steps_that_a_service_has_are_not_sent_again_and_what_it_lacks_is(
    tmp_path: Path, wandb: FakeWandb, mlflow: FakeMlflow
) -> None:
    run = train(tracked(tmp_path, "wandb", "mlflow"), stop_at=40).run_dir
    wandb.begins = 17  # the service came to 16, the log to 32
    mlflow.metrics = [metric for metric in mlflow.metrics if metric[-1] <= 16]
    resume_training(run)
    logged = [row["step"] for row in read_metrics(run, "train")]
    assert sorted({step for step, _ in wandb.runs[1]["rows"]}) == logged[1:]
    assert [step for name, *_, step in mlflow.metrics if name == "train/gradient_steps"] == logged


def test_a_service_that_cannot_be_opened_again_does_not_keep_a_run_from_going_on(
    tmp_path: Path,
    wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(**_: Any) -> None:
        raise TimeoutError("nobody\nanswers")

    run = train(tracked(tmp_path, "wandb"), stop_at=40).run_dir
    monkeypatch.setattr(wandb, "init", refuse)
    resume_training(run)
    assert read_metrics(run)[-1]["step"] == 64
    said = [record.message for record in caplog.records]
    assert said == [
        "wandb cannot be used here (TimeoutError: nobody answers); the run continues without it"
    ]


def test_a_run_without_its_log_is_no_new_one_and_never_removed(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tracked(tmp_path, "wandb")).run_dir
    (run / METRICS_FILE).unlink()

    def refuse(**_: Any) -> None:
        raise OSError("no log-in")

    monkeypatch.setattr(wandb, "init", refuse)
    for logger in open_loggers(tracked(tmp_path, "wandb"), run, [run], [0], 40):
        logger.close()
    assert list((run / "checkpoints").iterdir())


def test_a_group_whose_second_service_is_refused_closes_the_first_and_leaves_nothing(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = wandb.init

    def refuse_the_second(**keywords: Any) -> Any:
        if wandb.runs:
            raise PermissionError("too many")
        return init(**keywords)

    monkeypatch.setattr(wandb, "init", refuse_the_second)
    with pytest.raises(RLTrainingError, match="too many"):
        train(tracked(tmp_path, "wandb", seeds=(1, 2)))
    assert wandb.runs[0]["finished"] == 1
    assert not list(tmp_path.iterdir())


def test_a_new_run_in_the_place_of_an_old_one_is_another_run(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    for _ in range(2):
        shutil.rmtree(train(tracked(tmp_path, "wandb")).run_dir)
    first, second = (made["keywords"]["id"] for made in wandb.runs)
    assert first != second


def test_seeds_of_a_group_are_runs_of_their_own(tmp_path: Path, wandb: FakeWandb) -> None:
    train(tracked(tmp_path, "wandb", seeds=(1, 2)))
    assert [made["keywords"]["name"] for made in wandb.runs] == ["run-seed_1", "run-seed_2"]
    assert [made["keywords"]["config"]["seed"] for made in wandb.runs] == [1, 2]
    assert len({made["keywords"]["id"] for made in wandb.runs}) == 2


def test_a_service_that_fails_does_not_cost_the_run(
    tmp_path: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.fails = True
    run = train(tracked(tmp_path, "wandb")).run_dir
    assert read_metrics(run, "eval")
    warnings = [record.message for record in caplog.records if "wandb failed" in record.message]
    assert len(warnings) == 1
    assert "no route" in warnings[0]


def test_a_service_that_cannot_be_opened_is_one_sentence(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError("no login")

    monkeypatch.setattr(wandb, "init", refuse)
    sentence = run_cli("train", "-c", write_tiny(tmp_path, trackers=["wandb"])).sentence()
    assert "wandb cannot be used here (PermissionError: no login)" in sentence


def test_a_missing_package_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = write_tiny(tmp_path, trackers=["wandb"])
    sentence = run_cli("train", "-c", config).sentence()
    assert 'wandb, which is not installed; pip install "rl-training[wandb]"' in sentence
    assert not (tmp_path / "runs").exists()


def test_an_unknown_service_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trackers: must be different ones of wandb, mlflow"):
        tracked(tmp_path, "comet")

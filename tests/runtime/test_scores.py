"""Normalised scores: where they come from, and that logs, `eval` and reports show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny import run_cli, tiny_config
from rl_training.data.datasets.scores import SCORE, ReferenceScores
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import read_metrics
from rl_training.reporting.figures import rows_of
from rl_training.reporting.gather import gather
from rl_training.runtime.results import summarize_returns
from rl_training.runtime.train import train

HOPPER = ReferenceScores(-20.272305, 3234.3)


def config_of(env_id: str, **changes: Any) -> TrainConfig:
    return TrainConfig(algo="iql", env_id=env_id, **changes)


def test_a_score_is_the_place_of_the_mean_between_both_returns() -> None:
    figures = summarize_returns([0.0, 20.0], ReferenceScores(-10.0, 30.0))
    assert figures[SCORE] == 50.0
    assert SCORE not in summarize_returns([0.0])
    assert SCORE not in summarize_returns([], ReferenceScores(0.0, 1.0))


def test_a_task_with_rules_of_its_own_has_no_score() -> None:
    assert config_of("Hopper-v5").scores == HOPPER
    assert config_of("Hopper-v5", env_kwargs={"render_mode": "rgb_array"}).scores == HOPPER
    assert config_of("Hopper-v5", env_kwargs={"max_episode_steps": 10}).scores is None
    assert config_of("Pendulum-v1").scores is None


@pytest.mark.filterwarnings("ignore:`.*` is set to None:UserWarning")
@pytest.mark.filterwarnings("ignore:env_spec is None:UserWarning")
def test_data_brings_its_own_returns_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    from gymnasium import spaces
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    episode = EpisodeBuffer(
        observations=np.zeros((3, 2), np.float32),
        actions=np.zeros((2, 1), np.float32),
        rewards=[1.0, 1.0],
        terminations=[False, True],
        truncations=[False, False],
    )
    for name, returns in (
        ("mine/scored-v0", {"ref_min_score": 2.0, "ref_max_score": 6.0}),
        ("mine/plain-v0", {}),
    ):
        minari.create_dataset_from_buffers(
            name,
            [episode],
            observation_space=spaces.Box(-9, 9, (2,)),
            action_space=spaces.Box(-1, 1, (1,)),
        )
        if returns:
            minari.load_dataset(name).storage.update_metadata(returns)

    def scores(dataset_id: str, env_id: str = "Pendulum-v1") -> ReferenceScores | None:
        settings = {"dataset_kind": "minari", "dataset_id": dataset_id}
        return config_of(env_id, algo_kwargs=settings).scores

    assert scores("mine/scored-v0") == ReferenceScores(2.0, 6.0)
    assert scores("mine/plain-v0") is None
    assert scores("mine/missing-v0") is None
    assert scores("D4RL/pen/human-v2") == scores("", "AdroitHandPen-v1")
    assert scores("mine/scored-v0", "Hopper-v5") == HOPPER


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mujoco")
    folder = tmp_path_factory.mktemp("scores")
    config = tiny_config(
        "sac", folder, env_id="Hopper-v5", env_kwargs={}, algo_kwargs={"eval_interval": 32}
    )
    result = train(config)
    mean = result.metrics["eval_return_mean"]
    assert result.metrics[SCORE] == pytest.approx(HOPPER.score(mean))
    return result.run_dir


def test_logs_and_eval_show_the_score(run: Path) -> None:
    for row in read_metrics(run, "eval"):
        assert row[SCORE] == pytest.approx(HOPPER.score(row["eval_return_mean"]))
    shown = run_cli("eval", run, "--episodes", 2, "--json")
    facts = json.loads(shown.out)
    assert facts[SCORE] == pytest.approx(HOPPER.score(facts["eval_return_mean"]))


def test_reports_show_the_score(run: Path, tmp_path: Path) -> None:
    (task,) = gather([run])
    (row,) = rows_of(task)
    assert row.score is not None
    assert row.final is not None
    assert row.score.iqm == pytest.approx(HOPPER.score(row.final.iqm))
    board = run_cli("leaderboard", run)
    assert "score" in board.out
    (facts,) = json.loads(run_cli("leaderboard", run, "--json").out)[0]["methods"]
    assert facts["score"]["iqm"] == row.score.iqm
    pytest.importorskip("jinja2")
    assert run_cli("report", run, "-o", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<th>Score</th>" in page
    assert 'data-label="Score"' in page


def test_runs_without_a_score_have_no_column(tmp_path: Path) -> None:
    run = train(tiny_config("sac", tmp_path)).run_dir
    assert "score" not in run_cli("leaderboard", run).out
    assert SCORE not in run_cli("eval", run, "--episodes", 1).out

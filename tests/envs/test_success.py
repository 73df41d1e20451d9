"""Success rates: what the last step of an episode says, however environments are run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from helpers.tiny import run_cli, tiny_config
from rl_training.algorithms.base import AnyLearner
from rl_training.envs.backends.kinds import Mode
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.snapshot import success_in
from rl_training.experiment.config import TrainConfig
from rl_training.rng import Rng
from rl_training.runtime import evaluator as evaluation
from rl_training.runtime.checkpoints.saver import Saver
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.results import summarize_returns
from rl_training.runtime.session import Successes
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training

GUESSING = "helpers.envs:GuessingEnv"


class Still:
    """A policy that does nothing."""

    device = torch.device("cpu")

    def initial_acting_state(self, count: int) -> None:
        return None

    @contextmanager
    def drawing_from(self, rng: Rng) -> Iterator[None]:
        yield

    def act_from(self, state: None, obs: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*obs.shape[:2], 1)


class Left(Still):
    """A policy that pushes a cart to the left."""

    def act_from(self, state: None, obs: torch.Tensor) -> torch.Tensor:
        return torch.zeros(obs.shape[:2], dtype=torch.int64)


def judged(
    episodes: int, seeds: tuple[int, ...] = (0, 1), mode: Mode = "auto", **env_kwargs: Any
) -> tuple[list[list[float]], list[list[float]] | None]:
    judge = Evaluator(GUESSING, env_kwargs, seeds, threads=1)
    judge._mode = mode
    try:
        return judge.evaluate(cast(AnyLearner, Still()), episodes, 3), judge.successes
    finally:
        judge.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("key", ["success", "is_success"])
def test_the_last_step_of_an_episode_says_whether_it_succeeded(mode: Mode, key: str) -> None:
    returns, successes = judged(6, mode=mode, key=key)
    # Each step pays 1 in an episode that succeeds, and nothing in another.
    assert successes == [[value / 3 for value in row] for row in returns]
    assert {value for row in successes for value in row} == {0.0, 1.0}


def test_more_episodes_than_run_at_once_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_PARALLEL", 2)
    returns, successes = judged(5)
    assert successes == [[value / 3 for value in row] for row in returns]
    assert [len(row) for row in successes] == [5, 5]


def test_silence_about_a_failure_is_a_failure_where_others_speak() -> None:
    assert judged(6, only_when_true=True) == judged(6)


def test_a_task_that_says_nothing_has_no_success() -> None:
    assert judged(4, key="none")[1] is None
    native = Evaluator("CartPole-v1", {"max_episode_steps": 5}, (0,), threads=1)
    try:
        assert native.evaluate(cast(AnyLearner, Left()), 4, 0)
        assert native.successes is None
    finally:
        native.close()


def test_native_environments_have_no_infos() -> None:
    envs = SeedVectorEnv.make("CartPole-v1", {}, 4, (0,), "native")
    assert envs.successes() is None
    envs.close()


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"success": True}, 1.0),
        ({"success": 0.0, "is_success": True}, 0.0),
        ({"is_success": np.array([1])}, 1.0),
        ({"success": np.float32(0.5)}, 0.5),
        ({"success": "yes"}, math.nan),
        ({"success": np.ones(2)}, math.nan),
        ({"success": None}, math.nan),
        ({}, math.nan),
        (None, math.nan),
    ],
)
def test_what_an_info_says(info: object, expected: float) -> None:
    np.testing.assert_equal(success_in(info), expected)


def test_the_rate_is_the_mean_and_is_left_out_where_nothing_is_known() -> None:
    assert summarize_returns([1.0, 2.0, 3.0], None, [1.0, 0.0, 0.0])["eval_success_rate"] == 1 / 3
    assert "eval_success_rate" not in summarize_returns([1.0])
    assert "eval_success_rate" not in summarize_returns([], None, [])


def tiny(folder: Path, **changes: Any) -> TrainConfig:
    settings = {"env_id": GUESSING, "env_kwargs": {}, "eval_episodes": 4} | changes
    return tiny_config("sac", folder, algo_kwargs={"eval_interval": 32}, **settings)


def test_a_run_reports_success_in_its_metrics_its_log_and_its_listing(tmp_path: Path) -> None:
    result = train(tiny(tmp_path, seeds=[0, 1]))
    expected = [r.metrics["eval_return_mean"] / 3 for r in result.per_seed]
    assert [r.metrics["eval_success_rate"] for r in result.per_seed] == expected
    assert result.metrics["eval_success_rate"] == pytest.approx(np.mean(expected))
    log = (result.per_seed[0].run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for line in log if (row := json.loads(line))["kind"] == "eval"]
    assert [row["eval_success_rate"] for row in rows] == [r["eval_return_mean"] / 3 for r in rows]
    shown = run_cli("leaderboard", result.run_dir, "--json")
    (row,) = json.loads(shown.out)[0]["methods"]
    assert row["success"]["values"] == expected
    one = run_cli("eval", result.per_seed[0].run_dir, "--episodes", 8)
    returned = float(one.values["eval_return_mean"])
    assert float(one.values["eval_success_rate"]) == pytest.approx(returned / 3, abs=1e-4)


def test_a_finished_run_still_knows_its_success_when_it_is_resumed(tmp_path: Path) -> None:
    first = train(tiny(tmp_path))
    assert (
        resume_training(first.run_dir).metrics["eval_success_rate"]
        == first.metrics["eval_success_rate"]
    )


def test_a_task_without_success_shows_nothing_of_it(tmp_path: Path) -> None:
    result = train(tiny(tmp_path, env_kwargs={"key": "none"}))
    assert "eval_success_rate" not in result.metrics
    assert "success" not in (result.run_dir / "metrics.jsonl").read_text()
    shown = run_cli("leaderboard", result.run_dir)
    assert "success" not in shown.out


def test_what_is_not_known_is_kept_as_such() -> None:
    kept = Successes(2, 3)
    assert kept.of(0) is None
    kept.note([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert (kept.of(0), kept.of(1)) == ([0.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    kept.note(None)
    assert kept.of(1) is None


def test_a_checkpoint_from_before_there_were_successes_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Saver.save

    def without(self: Saver, step: int, parts: dict[str, Any], **options: Any) -> list[Path]:
        old = {name: part for name, part in parts.items() if name != "successes"}
        return save(self, step, old, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", without)
        first = train(tiny(tmp_path))
    longer = resume_training(first.run_dir, total_timesteps=96)
    assert longer.metrics["eval_success_rate"] == longer.metrics["eval_return_mean"] / 3

"""Studies of methods that learn a model: side by side, cut and taken up, one file of records."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.evidence import models
from bench.evidence.models import COLUMNS, STUDIES, job_of, main, merge, rows_of, table_of
from bench.evidence.rows import read
from bench.evidence.training import Job

from helpers.tiny import tiny_config
from rl_training.experiment.config import load_config


def row(step: int, value: float, **changes: str) -> dict[str, str]:
    base = dict.fromkeys(COLUMNS, "") | {"method": "sac", "variant": "a", "seed": "1"}
    return base | {
        "step": str(step),
        "metric": "eval_return_mean",
        "value": f"{value:.2f}",
        **changes,
    }


def test_records_of_later_calls_are_added_and_replace_the_same_ones(tmp_path: Path) -> None:
    out = tmp_path / "records.csv"
    merge(out, [row(10, 1.0), row(20, 2.0)])
    merge(out, [row(20, 3.0), row(30, 4.0), row(30, 5.0, seed="2"), row(30, 9.0, metric="seconds")])
    rows = read(out)
    assert [(r["seed"], r["step"], r["metric"], r["value"]) for r in rows] == [
        ("1", "10", "eval_return_mean", "1.00"),
        ("1", "20", "eval_return_mean", "3.00"),
        ("1", "30", "eval_return_mean", "4.00"),
        ("2", "30", "eval_return_mean", "5.00"),
        ("1", "30", "seconds", "9.00"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["records.csv"]


def test_the_table_shows_the_last_evaluation_that_all_seeds_have() -> None:
    rows = [row(10, 1.0), row(10, 3.0, seed="2"), row(20, 7.0)]
    rows += [row(10, 90.0, metric="seconds"), row(20, 600.0, metric="seconds")]
    assert table_of(rows).splitlines()[2:] == [
        "| a |  | 1 to 2 | 10 | 1.0, 3.0 | 2.0 | 1.0 | 1.5 min |"
    ]


def test_the_clock_of_a_run_that_was_taken_up_goes_on(tmp_path: Path) -> None:
    job = Job("study", tiny_config("sac", tmp_path, total_timesteps=40), tmp_path)
    (tmp_path / "study").mkdir()
    clock = [(8, 4.0), (16, 9.0), (24, 2.0), (32, 5.0), (40, 1.0)]
    lines = [
        {"step": step, "kind": "train", "time/elapsed_seconds": seconds, "rollout/return_mean": 1.0}
        for step, seconds in clock
    ]
    lines.insert(2, {"step": 16, "kind": "eval", "eval_return_mean": -3.0, "eval_episodes": 5.0})
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "study" / "metrics.jsonl").write_text(text + "\n", encoding="utf-8")
    found = list(rows_of(job))
    seconds = [(r["step"], r["value"]) for r in found if r["metric"] == "seconds"]
    expected = [("8", "4.00"), ("16", "9.00"), ("24", "11.00"), ("32", "14.00"), ("40", "15.00")]
    assert seconds == expected
    judged = [r for r in found if r["metric"] == "eval_return_mean"]
    assert [(r["episodes"], r["value"], r["variant"]) for r in judged] == [("5", "-3.00", "study")]
    assert "40 steps" in job.progress()


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_a_run_that_can_be_configured(name: str, tmp_path: Path) -> None:
    options = argparse.Namespace(settings=[], seeds=None, runs=tmp_path, data=".")
    config = job_of(name, options).config
    assert config.run_name == name
    assert len(config.members) == len(STUDIES[name].seeds) * max(1, len(STUDIES[name].grid))
    assert load_config(STUDIES[name].preset).env_id == config.env_id


def test_a_setting_may_be_for_one_study_alone() -> None:
    given = ["a=1", "mbpo-hopper:precision=tf32", "env_id=module:Class", "pets-pusher:b.c=x:y"]
    assert models.settings_for("mbpo-hopper", given) == [
        "a=1",
        "precision=tf32",
        "env_id=module:Class",
    ]
    assert models.settings_for("pets-pusher", given) == ["a=1", "env_id=module:Class", "b.c=x:y"]
    with pytest.raises(SystemExit, match="mbpo-hoper is not a study"):
        models.settings_for("pets-pusher", ["mbpo-hoper:a=1"])


@pytest.mark.matrix
def test_studies_are_cut_and_taken_up_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "one": models.Study(preset="sac/pendulum", seeds=(3, 4)),
        "two": models.Study(preset="dqn/cartpole", seeds=(5,)),
    }
    monkeypatch.setattr(models, "STUDIES", small)
    out = tmp_path / "records.csv"
    options = ["--runs", str(tmp_path / "runs"), "--out", str(out), "--tell", "0.1"]
    for text in ("total_timesteps=4000", "log_interval=100", "eval_episodes=1", "device=cpu"):
        options += ["-s", text]
    for text in ("hidden_sizes=[16]", "learning_starts=50", "eval_interval=200", "batch_size=8"):
        options += ["-s", f"algo_kwargs.{text}"]
    shown = []

    def stop_soon(jobs: Sequence[Job], seconds: float) -> None:
        shown.append(seconds)
        listens = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        if listens and all("eval_return_mean" in job.progress() for job in jobs):
            os.kill(os.getpid(), signal.SIGTERM)  # as whoever lends the machine would

    with monkeypatch.context() as patch:
        patch.setattr(models, "_tell", stop_soon)
        main(["one", "two", *options])
    assert len(shown) > 1
    assert capsys.readouterr().out.count("saved, to be continued") == 2
    before = read(out)
    assert {r["seed"] for r in before} == {"3", "4", "5"}
    main(["one", "two", *options])
    assert capsys.readouterr().out.count("finished") == 2
    rows = read(out)
    assert {models._key(r) for r in before} < {models._key(r) for r in rows}
    last = [r for r in rows if r["metric"] == "eval_return_mean" and r["step"] == "4000"]
    assert sorted((r["method"], r["seed"]) for r in last) == [
        ("dqn", "5"),
        ("sac", "3"),
        ("sac", "4"),
    ]
    main(["--table", str(out)])
    assert capsys.readouterr().out.count("4,000") == 2

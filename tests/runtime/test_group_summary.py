"""The summary of a group of seeds: its file, its figures, and what is printed and drawn of it."""

from __future__ import annotations

import io
import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers.tiny import run_cli, tiny_config, write_tiny
from rl_training.cli.display import print_group
from rl_training.cli.plots import write_plots
from rl_training.errors import DataError, RLTrainingError
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.grid import Member
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.statistics import bootstrap_interval, interquartile_mean
from rl_training.experiment.summary import (
    SUMMARY_FILE,
    GroupSummary,
    read_summary,
    summarize_group,
    write_summary,
)
from rl_training.runtime.results import TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training


def group_config(folder: Path, **changes: Any) -> TrainConfig:
    values = {"seeds": [3, 1], "eval_episodes": 2} | changes
    return tiny_config("sac", folder, algo_kwargs={"eval_interval": 16}, **values)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """Two seeds, evaluated at 16, 32, 48 and 64; tests must not change it."""
    return train(group_config(tmp_path_factory.mktemp("whole")))


def stored(result: TrainResult) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((result.run_dir / SUMMARY_FILE).read_text())
    return data


def logged(result: TrainResult) -> dict[int, float]:
    return {row["step"]: row["eval_return_mean"] for row in read_metrics(result.run_dir, "eval")}


def fake_group(folder: Path, logs: dict[int, dict[int, float]]) -> GroupSummary:
    """The summary of seeds with these evaluations, by seed and step."""
    folders, finals = [], []
    for seed, log in logs.items():
        path = folder / f"seed_{seed}"
        path.mkdir()
        lines = [
            {"step": s, "kind": "eval", "eval_return_mean": v if abs(v) < 1e300 else str(v)}
            for s, v in log.items()
        ]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        final = log[max(log)] if log else float("nan")
        metrics = {"eval_return_mean": final, "global_step": 50.0, "gradient_steps": 7.0}
        folders.append(path)
        finals.append(metrics)
    return summarize_group([Member(seed) for seed in logs], folders, finals)


def printed(summary: GroupSummary, width: int = 80) -> list[str]:
    text = io.StringIO()
    print_group(Console(file=text, width=width, soft_wrap=True), summary)
    return [line.rstrip() for line in text.getvalue().splitlines()]


# The file


def test_the_figures_are_those_of_the_logs(whole: TrainResult) -> None:
    data, logs = stored(whole), [logged(member) for member in whole.per_seed]
    assert [seed["seed"] for seed in data["seeds"]] == [3, 1]
    for seed, log in zip(data["seeds"], logs, strict=True):
        assert list(log) == [16, 32, 48, 64]
        assert seed["final_return"] == log[64]
        assert seed["best_return"] == max(log.values())
        assert log[seed["best_step"]] == seed["best_return"]
        assert (seed["steps"], seed["gradient_steps"]) == (64, 48)
    finals = [log[64] for log in logs]
    assert finals[0] != finals[1]
    centre = statistics.fmean(finals)  # of two values everything in the middle is their mean
    low, high = min(finals), max(finals)
    assert data["final_return"] == pytest.approx(
        {"mean": centre, "median": centre, "iqm": centre, "min": low, "max": high}
        | {"iqm_low": low, "iqm_high": high}
    )
    assert (data["num_seeds"], data["level"], data["resamples"]) == (2, 0.95, 10_000)


def test_the_curve_has_every_evaluation(whole: TrainResult) -> None:
    logs = [logged(member) for member in whole.per_seed]
    expected = [
        {"step": s, "iqm": (logs[0][s] + logs[1][s]) / 2}
        | {"low": min(logs[0][s], logs[1][s]), "high": max(logs[0][s], logs[1][s])}
        for s in (16, 32, 48, 64)
    ]
    assert stored(whole)["curve"] == [pytest.approx(point) for point in expected]


def test_the_result_of_a_group_has_the_interquartile_mean(whole: TrainResult) -> None:
    final = stored(whole)["final_return"]
    for name in ("iqm", "iqm_low", "iqm_high"):
        assert whole.metrics[f"eval_return_{name}"] == final[name]
    assert all("eval_return_iqm" not in member.metrics for member in whole.per_seed)


def test_a_resumed_group_has_the_summary_of_an_uninterrupted_one(
    whole: TrainResult, tmp_path: Path
) -> None:
    cut = train(group_config(tmp_path), stop_at=40)
    assert [point["step"] for point in stored(cut)["curve"]] == [16, 32]
    resumed = resume_training(cut.run_dir)
    assert stored(resumed) == stored(whole)
    assert resumed.metrics == whole.metrics


def test_resuming_further_extends_the_curve(whole: TrainResult, tmp_path: Path) -> None:
    run = train(group_config(tmp_path, total_timesteps=40)).run_dir
    longer = resume_training(run, total_timesteps=64)
    # The first end was evaluated too; the rest is what an uninterrupted run has.
    curve = stored(longer)["curve"]
    assert [point["step"] for point in curve] == [16, 32, 40, 48, 64]
    assert [point for point in curve if point["step"] != 40] == stored(whole)["curve"]


def test_one_seed_has_no_summary(tmp_path: Path) -> None:
    result = train(tiny_config("sac", tmp_path, total_timesteps=16))
    assert not list(tmp_path.rglob(SUMMARY_FILE))
    assert "eval_return_iqm" not in result.metrics


def test_a_group_that_is_never_evaluated_has_a_summary_without_figures(tmp_path: Path) -> None:
    result = train(group_config(tmp_path, eval_episodes=0, total_timesteps=16))
    data = stored(result)
    assert set(data["final_return"].values()) == {None}
    assert (data["curve"], data["seeds"][0]["best_step"]) == ([], None)
    assert result.metrics["eval_return_iqm"] != result.metrics["eval_return_iqm"]
    summary = read_summary(result.run_dir)
    assert summary is not None
    assert printed(summary) == []


def test_only_evaluations_that_every_seed_has_are_in_the_curve(tmp_path: Path) -> None:
    logs = {0: {10: 1.0, 20: 2.0, 30: 3.0}, 1: {10: 5.0, 30: 7.0}, 2: {10: 6.0, 20: 0.0, 30: 5.0}}
    summary = fake_group(tmp_path, logs)
    assert [point.step for point in summary.curve] == [10, 30]
    assert summary.curve[0].iqm == pytest.approx((1 + 4 * 5 + 6) / 6)
    last = bootstrap_interval([3.0, 7.0, 5.0], interquartile_mean)
    assert (summary.curve[1].low, summary.curve[1].high) == last
    assert (summary.final_return.iqm_low, summary.final_return.iqm_high) == last


def test_the_best_step_is_the_first_of_equals_and_never_nan(tmp_path: Path) -> None:
    nan = float("nan")
    summary = fake_group(tmp_path, {0: {10: nan, 20: 4.0, 30: 4.0}, 1: {10: 1.0, 20: 2.0, 30: 1.0}})
    assert [(m.best_return, m.best_step) for m in summary.seeds] == [(4.0, 20), (2.0, 20)]
    assert summary.curve[0].iqm is None
    assert summary.curve[1].iqm == 3.0


def test_a_failed_write_leaves_the_old_summary_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fake_group(tmp_path, {0: {10: 1.0}, 1: {10: 2.0}})
    path = write_summary(tmp_path, first)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RLTrainingError, match=r"summary.json cannot be written \(No space left"):
        write_summary(tmp_path, first.model_copy(update={"num_seeds": 9}))
    assert path == tmp_path / SUMMARY_FILE
    assert read_summary(tmp_path) == first


def test_a_file_that_is_no_summary_is_one_sentence(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None
    (tmp_path / SUMMARY_FILE).write_text('{"num_seeds": 2}')
    with pytest.raises(DataError, match=r"summary\.json is not a summary of this version"):
        read_summary(tmp_path)


# What is printed and drawn


@pytest.mark.matrix
def test_the_command_line_prints_table_and_interquartile_mean(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, algo_kwargs={"eval_interval": 16}, total_timesteps=32)
    done = run_cli("train", "-c", path, "--seeds", "3,1")
    assert done.code == 0, done.err
    run = Path(done.values["run_dir"])
    assert done.values["summary"] == str(run / SUMMARY_FILE)
    summary = read_summary(run)
    assert summary is not None
    assert float(done.values["eval_return_iqm"]) == pytest.approx(
        summary.final_return.iqm, abs=1e-4
    )
    assert done.out.splitlines()[-4:] == printed(summary)[-4:]
    more = run_cli("resume", "--checkpoint", run, "--total-timesteps", "48")
    assert more.out.splitlines()[-1].startswith("IQM -")
    assert more.out.splitlines()[-1].endswith(" over 2 seeds")
    assert more.out != done.out


def test_one_seed_prints_no_interquartile_mean(tmp_path: Path) -> None:
    done = run_cli("train", "-c", write_tiny(tmp_path, total_timesteps=16))
    assert "IQM" not in done.out
    assert "summary=" not in done.out


def test_twelve_seeds_are_all_listed_in_their_order(tmp_path: Path) -> None:
    summary = fake_group(tmp_path, {s: {10: 500.0 - s, 20: 100.0 + s} for s in range(12)})
    lines = printed(summary)
    assert lines[:3] == [
        "",
        "seed  final return  best return  at step",
        "   0         100.0        500.0       10",
    ]
    assert [int(line.split()[0]) for line in lines[2:-1]] == list(range(12))
    assert lines[-1].startswith("IQM 105.5 [95% 10")
    assert lines[-1].endswith("] over 12 seeds")


def test_of_more_seeds_the_worst_and_best_three_are_listed(tmp_path: Path) -> None:
    summary = fake_group(tmp_path, {s: {1000: (s * 7 % 13) * 10.0} for s in range(13)})
    for width in (50, 80, 120):
        lines = printed(summary, width)
        assert [line.split()[1] for line in lines[2:5]] == ["0.0", "10.0", "20.0"]
        assert lines[5].split() == ["7", "between"]
        assert [line.split()[1] for line in lines[6:9]] == ["100.0", "110.0", "120.0"]
        assert lines[2].endswith("1,000")
        assert len(lines) == 10


def test_returns_of_a_few_units_have_more_decimals(tmp_path: Path) -> None:
    lines = printed(fake_group(tmp_path, {0: {10: 0.25}, 1: {10: 0.75}}))
    assert lines[-1] == "IQM 0.500 [95% 0.250, 0.750] over 2 seeds"


def test_the_picture_of_a_group_shows_the_band(
    whole: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = pytest.importorskip("matplotlib.axes").Axes
    bands: list[tuple[list[int], list[float], list[float]]] = []

    def fill_between(self: object, x: Any, low: Any, high: Any, **_: Any) -> None:
        bands.append((list(x), list(low), list(high)))

    monkeypatch.setattr(axes, "fill_between", fill_between)
    summary = read_summary(whole.run_dir)
    assert summary is not None
    members = [member.run_dir for member in whole.per_seed]
    picture = write_plots(tmp_path, members, summary.curves())
    assert picture is not None
    assert picture.stat().st_size > 10_000
    curve = stored(whole)["curve"]
    assert bands == [tuple([point[name] for point in curve] for name in ("step", "low", "high"))]
    bands.clear()
    write_plots(tmp_path, members[:1])
    assert bands == []

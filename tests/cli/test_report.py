"""The report page, the leaderboard and what they are made of."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from helpers.browser import ask_browser
from helpers.tiny import run_cli, tiny_config
from rl_training.errors import ConfigError, DataError
from rl_training.reporting.charts import (
    Cloud,
    Line,
    Size,
    inside,
    labels,
    line_chart,
    padded,
    scatter_file,
    ticks,
)
from rl_training.reporting.figures import curve, improvements, ranked, rows_of, thin
from rl_training.reporting.gather import gather, without_folders


def write_run(
    folder: Path, returns: dict[int, float], *, algo: str = "sac", seed: int = 0, **changes: Any
) -> Path:
    """A run's folder as training leaves it: description and log."""
    folder.mkdir(parents=True)
    config = tiny_config(algo, folder, seed=seed, **changes).to_yaml()
    (folder / "config.yaml").write_text(config)
    (folder / "run.json").write_text(
        json.dumps({"python": "3.11.0", "command": ["/x/rl-training", "train", "a b"]})
    )
    lines: list[dict[str, Any]] = [{"step": 0, "kind": "note", "text": "data <b>ends</b>"}]
    for step, value in returns.items():
        train = {"critic_loss": value / 7, "time/elapsed_seconds": step / 10}
        lines.append({"step": step, "kind": "train", **train})
        lines.append({"step": step, "kind": "eval", "eval_return_mean": value})
        lines.append({"step": step, "kind": "model", "holdout_error": 1 / step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with three seeds each on one task, one method on another."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1, 2):
        good = {step: step / 10 + seed for step in range(100, 1100, 100)}
        bad = {step: step / 20 + seed for step in range(100, 1100, 100)}
        write_run(folder / f"good{seed}", good, seed=seed)
        slow = {"learning_rate": 0.007}
        write_run(folder / "group" / f"seed_{seed}", bad, seed=seed, algo_kwargs=slow)
        write_run(folder / f"dqn{seed}", {50: 1.0, 100: 5.0 + seed}, algo="dqn", seed=seed)
    return folder


def test_a_link_in_a_run_puts_nothing_onto_the_page(tmp_path: Path) -> None:
    secret = base64.b64encode(b"nobody else may read this").decode()
    (outside := tmp_path / "outside").mkdir()
    (outside / "secret.gif").write_bytes(base64.b64decode(secret))
    for number in range(3):
        write_run(tmp_path / "runs" / f"r{number}", {100: 1.0}, seed=number)
    runs = tmp_path / "runs"
    (runs / "r0" / "leak.gif").symlink_to(outside / "secret.gif")
    (runs / "r1" / "videos").symlink_to(outside)
    os.mkfifo(runs / "r1" / "pipe.gif")
    (runs / "r2" / "run.json").unlink()
    (outside / "run.json").write_text(json.dumps({"python": "secret version"}))
    (runs / "r2" / "run.json").symlink_to(outside / "run.json")
    (runs / "r3").mkdir()
    (runs / "r3" / "config.yaml").write_text((runs / "r0" / "config.yaml").read_text())
    (runs / "r3" / "metrics.jsonl").symlink_to(runs / "r0" / "metrics.jsonl")
    page = tmp_path / "page.html"
    assert run_cli("report", runs, "--output", page).code == 0
    text = page.read_text()
    assert secret not in text
    assert "secret version" not in text
    assert [run.folder.name for run in gather([runs])[0].methods[0].runs] == ["r0", "r1", "r2"]
    (runs / "r0" / "leak.gif").unlink()
    (runs / "r0" / "own.gif").write_bytes(base64.b64decode(secret))  # a file of the run is shown
    assert run_cli("report", runs, "--output", page).code == 0
    assert secret in page.read_text()


# Gathering


def test_runs_that_differ_in_their_seed_alone_are_one_method(runs: Path) -> None:
    tasks = gather([runs])
    assert {task.name: len(task.methods) for task in tasks} == {"CartPole-v1": 1, "Pendulum-v1": 2}
    pendulum = next(task for task in tasks if task.name == "Pendulum-v1")
    assert {m.label for m in pendulum.methods} == {
        "sac · learning_rate 0.0003",
        "sac · learning_rate 0.007",
    }
    assert all([run.seed for run in m.runs] == [0, 1, 2] for m in pendulum.methods)
    assert list(pendulum.differences) == ["algo_kwargs.learning_rate"]


def test_a_run_given_twice_counts_once(runs: Path) -> None:
    (task,) = gather([runs / "good0", runs / "good0", runs / "good1"])
    assert len(task.methods[0].runs) == 2


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="holds no run"):
            gather([folder])


# Figures


def test_final_last_and_best_are_what_they_say(tmp_path: Path) -> None:
    returns = {step: float(step) for step in range(1, 101)} | {50: 500.0}
    write_run(tmp_path / "a", returns)
    (row,) = rows_of(gather([tmp_path])[0])
    assert row.final is not None
    assert row.last is not None
    assert row.best is not None
    assert (row.final.iqm, row.best.iqm) == (100.0, 500.0)
    assert row.last.iqm == pytest.approx(sum(range(90, 101)) / 11)
    assert (row.steps, row.seconds) == (100, 10.0)


def test_methods_are_ranked_and_compared(runs: Path) -> None:
    task = next(task for task in gather([runs]) if task.name == "Pendulum-v1")
    rows = ranked(task)
    assert [row.method.settings["algo_kwargs.learning_rate"] for row in rows] == [0.0003, 0.007]
    table = improvements(rows)
    assert table[0][0] is None
    assert table[0][1] is not None
    assert table[1][0] is not None
    assert (table[0][1].probability, table[1][0].probability) == (1.0, 0.0)
    with pytest.raises(DataError, match="final, last, best"):
        ranked(task, "mean")


def test_the_curve_of_seeds_is_their_interquartile_mean(runs: Path) -> None:
    task = next(task for task in gather([runs]) if task.name == "Pendulum-v1")
    good = next(m for m in task.methods if m.settings["algo_kwargs.learning_rate"] == 0.0003)
    assert [(p.step, p.iqm) for p in curve(good)][:2] == [(100, 11.0), (200, 21.0)]


def test_thinning_keeps_both_ends() -> None:
    steps = list(range(0, 10_000, 7))
    thinned = thin(steps)
    assert (thinned[0], thinned[-1]) == (steps[0], steps[-1])
    assert len(thinned) == 160
    assert thin([1, 2]) == [1, 2]


# Charts


RANGES = [(0, 1), (-1700.3, -120.0), (3.0, 3.0), (0.0, 0.0), (1e-6, 4e-6), (-5, 1e7), (7e3, 2e4)]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_ticks_are_round_and_enclose(low: float, high: float) -> None:
    marks = ticks(low, high, 5)
    assert marks[0] <= low
    assert marks[-1] >= high
    assert 2 <= len(marks) <= 8
    assert len(set(labels(marks))) == len(marks)


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_an_axis_fits_its_data_and_has_marks(low: float, high: float) -> None:
    start, end = padded([low, high])
    assert start < low <= high < end
    assert end - start <= max(1.1 * (high - low), abs(low) * 0.21, 1.0)
    marks = inside(ticks(start, end, 5), start, end)
    assert len(marks) >= 2
    assert all(start <= mark <= end for mark in marks)


def test_the_figures_of_an_axis_have_one_unit_and_equally_many_decimals() -> None:
    assert labels([0, 2500, 5000, 7500, 10_000]) == ["0", "2.5k", "5.0k", "7.5k", "10.0k"]
    assert labels([0, 500, 2500]) == ["0", "500", "2,500"]
    assert labels([500_000, 1e6, 1.5e6]) == ["0.5M", "1.0M", "1.5M"]
    assert labels([0.0, 2.5e-4, 5e-4, 7.5e-4]) == ["0", "2.5e-4", "5e-4", "7.5e-4"]
    assert labels([-0.25, 0.0, 0.25]) == ["-0.25", "0", "0.25"]


def test_a_curve_stays_inside_its_drawing() -> None:
    points = tuple((float(x), (-3.0) ** x) for x in range(9))
    size = Size(width=300, height=200)
    drawing = line_chart([Line(label='a"<', number=9, points=points)], size, "t")
    (path,) = re.findall(r'class="curve c1" stroke-dasharray="6 4" d="M([^"]+)"', drawing)
    places = [tuple(map(float, pair.split())) for pair in path.split("L")]
    assert all(size.left <= x <= 300 - size.right for x, _ in places)
    assert all(size.top <= y <= 200 - size.bottom for _, y in places)
    assert 'a"<' not in drawing


# The page


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (runs / "good2" / "videos").mkdir()
    (runs / "good2" / "videos" / "video.gif").write_bytes(b"GIF89a" + bytes(20))
    (runs / "good1" / "videos").mkdir()
    (runs / "good1" / "videos" / "model_step_7.gif").write_bytes(b"GIF89a" + bytes(20))
    target = tmp_path_factory.mktemp("page") / "new" / "report.html"
    done = run_cli("report", runs, "-o", target, "--title", "Three <seeds>")
    assert (done.code, done.values["report"]) == (0, str(target)), done.err
    return target


def test_the_page_is_whole_and_asks_nothing_of_the_network(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    assert not re.search(r"https?://", text)
    assert "Three &lt;seeds&gt;" in text
    assert "data &lt;b&gt;ends&lt;/b&gt;" in text
    for part in ("Probability of improvement", "Settings that differ", "Model health", "3.11.0"):
        assert part in text
    assert text.count("data:image/gif;base64,R0lGODlh") == 2
    assert ": seed 2, video.gif" in text
    parts = "real, reconstructed, predicted without looking, prediction less real"
    assert f": world model ({parts}), seed 1, model_step_7.gif" in text
    assert "<pre>rl-training train &#39;a b&#39;</pre>" in text


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (390, False), (1100, True)])
def test_a_browser_shows_the_page(page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen = ask_browser(page, tmp_path, width, dark=dark)
    assert seen["errors"] == []
    assert seen["width"] == width
    assert seen["overflow"] <= 0
    assert seen["wide"] == []
    assert seen["charts"] >= 4
    assert seen["curves"] >= 6
    assert min(seen["lengths"]) > 50, "every curve has been drawn"
    assert seen["tip"].startswith("step ")
    light = int(re.findall(r"\d+", seen["background"])[0])
    assert (light < 60) is dark


@pytest.fixture(scope="module")
def asked(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the last chart of a task shows after each thing that a reader may do."""
    folder = tmp_path_factory.mktemp("asked")
    run_cli("report", runs / "good0", runs / "good1", runs / "group", "-o", folder / "page.html")
    seen = ask_browser(folder / "page.html", folder, 1100)
    assert seen["errors"] == []
    found: dict[str, Any] = seen["asked"]
    return found


def numbers_of(curves: list[str]) -> list[list[float]]:
    return [[float(x) for x in re.findall(r"[-\d.]+", curve)] for curve in curves]


def test_a_chart_drawn_again_is_the_one_of_the_file(asked: dict[str, Any]) -> None:
    for name in ("back", "whole", "twice"):
        assert asked[name]["texts"] == asked["first"]["texts"]
        drawn, first = numbers_of(asked[name]["curves"]), numbers_of(asked["first"]["curves"])
        assert [len(c) for c in drawn] == [len(c) for c in first]
        for ours, theirs in zip(drawn, first, strict=True):
            assert ours == pytest.approx(theirs, abs=0.02)


def test_a_method_is_hidden_and_shown_and_the_axis_follows(asked: dict[str, Any]) -> None:
    first, hidden = asked["first"], asked["hidden"]
    assert (len(first["curves"]), len(hidden["curves"])) == (2, 1)
    assert hidden["texts"] != first["texts"], "the limits fit what is left"


def test_steps_or_wall_time_are_across(asked: dict[str, Any]) -> None:
    assert "step" in asked["first"]["texts"]
    assert "s" in asked["time"]["texts"], "a tenth of a second per step"
    assert "step" not in asked["time"]["texts"]
    assert re.match(r"[\d.]+ s", asked["timeTip"])


def test_an_axis_may_be_logarithmic(asked: dict[str, Any]) -> None:
    (first, *_), (up, *_), (across, *_) = (
        numbers_of(asked[name]["curves"]) for name in ("first", "logY", "logX")
    )
    assert up[::2] == first[::2]
    assert across[1::2] == pytest.approx(first[1::2], abs=0.02)
    # Returns and steps grow evenly, so on a logarithmic axis every step is smaller.
    gaps = [b - a for a, b in zip(across[::2], across[2::2], strict=False)]
    assert gaps == sorted(gaps, reverse=True)
    rises = [a - b for a, b in zip(up[1::2], up[3::2], strict=False)]
    assert rises == sorted(rises, reverse=True)


def test_a_part_of_the_range_is_looked_at(asked: dict[str, Any]) -> None:
    assert [asked[name]["shown"] for name in ("first", "zoomed", "whole")] == [False, True, False]
    first, zoomed = (numbers_of(asked[name]["curves"])[0][::2] for name in ("first", "zoomed"))
    width, part = first[-1] - first[0], zoomed[-1] - zoomed[0]
    assert part > 3 * width, "a fifth of the drawing has its whole width"
    assert asked["zoomed"]["texts"] != asked["first"]["texts"]


def test_no_folder_of_this_machine_is_on_the_page(runs: Path, tmp_path: Path) -> None:
    data = {"dataset_kind": "npz", "dataset_path": str(tmp_path / "lost" / "rows.npz")}
    write_run(tmp_path / "runs" / "a", {10: -900.0}, algo="iql", algo_kwargs=data)
    described = {"command": ["/x/rl-training", "train", "--config", str(tmp_path / "own.yaml")]}
    (tmp_path / "runs" / "a" / "run.json").write_text(json.dumps(described | {"device": "A100"}))
    target = tmp_path / "report.html"
    assert run_cli("report", runs, tmp_path / "runs", "-o", target).code == 0
    text = target.read_text()
    assert str(tmp_path) not in text
    assert str(runs) not in text
    assert "…/own.yaml" in text
    assert "<dd>A100</dd>" in text
    assert f"<code>{runs.name}/group/seed_1</code>" in text or "/group/seed_1</code>" in text


def test_texts_lose_the_folders_of_absolute_paths_alone() -> None:
    for given, left in (
        ("rows of /home/me/data/x.npz are short", "rows of …/x.npz are short"),
        ("output_dir=/tmp/a/b", "output_dir=…/b"),
        ("ppo/cartpole and ALE/Pong-v5", "ppo/cartpole and ALE/Pong-v5"),
        ("hf://user/name, 3/4 of it", "hf://user/name, 3/4 of it"),
        ("runs/a/b stays", "runs/a/b stays"),
    ):
        assert without_folders(given) == left


def test_a_video_too_large_for_the_page_is_linked_from_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.reporting.page.MOST_VIDEO_BYTES", 10)
    run = write_run(tmp_path / "runs" / "a", {10: 1.0})
    (run / "large video.gif").write_bytes(b"GIF89a" + bytes(20))
    target = tmp_path / "pages" / "report.html"
    assert run_cli("report", tmp_path / "runs", "-o", target).code == 0
    assert 'href="../runs/a/large%20video.gif"' in target.read_text()


def test_the_clock_of_a_run_that_was_taken_up_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {})
    times = {100: 5.0, 200: 9.0, 300: 2.0, 400: 6.0}
    lines = [{"step": s, "kind": "train", "time/elapsed_seconds": t} for s, t in times.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (task,) = gather([tmp_path])
    assert task.methods[0].runs[0].clock == {100: 5.0, 200: 9.0, 300: 11.0, 400: 15.0}
    assert rows_of(task)[0].seconds == 15.0


def test_the_browser_check_can_fail(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    wide = '<div style="width:3000px">x</div><script>nothing.there()</script></body>'
    picture = '<img src="http://127.0.0.1:9/x.png">'
    broken.write_text(page.read_text().replace("</body>", picture + wide, 1))
    seen = ask_browser(broken, tmp_path, 1100)
    assert seen["overflow"] > 0
    assert any("nothing is not defined" in error for error in seen["errors"])
    assert any("refused" in error for error in seen["errors"])


def test_a_run_without_evaluations_is_shown_too(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", {})
    target = tmp_path / "report.html"
    assert run_cli("report", tmp_path / "runs", "-o", target).code == 0
    assert "No evaluations were logged" in target.read_text()


def test_the_data_of_offline_runs_is_drawn_beside_what_was_reached(tmp_path: Path) -> None:
    collected = tmp_path / "pendulum.npz"
    options = ["--env", "Pendulum-v1", "--steps", 1000]
    assert run_cli("data", "collect", collected, *options).code == 0
    for name, place in (("a", collected), ("b", tmp_path / "lost.npz")):
        data = {"dataset_kind": "npz", "dataset_path": str(place)}
        write_run(tmp_path / "runs" / name, {10: -900.0}, algo="iql", algo_kwargs=data)
    target = tmp_path / "report.html"
    assert run_cli("report", tmp_path / "runs", "-o", target).code == 0
    text = target.read_text()
    assert "1,000 transitions, 5 episodes" in text
    (drawing,) = re.findall(r'aria-label="Returns of the episodes.*?</svg>', text, re.DOTALL)
    assert drawing.count('class="bin"') >= 2
    assert drawing.count('class="curve') == 1, "the method with other data has no line here"
    assert "lost.npz is not shown:" in text


# The command line


def test_the_leaderboard_ranks_methods(runs: Path) -> None:
    done = run_cli("leaderboard", runs)
    assert done.code == 0
    assert done.out.index("learning_rate 0.0003") < done.out.index("learning_rate 0.007")
    facts = json.loads(run_cli("leaderboard", runs, "--by", "best", "--json").out)
    pendulum = next(board for board in facts if board["task"] == "Pendulum-v1")
    assert [m["final"]["iqm"] for m in pendulum["methods"]] == [101.0, 51.0]
    assert pendulum["methods"][0]["final"]["values"] == [100.0, 101.0, 102.0]


@pytest.mark.parametrize("command", ["report", "leaderboard"])
def test_bad_folders_are_one_sentence(command: str, runs: Path, tmp_path: Path) -> None:
    assert "holds no run" in run_cli(command, tmp_path / "nowhere").sentence()
    broken = tmp_path / "broken"
    write_run(broken, {1: 2.0})
    (broken / "config.yaml").write_text(yaml.safe_dump({"algo": "sac"}))
    assert "has no env_id" in run_cli(command, broken).sentence()
    (broken / "config.yaml").write_text("a: [")
    assert "config.yaml" in run_cli(command, broken).sentence()


def test_a_page_that_cannot_be_written_is_one_sentence(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sentence = run_cli("report", runs, "-o", tmp_path / "file" / "x.html").sentence()
    assert "cannot be written" in sentence
    assert "by final, last, best" in run_cli("leaderboard", runs, "--by", "x").sentence()


# Files of the wrong shape

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**30, -1e308, 1e308, "", "text", "nan", "1e999", "[/b]", "[bold]"),
    *([], [1], [None], [[]], {}, {"a": 1}, {"a": {"b": []}}, {"kind": "eval"}),
)
HUGE = "1" * 500
LINE = {"step": 7, "kind": "train", "critic_loss": 1.0}
LOGS = (
    *(json.dumps(value) for value in VALUES),
    *(
        json.dumps(LINE | {key: value})
        for key in ("step", "kind", "critic_loss")
        for value in VALUES
    ),
    *(json.dumps(LINE | {"time/elapsed_seconds": value}) for value in VALUES),
    *(json.dumps({"step": 7, "kind": "eval", "eval_return_mean": value}) for value in VALUES),
    *(json.dumps({"step": 7, "kind": "note", "text": value}) for value in VALUES),
    *(f'{{"step": {n}, "kind": "eval", "eval_return_mean": {n}}}' for n in (HUGE, "NaN", "1e999")),
    *(f'{{"step": 7, "kind": "train", "critic_loss": {n}}}' for n in (HUGE, "NaN", "1e999")),
    '{"kind": "note"}',
    '{"step": 7}',
    "[" * 100_000,
    "\x00\x1b[2J",
)
SYSTEMS = (
    *(json.dumps(value) for value in VALUES),
    *(
        json.dumps({key: value})
        for key in ("packages", "git", "command", "python", "processors", "rl_training")
        for value in VALUES
    ),
    *(json.dumps({"git": {"commit": value, "dirty": value}}) for value in VALUES),
    *("", "{", "[" * 100_000, "1" * 5000),
)
CONFIGS = tuple(
    {key: value}
    for key in (
        *("algo", "env_id", "env_kwargs", "algo_kwargs", "seed", "device", "total_timesteps"),
        *("tags", "grid", "no_such_key", "[/b]"),
    )
    for value in VALUES[::2]
) + tuple(
    {"algo_kwargs": {"dataset_kind": "npz", key: value}}
    for key in ("learning_rate", "dataset_kind", "dataset_path", "dataset_id")
    for value in VALUES[::2]
)


def wrong_run(folder: Path, source: Path, seed: int, **texts: str) -> Path:
    """A copy of a run with other texts in its files."""
    folder.mkdir(parents=True)
    for name in ("config.yaml", "run.json", "metrics.jsonl"):
        text = texts.get(name.split(".")[0], (source / name).read_text())
        (folder / name).write_text(text.replace("\nseed: 0\n", f"\nseed: {seed}\n"))
    return folder


def refused(command: str, folder: Path) -> str | None:
    """What a command says when it refuses a folder; None when it does not."""
    page = ["-o", folder.parent / "page.html"] if command == "report" else []
    done = run_cli(command, folder, *page)
    return None if done.code == 0 else done.sentence()


@pytest.mark.matrix
def test_files_of_the_wrong_shape_are_left_out_or_named(tmp_path: Path) -> None:
    good = write_run(tmp_path / "source", {1: 1.0, 2: 2.0})
    described = {"algo": "sac", "env_id": "Pendulum-v1", "seed": 0, "algo_kwargs": {}}
    (good / "config.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
    log = (good / "metrics.jsonl").read_text()
    # Logs and descriptions of systems never stop anything.
    for number, shape in enumerate(SYSTEMS):
        wrong_run(tmp_path / "systems" / str(number), good, number, run=shape)
    wrong_run(tmp_path / "lines" / "a", good, 0)
    wrong_run(tmp_path / "lines" / "b", good, 1, metrics=log + "\n".join(LOGS))
    for number, shape in enumerate(LOGS):
        wrong_run(tmp_path / "logs" / str(number), good, number, metrics=log + shape)
    # A configuration that describes no run is named; all others are compared, a few at a time.
    named: list[str] = []
    for number, shape in enumerate(CONFIGS):
        batch = tmp_path / f"configs{number // 12}"
        run = wrong_run(batch / str(number), good, 0, config=yaml.safe_dump(described | shape))
        try:
            gather([run])
        except ConfigError as error:
            named.append(str(error))
            assert str(run / "config.yaml") in named[-1]
            shutil.move(run, tmp_path / "refused" / str(number))
    assert len(named) > 30
    batches = [path for path in tmp_path.glob("configs*") if any(path.iterdir())]
    for command in ("leaderboard", "report"):
        for folder in (*batches, *(tmp_path / name for name in ("systems", "lines", "logs"))):
            assert refused(command, folder) is None, folder
        assert "describes no run" in str(refused(command, tmp_path / "refused"))


def test_points_are_drawn_beside_the_line_of_equal_figures() -> None:
    cloud = Cloud(label="a<b", number=0, points=((0.0, 0.0), (10.0, 10.0), (10.0, 0.0)))
    drawing = scatter_file([cloud], Size(width=300, height=300), "t", across="x", up="y")
    root = ElementTree.fromstring(drawing)
    places = [
        (float(e.attrib["cx"]), float(e.attrib["cy"])) for e in root.iter() if "cx" in e.attrib
    ]
    low, high, right = places[:3]
    (line,) = (e.attrib["d"] for e in root.iter() if "stroke-dasharray" in e.attrib)
    ends = [tuple(map(float, end.split())) for end in line[1:].split("L")]
    slope = (ends[1][1] - ends[0][1]) / (ends[1][0] - ends[0][0])
    for x, y in (low, high):
        assert abs(ends[0][1] + slope * (x - ends[0][0]) - y) < 0.5, "equal figures are on the line"
    assert right == (high[0], low[1])
    assert "a&lt;b" in drawing

"""The benchmark itself: rows, judgements, table, JSON and the line to its workers.

Nothing here looks at how fast anything is.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.__main__ import main, make_parser, parse, report
from bench.speed.compare import PEER_PACKAGES, find_peer, measure
from bench.speed.figures import Figure
from bench.speed.memory import peak_bytes, smallest_presets
from bench.speed.options import BenchError, Options
from bench.speed.ours import dqn
from bench.speed.pace import Pace, WorkSettings
from bench.speed.rows import ALGOS, ROWS, Bar, names_of
from bench.speed.table import WIDTH, format_failure, format_figure, header
from bench.speed.timers import Timers
from bench.speed.whole_runs import RUNS, WATCHED

from helpers.tiny import ROOT
from rl_training.experiment.config import load_config
from rl_training.experiment.registry import algorithm_names

TINY = replace(ROWS["sac"], ours=("off",), chunk=1, peers=())
ONE_REPEAT = Options(repeats=1)


def figure(**changes: Any) -> Figure:
    values: dict[str, Any] = {
        "row": "sac",
        "label": "sac",
        "unit": "gradient steps/s",
        "samples": {"off": [90, 100, 500], "compile": [150, 160, 155], "sb3": [80.0, 70.0, 75.0]},
        "bar": Bar("ratio", 1.5),
    }
    return Figure(**values | changes)


# Declarations


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_a_row_names_work_that_exists_on_every_side(row: Any) -> None:
    assert callable(importlib.import_module(f"bench.speed.{row.measure}").measure)
    if row.work:
        assert callable(getattr(importlib.import_module("bench.speed.ours"), row.work))
    for peer in row.peers:
        tree = ast.parse((ROOT / f"bench/peers/{peer}.py").read_text())
        assert row.work in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def test_rows_with_a_peer_are_held_to_a_ratio_and_the_others_are_not() -> None:
    for row in ROWS.values():
        kinds = {bar.kind for bar in (row.bar, *row.bars.values()) if bar is not None}
        beside_our_own = row.name in ("gpu-dreamer", "gpu-actors")
        assert ("ratio" in kinds) == (bool(row.peers) or beside_our_own)


def test_methods_whose_time_is_taken_are_there() -> None:
    for owner, name, _ in WATCHED:
        assert callable(getattr(owner, name))


def test_every_algorithm_has_a_preset_to_measure_the_memory_of() -> None:
    presets = smallest_presets()
    assert tuple(presets) == algorithm_names()
    assert presets["sac"] == "sac/pendulum"


# Judgements


def test_ours_is_the_compiled_median_and_the_ratio_is_to_the_fastest_peer() -> None:
    samples = {"off": [100.0], "compile": [150, 160, 155], "sb3": [80.0], "axiomrl": [100.0]}
    made = figure(samples=samples)
    assert (made.ours, made.eager, made.fastest_peer) == (155, 100.0, "axiomrl")
    assert made.ratio == pytest.approx(1.55)
    assert made.met is True


@pytest.mark.parametrize(
    ("bar", "expected"),
    [
        (Bar("ratio", 2.0), True),
        (Bar("ratio", 2.1), False),
        (Bar("at least", 155), True),
        (Bar("at least", 156), False),
        (Bar("at most", 155), True),
        (Bar("at most", 154), False),
        (None, None),
    ],
)
def test_a_bar_is_met_from_its_value_on(bar: Bar | None, expected: bool | None) -> None:
    assert figure(samples={"compile": [155], "sb3": [77.5]}, bar=bar).met is expected


def test_a_ratio_without_a_peer_is_not_judged() -> None:
    made = figure(samples={"compile": [155]})
    assert made.ratio is None
    assert made.met is None


# Table and JSON


def test_lines_fit_a_terminal_of_100_columns() -> None:
    wide = figure(
        label="gpu-td3_bc 128 bf16",
        samples={"off": [1234567.0], "graph": [1234567.0], "axiomrl": [1234567.0], "sb3": [0.01]},
        bar=Bar("at least", 95_000),
        notes=("a sentence that is much longer than a line of the terminal can hold " * 2,),
    )
    lines = f"{header()}\n{format_figure(wide)}\n{format_failure('sac', 'why ' * 50)}".splitlines()
    assert max(map(len, lines)) <= WIDTH == 100


def test_a_line_says_ours_peer_ratio_bar_and_whether_it_is_met() -> None:
    words = " ".join(format_figure(figure()).split())
    assert words == "sac gradient steps/s 155.0 100.0 sb3 75 2.07x 1.5x yes"


def test_a_figure_without_samples_says_that_it_failed() -> None:
    assert "failed" in format_figure(figure(samples={}))


def test_the_report_survives_json() -> None:
    machine = {"processor": "p", "threads": 1}
    data = json.loads(json.dumps(report(machine, [figure()])))
    assert data["machine"] == machine
    (read,) = data["figures"]
    assert read["samples"]["off"] == [90, 100, 500]
    assert read["medians"] == {"off": 100, "compile": 155, "sb3": 75.0}
    assert (read["fastest_peer"], read["met"]) == ("sb3", True)
    assert read["ratio"] == pytest.approx(155 / 75)


# Command line

LOOPS = [name for name in ROWS if name.startswith("loop-") and ROWS[name].group == "gpu"]


def test_every_whole_run_of_an_accelerator_says_what_it_trains() -> None:
    assert LOOPS
    assert set(RUNS) == set(LOOPS)
    for run in RUNS.values():
        config = load_config(run.preset, run.overrides, {"total_timesteps": run.steps})
        assert config.total_timesteps == run.steps


def test_without_rows_all_of_the_cpu_are_measured_and_groups_can_be_named() -> None:
    assert parse([])[0] == names_of("cpu")
    assert parse(["sac", "gpu", "sac"])[0] == [
        "sac",
        "gpu-sac",
        "gpu-update",
        "gpu-actors",
        "gpu-pets",
        "gpu-dreamer",
        "gpu-seeds",
        *LOOPS,
    ]
    assert {*names_of("cpu"), *names_of("gpu")} == set(ROWS)


def test_a_peer_that_is_a_folder_is_found_where_it_is_said_to_be(tmp_path: Path) -> None:
    options = parse(["dreamer", "--peer-path", f"dreamerv3_torch={tmp_path}"])[1]
    assert options.paths == {"dreamerv3_torch": str(tmp_path.resolve())}
    assert find_peer("dreamerv3_torch", options) == sys.executable
    assert find_peer("dreamerv3_torch", Options()) is None


def test_peers_are_given_by_name() -> None:
    options = parse(["--peer", "sb3=/a/python", "--peer", "d3rlpy=/b/python"])[1]
    assert options.peers == {"sb3": "/a/python", "d3rlpy": "/b/python"}


@pytest.mark.parametrize(
    "wrong",
    [
        ["--peer", "sb4=/a"],
        ["--peer-path", "sb3=/"],
        ["--peer-path", "dreamerv3_torch=/no/such"],
        ["--peer", "/a"],
        ["sak"],
        ["--repeats", "0"],
        ["--algo", "sac,ppo"],
    ],
)
def test_mistakes_on_the_command_line_are_named(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert wrong[-1] in capsys.readouterr().err


def test_help_explains_every_row() -> None:
    text = make_parser().format_help()
    for row in ROWS.values():
        assert row.name in text
        assert row.what[:30] in text


def test_commands_of_the_docs_parse() -> None:
    found = 0
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for line in page.read_text().replace("\\\n", " ").splitlines():
            if "python -m bench " in line and "`" not in line and "--help" not in line:
                parse(shlex.split(line.partition("python -m bench ")[2], comments=True))
                found += 1
    assert found >= 5


# Workers


@pytest.mark.matrix
def test_a_worker_times_what_it_is_asked_and_an_absent_peer_is_skipped() -> None:
    absent = next(name for name, package in PEER_PACKAGES.items() if _absent(package))
    row = replace(TINY, peers=(absent,))
    options = Options(repeats=2, peers={absent: sys.executable})
    (made,) = measure(row, options)
    assert set(made.samples) == {"off"}
    assert len(made.samples["off"]) == 2
    assert min(made.samples["off"]) > 0
    assert any(f"skipped {absent}" in n and "is not installed" in n for n in made.notes)


def _absent(package: str) -> bool:
    return importlib.util.find_spec(package) is None


@pytest.mark.matrix
def test_a_side_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match=r"off: AttributeError: .*no_such_work"):
        list(measure(replace(TINY, work="no_such_work"), ONE_REPEAT))


def test_an_endless_run_goes_chunk_by_chunk_and_ends_with_the_requests() -> None:
    answers = io.StringIO()
    dqn(Pace(WorkSettings(chunk=20), io.StringIO("go\n" * 3), answers))
    ready, *figures = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert ready["ready"]["compile_seconds"] == 0
    assert len(figures) == 3
    assert all(one["figure"] > 0 for one in figures)


class Work:
    """Something to take the time of, with a clock of its own."""

    now = 0

    def outer(self) -> None:
        Work.now += 2
        self.inner()

    def inner(self) -> None:
        Work.now += 5


def test_time_is_charged_once_and_methods_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.speed.timers.time.perf_counter", lambda: Work.now)
    before, timers = Work.outer, Timers()
    with timers.watching([(Work, "outer", "outer"), (Work, "inner", "inner")]):
        Work().outer()
        Work.now += 1
    assert Work.outer is before
    assert timers.seconds == {"outer": 2, "inner": 5, "other": 1}


def test_the_peak_is_of_the_process_alone_and_includes_what_it_has_freed() -> None:
    code = (
        "from bench.speed.memory import peak_bytes\n"
        "before = peak_bytes()\n"
        "held = b'x' * 50_000_000\n"
        "del held\n"
        "print(before, peak_bytes())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert 40_000_000 < after - before < 100_000_000
    assert before < peak_bytes() / 2, "torch, which this process holds, was charged to its child"


# Accelerator rows, on the CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_accelerator_rows_say_in_a_sentence_that_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", "--json", str(tmp_path / "out.json")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "gpu-sac needs a CUDA device and PyTorch sees none here" in said
    assert "gpu-seeds needs a CUDA device" in said


ON_CPU = Options(device="cpu", accelerate="off", repeats=1, seeds=(2,), seconds=0.01, steps=502)


@pytest.mark.matrix
def test_updates_of_several_seeds_are_counted_per_seed() -> None:
    module = importlib.import_module("bench.speed.gpu_updates")
    (made,) = module.measure(ROWS["gpu-sac"], replace(ON_CPU, precisions=("fp32", "tf32")))
    assert (made.unit, made.bar, made.label) == ("seed-steps/s", None, "gpu-sac 2 fp32")
    (rate,) = made.extra["gradient_steps_per_second"]
    assert made.ours == pytest.approx(2 * rate)


@pytest.mark.matrix
def test_the_algorithm_of_updates_is_chosen_and_gpu_sac_stays_sac() -> None:
    module = importlib.import_module("bench.speed.gpu_updates")
    options = replace(ON_CPU, precisions=("fp32",), algos=("td3_bc",))
    (made,) = module.measure(ROWS["gpu-update"], options)
    assert (made.label, made.extra["algo"]) == ("gpu-td3_bc 2 fp32", "td3_bc")
    assert made.ours is not None
    assert made.ours > 0
    works = list(module._works(ROWS["gpu-sac"], replace(options, seeds=None)))
    assert [(work.algo, work.count) for work in works] == [("sac", 1), ("sac", 32), ("sac", 128)]


@pytest.mark.matrix
def test_variants_of_sac_are_compared_with_it() -> None:
    module = importlib.import_module("bench.speed.gpu_updates")
    row = replace(ROWS["gpu-actors"], algos=("sac", "crossq"))
    sac, crossq = module.measure(row, replace(ON_CPU, precisions=("fp32",)))
    assert set(crossq.samples) == {*sac.samples, "sac"}
    assert crossq.ratio == pytest.approx(crossq.ours / sac.ours)


def test_bars_of_updates_are_of_lines_that_the_row_has() -> None:
    module = importlib.import_module("bench.speed.gpu_updates")
    for name, algos in (("gpu-sac", None), ("gpu-update", ALGOS), ("gpu-actors", None)):
        works = module._works(ROWS[name], replace(ON_CPU, seeds=None, algos=algos))
        assert set(ROWS[name].bars) <= {work.bar_name for work in works}


@pytest.mark.matrix
def test_the_time_of_a_run_is_split_and_adds_up() -> None:
    module = importlib.import_module("bench.speed.whole_runs")
    (made,) = module.measure(ROWS["gpu-seeds"], replace(ON_CPU, steps=1_100))
    assert sum(made.extra["shares"].values()) == pytest.approx(1)
    assert {"environments", "acting", "updates", "waiting for actions"} <= set(made.extra["shares"])
    assert made.ours is not None
    assert 0 < made.ours < made.extra["environments_alone"]

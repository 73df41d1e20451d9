"""The suite at benchmark scale: cells, records, cuts, and the page that is rendered from them."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from xml.etree import ElementTree

import bench.evidence.suite as suite
import bench.evidence.suite_page as suite_page
import pytest
from bench.evidence.__main__ import main
from bench.evidence.cells import LAST, RETURN, SUITE, Cell
from bench.evidence.jobs import STOPPED
from bench.evidence.rows import Row, read, write_rows
from bench.evidence.suite import COLUMNS, PACE, SECONDS, Record
from bench.evidence.suite_page import render, section
from bench.evidence.training import FINAL_FILE, Job

from helpers.tiny import ROOT, tiny_config
from rl_training.experiment.config import load_config
from rl_training.experiment.zoo import read_zoo
from rl_training.resources import preset_names

CELL = Cell(suite="mujoco", preset="sac/hopper", steps=100, seeds=(7, 8))
OTHER = Cell(suite="mujoco", preset="td3/hopper", steps=100, seeds=(7, 8))
FACTS = {
    "settings": ["device=cpu"],
    "machine": {"device": "cpu", "torch": "2"},
    "command": "python",
}
PUBLISHED = """method,task,step,metric,mean,std,seeds,source
random,Hopper-v5,,return,0,,,measured
sac,Hopper-v4,100,return,200,20,10,paper
sac,Hopper-v4,50,return,100,20,10,paper
crossq,Hopper-v4,100,return,250,,10,paper
"""


def row(seed: int, step: int, value: float, metric: str = RETURN, method: str = "sac") -> Row:
    numbers = (str(seed), str(step), metric, f"{value:.3f}")
    return dict(zip(COLUMNS, (method, "Hopper-v5", *numbers), strict=True))


def whole(*finals: float, method: str = "sac") -> list[Row]:
    """Rows of seeds 7, 8, ... that did all steps."""
    return [
        each
        for seed, final in enumerate(finals, 7)
        for each in (
            row(seed, 50, final / 2, method=method),
            row(seed, 100, final, method=method),
            row(seed, 100, final + 1, LAST, method),
            row(seed, 100, 90.0, SECONDS, method),
            row(seed, 100, 2.5, PACE, method),
        )
    ]


# Cells


def test_every_cell_but_those_of_presets_to_come_can_be_configured() -> None:
    missing = {cell.preset for cell in SUITE} - set(preset_names())
    assert {preset.partition("/")[0] for preset in missing} <= {"ppo"}
    assert len({cell.slug for cell in SUITE}) == len(SUITE)
    for cell in SUITE:
        if cell.preset not in missing:
            settings = cell.all_settings(Path("sets"))
            config = load_config(cell.preset, settings, {"seeds": list(cell.seeds)})
            assert config.algo == cell.method
            path = str(Path("sets") / cell.data) if cell.data else None
            assert config.algo_kwargs.get("dataset_path") == path
            assert not set(cell.seeds) & set(range(2000)), "seeds that chose no setting"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "sca"], "--methods sca: not in the suite mujoco.*did you mean sac"),
        (["--tasks", "pong"], "--tasks pong: not in the suite mujoco .allowed: ant, ant_v4, half"),
        (["--jobs", "0"], "--jobs must be above 0, got 0"),
        (["--minutes", "-1"], "--minutes must be above 0, got -1"),
        (["--steps", "10"], "--steps 10 makes this a try, .* with --out"),
        (["--episodes", "5"], "--episodes 5 makes this a try"),
        (["--set", "learning_rate=1"], "--set learning_rate=1 makes this a try"),
        (["--seeds", "3..1"], "--seeds must look like"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--suite", "mujoco", *words, "--list"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.search(message, err), err


def test_the_list_says_how_far_each_cell_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Cell(suite="mujoco", preset="sac/swimmer", steps=9, seeds=(1,))
    monkeypatch.setattr(suite, "SUITE", (CELL, OTHER, absent))
    Record(tmp_path, CELL).add(whole(10.0, 20.0), FACTS)
    Record(tmp_path, OTHER).add([*whole(3.0, method="td3"), row(8, 40, 1.0)], FACTS)
    assert main(["--suite", "mujoco", "--list", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sac-hopper: whole, seeds 7..8, 100 steps",
        "td3-hopper: 1 of 2 seeds whole, the others at 40 of 100 steps",
        "sac-swimmer: 0 of 1 seeds whole, the others at 0 of 9 steps; there is no preset "
        "sac/swimmer",
    ]


# Records


def test_records_make_the_round_trip(tmp_path: Path) -> None:
    rows = whole(10.0, -20.5)
    Record(tmp_path, CELL).add(rows, FACTS)
    again = Record(tmp_path, CELL)
    assert again.rows == rows == read(tmp_path / "sac-hopper.csv")
    assert again.facts == FACTS
    assert (tmp_path / "sac-hopper.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sac-hopper.csv", "sac-hopper.json"]


def test_a_seed_is_replaced_by_one_that_went_as_far_and_by_no_other(tmp_path: Path) -> None:
    Record(tmp_path, CELL).add([row(7, 40, 1.0), row(8, 40, 2.0)], FACTS)
    Record(tmp_path, CELL).add([row(7, 30, 9.0), row(8, 60, 3.0), row(9, 10, 4.0)], FACTS)
    values = [(r["seed"], r["step"], r["value"]) for r in Record(tmp_path, CELL).rows]
    assert values == [("7", "40", "1.000"), ("8", "60", "3.000"), ("9", "10", "4.000")]
    # What was evaluated at the end stays, whatever a later try of more steps says.
    Record(tmp_path, CELL).add(whole(5.0), FACTS)
    Record(tmp_path, CELL).add([row(7, 200, 9.0)], FACTS)
    assert Record(tmp_path, CELL).reached(7, 100).done


def test_other_settings_and_foreign_files_are_refused(tmp_path: Path) -> None:
    Record(tmp_path, CELL).add([row(7, 40, 1.0)], FACTS)
    with pytest.raises(Exception, match=r"recorded with the settings \['device=cpu'\], this run"):
        Record(tmp_path, CELL).add([row(7, 50, 1.0)], FACTS | {"settings": ["precision=bf16"]})
    write_rows(tmp_path / "td3-hopper.csv", ("a", "b"), [{"a": "1", "b": "2"}])
    with pytest.raises(Exception, match="other columns than method,"):
        Record(tmp_path, OTHER)
    (tmp_path / "sac-hopper.json").write_text("no")
    with pytest.raises(Exception, match="is not JSON"):
        Record(tmp_path, CELL)


def test_rows_are_the_evaluations_the_newest_clock_and_the_last_checkpoint(tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path, total_timesteps=40, seeds=[3, 4])
    job = Job("run", config, tmp_path)
    for member, folder in job.members:
        folder.mkdir(parents=True)
        lines = [
            {"step": 10, "kind": "train", "time/elapsed_seconds": 4.0},
            {"step": 10, "kind": "eval", "eval_return_mean": 1.5, "eval_episodes": 2.0},
            {"step": 20, "kind": "train", "time/elapsed_seconds": 8.0},
            {"step": 20, "kind": "eval", "eval_return_mean": member.seed, "eval_episodes": 2.0},
        ]
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / "metrics.jsonl").write_text(f"{text}\n", encoding="utf-8")
    final = {"step": 20, "returns": {"3": [1.0, 2.0], "4": [5.0, 6.0]}, "metrics": {}}
    (tmp_path / "run" / FINAL_FILE).write_text(json.dumps(final), encoding="utf-8")
    rows = suite.rows_of(job)
    assert {r["task"] for r in rows} == {"Pendulum-v1"}
    assert [(r["metric"], r["step"], r["value"]) for r in rows if r["seed"] == "4"] == [
        (PACE, "20", "5.000"),  # two seeds, 20 steps each, in 8 seconds
        (RETURN, "10", "1.500"),
        (RETURN, "20", "4.000"),
        (LAST, "20", "5.500"),
        (SECONDS, "20", "8.000"),
    ]


def test_what_a_task_is_judged_by_is_recorded_beside_the_return(tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path, total_timesteps=40)
    job = Job("run", config, tmp_path, metrics=(RETURN, "eval_score"))
    ((_, folder),) = job.members
    folder.mkdir(parents=True)
    line = {"step": 20, "kind": "eval", RETURN: 4.0, "eval_score": 40.0, "eval_success_rate": 1.0}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(line)}\n", encoding="utf-8")
    final = {"step": 40, "returns": {"0": [1.0, 2.0]}, "metrics": {"0": {"eval_score": 15.0}}}
    (folder / FINAL_FILE).write_text(json.dumps(final), encoding="utf-8")
    assert [(r["metric"], r["step"], r["value"]) for r in suite.rows_of(job, "score")] == [
        (RETURN, "20", "4.000"),
        ("eval_score", "20", "40.000"),
        (LAST, "40", "1.500"),
        ("last_checkpoint_score", "40", "15.000"),
    ]


OFFLINE = Cell(
    suite="locomotion",
    preset="iql/halfcheetah",
    steps=100,
    seeds=(7, 8),
    data="locomotion/hopper-medium",
    settings=("env_id=Hopper-v5",),
    label="hopper-medium",
    figure="score",
)


def test_a_cell_of_data_that_was_not_made_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "SUITE", (OFFLINE,))
    places = ["--data", str(tmp_path), "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert main(["--suite", "locomotion", *places]) == 0
    assert (
        f"iql-hopper-medium: {tmp_path} has no locomotion/hopper-medium; make it with `rl-training "
        "data make locomotion/hopper-medium`, or name another folder with --data"
    ) in capsys.readouterr().out
    assert not (tmp_path / "iql-hopper-medium.csv").exists()


# The page


@pytest.fixture
def records(tmp_path: Path) -> Path:
    folder = tmp_path / "docs" / "studies" / "suite"
    folder.mkdir(parents=True)
    (folder.parent / "published.csv").write_text(PUBLISHED)
    text = "# Page\n\n<!-- generated: suite -->\n<!-- end generated -->\n\nBy hand.\n"
    (tmp_path / "docs" / "benchmarks.md").write_text(text)
    return folder


def test_what_was_not_run_is_in_the_table_as_missing(records: Path) -> None:
    Record(records, CELL).add([row(7, 50, 10.0), row(8, 50, 20.0), row(8, 60, 30.0)], FACTS)
    text = section(Path("studies"), records, (CELL, OTHER))
    assert "missing: 0 of 2 seeds whole, the others at 50, 15 ± 5 at 50 (evaluations of 2" in text
    assert "| td3 | hopper | 7 to 8 | 100 | missing: not run |" in text
    assert "0 of 2 cells are whole." in text
    assert "Over tasks" not in text


def test_a_whole_cell_has_its_figures_beside_the_published_ones(records: Path) -> None:
    Record(records, CELL).add(whole(99.0, 199.0), FACTS)
    Record(records, OTHER).add(whole(299.0, 99.0, method="td3"), FACTS)
    text = section(Path("studies"), records, (CELL, OTHER))
    assert "| 150.0 ± 50 | 150.0 [100.0, 200.0] | 200.0 ± 20 (paper) | 2 min | 2 | cpu |" in text
    assert "| **sac, ours** | 150.0 ± 50 |" in text
    assert "| crossq (paper) | 250.0 |" in text
    # Scores between random's 0 and the published 200: sac 0.5 and 1, td3 1.5 and 0.5.
    assert "| sac | 1 | 0.75 [0.50, 1.00] | td3 with 0.38 [0.00, " in text
    assert "| td3 | 1 | 1.00 [0.50, 1.50] | sac with 0.62 " in text


def test_a_cell_judged_by_scores_shows_them(records: Path) -> None:
    scores = {LAST: "last_checkpoint_score", RETURN: "eval_score"}
    rows = whole(999.0, 1999.0)
    rows += [
        r | {"metric": scores[r["metric"]], "value": str(float(r["value"]) / 20)}
        for r in rows
        if r["metric"] in scores
    ]
    Record(records, OFFLINE).add(rows, FACTS)
    text = section(Path("studies"), records, (OFFLINE,))
    assert "| iql | hopper-medium | 7 to 8 | 100 | 75 ± 25 | 75 [50, 100.0] |" in text
    assert "Over tasks, 0 is a random policy's return and 1 that of the run of SAC" in text
    assert "| iql | 1 | 0.75 [0.50, 1.00] |" in text


def test_evaluations_on_the_way_are_beside_published_ones_of_the_same_step(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_page, "MILESTONES", (50, 100))
    Record(records, CELL).add(whole(159.0, 197.0), FACTS)  # half of it at 50
    text = section(Path("studies"), records, (CELL,))
    # One deviation below the published figure is 80 at step 50, and 180 at step 100.
    assert "| sac | hopper | 50 | 89 ± 9.5 | 100.0 ± 20 (paper) | yes |" in text
    assert "| sac | hopper | 100 | 178.0 ± 19 | 200.0 ± 20 (paper) | **no** |" in text
    rows = [r for r in whole(159.0, 197.0) if (r["seed"], r["step"]) != ("8", "50")]
    record = Record(records, CELL)
    record.rows = rows
    write_rows(record.path, COLUMNS, rows)
    text = section(Path("studies"), records, (CELL,))
    assert "| sac | hopper | 50 |" not in text, "a seed has no evaluation at that step"
    assert "| sac | hopper | 100 |" in text


def test_rendering_writes_page_and_plots_and_leaves_the_rest(records: Path) -> None:
    Record(records, CELL).add(whole(99.0, 199.0), FACTS)
    page = render(records, (CELL, OTHER))
    assert page is not None
    text = page.read_text()
    assert text.startswith("# Page\n")
    assert text.endswith("By hand.\n")
    assert "studies/suite/sac-hopper.svg" in text
    assert sorted(path.name for path in records.glob("*.svg")) == ["mujoco.svg", "sac-hopper.svg"]
    for path in records.glob("*.svg"):
        ElementTree.fromstring(path.read_text())
    assert render(records, (CELL, OTHER)) == page
    assert page.read_text() == text
    page.write_text("no place")
    with pytest.raises(Exception, match="has no place for the suite"):
        render(records, (CELL,))


def test_the_pages_table_is_fresh() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    records = ROOT / "docs" / "studies" / "suite"
    assert section(Path("studies/suite"), records) in page.read_text(encoding="utf-8")


# For real


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_suite_that_is_cut_and_taken_up_has_the_records_of_an_uncut_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = (
        Cell(suite="mujoco", preset="sac/pendulum", steps=1500, seeds=(7, 8)),
        Cell(suite="mujoco", preset="dqn/cartpole", steps=1500, seeds=(7, 8)),
    )
    monkeypatch.setattr(suite, "SUITE", cells)
    sets = ["log_interval=50", "eval_episodes=1", "device=cpu", "threads=1", "accelerate=off"]
    sets += [f"algo_kwargs.{text}" for text in ("hidden_sizes=[8]", "learning_starts=50")]
    sets += [f"algo_kwargs.{text}" for text in ("eval_interval=250", "batch_size=8")]
    words = ["--suite", "mujoco", "--jobs", "2", "--tell", "0.1", "--episodes", "3"]
    words += [word for text in sets for word in ("-s", text)]

    def run(name: str) -> int:
        folder = tmp_path / name
        places = ["--runs", str(folder / "runs"), "--policies", str(folder / "zoo")]
        return main([*words, "--out", str(folder / "records"), *places])

    def stop_soon(recorder: suite._Recorder) -> None:
        if all("eval_return_mean" in job.progress() for _, job in recorder.jobs.values()):
            os.kill(os.getpid(), signal.SIGTERM)  # as whoever lends the machine would

    with monkeypatch.context() as patch:
        patch.setattr(suite._Recorder, "watch", stop_soon)
        assert run("cut") == STOPPED
    assert "saved, to be continued" in capsys.readouterr().out
    assert run("cut") == 0
    assert run("uncut") == 0
    for cell in cells:
        records = [Record(tmp_path / name / "records", cell) for name in ("cut", "uncut")]
        cut, uncut = (
            [r for r in record.rows if r["metric"] in (RETURN, LAST)] for record in records
        )
        assert cut == uncut
        assert len(cut) == 2 * 7
        assert all(record.reached(seed, 1500).done for record in records for seed in (7, 8))
    assert [card.name for card in read_zoo(tmp_path / "cut" / "zoo")] == [
        "dqn-cartpole",
        "sac-pendulum",
    ]
    assert run("cut") == 0

"""`rl-training compare`: runs beside the curves of others."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.tiny import ROOT, run_cli, tiny_config
from rl_training.errors import DataError
from rl_training.reporting.beside import beside, lines_of, read_curves

HEAD = "method,task,seed,step,metric,value\n"
RETURN = "eval_return_mean"
TASK = "Pendulum-v1"


def write_csv(
    path: Path, curves: dict[tuple[str, int], dict[int, float]], task: str = TASK
) -> Path:
    rows = [
        f"{method},{task},{seed},{step},{RETURN},{value}\n"
        for (method, seed), log in curves.items()
        for step, value in log.items()
    ]
    path.write_text(HEAD + "".join(rows), encoding="utf-8")
    return path


def write_run(folder: Path, seed: int, returns: dict[int, float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(tiny_config("sac", folder, seed=seed).to_yaml())
    lines = [{"step": s, "kind": "eval", RETURN: value} for s, value in returns.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in (0, 1):
        write_run(tmp_path / "runs" / str(seed), seed, {10: 1.0 + seed, 20: 5.0 + seed})
    return tmp_path / "runs"


def test_runs_are_drawn_beside_a_file_with_a_legend(runs: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "theirs.csv", {("td3", s): {10: 3.0, 20: 9.0 + s} for s in (0, 1)})
    outcome = run_cli("compare", runs, "--with", file, "-o", tmp_path / "drawn" / "c.svg")
    assert outcome.code == 0, outcome.err
    assert outcome.values["drawing"].endswith("c.svg")
    assert outcome.out.index("1. td3 (theirs)") < outcome.out.index("2. sac")
    drawing = ElementTree.fromstring((tmp_path / "drawn" / "c.svg").read_text())
    texts = [each.text for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"sac", "td3 (theirs)"} <= set(texts)
    bands = list(drawing.iter("{http://www.w3.org/2000/svg}polygon"))
    assert len(bands) == 2, "an interval of each method"


def test_the_records_of_the_suite_are_such_files(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "studies" / "suite"
    for path in folder.glob("*.csv"):
        assert read_curves(path)
    file = write_csv(tmp_path / "a.csv", {("x", 1): {1: 2.0}})
    assert read_curves(file) == {TASK: {"x": {1: {1: 2.0}}}}


def test_a_file_may_call_the_task_otherwise(runs: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", {("x", 1): {10: 2.0, 20: 3.0}}, "Pendulum-v0")
    other = run_cli("compare", runs, "--with", file, "-o", tmp_path / "c.svg").sentence()
    assert "has curves of Pendulum-v0, none of Pendulum-v1; --task" in other
    words = ["--with", file, "--task", "Pendulum-v0", "-o", tmp_path / "c.svg"]
    assert run_cli("compare", runs, *words).code == 0


def test_files_alone_are_compared_with_each_other(tmp_path: Path) -> None:
    first = write_csv(tmp_path / "a.csv", {("x", 1): {10: 2.0, 20: 3.0}})
    with (tmp_path / "b.csv").open("w") as file:
        file.write(f"{HEAD}x,{TASK},1,10,score,1\nx,Walker2d-v5,1,10,score,1\n")
    words = ["--with", first, "--with", tmp_path / "b.csv", "-o", tmp_path / "c.svg"]
    outcome = run_cli("compare", *words)
    assert outcome.code == 0, outcome.err
    # A drawing for each task, since there are two.
    assert sorted(path.name for path in tmp_path.glob("c*.svg")) == [
        "c_pendulum.svg",
        "c_walker2d.svg",
    ]
    assert "x (a)" in (tmp_path / "c_pendulum.svg").read_text()


def test_the_page_has_both(runs: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "theirs.csv", {("td3", 3): {10: 3.0, 20: 9.0}})
    outcome = run_cli("compare", runs, "--with", file, "-o", tmp_path / "c.html")
    assert outcome.code == 0, outcome.err
    assert "td3 (theirs)" in (tmp_path / "c.html").read_text()


def test_seeds_of_other_steps_are_read_between_their_points(tmp_path: Path) -> None:
    curves = {("x", 1): {0: 0.0, 100: 100.0}, ("x", 2): {50: 150.0, 150: 250.0}}
    task = beside([], {Path("a.csv"): read_curves(write_csv(tmp_path / "a.csv", curves))})[0]
    line = lines_of(task)[0]
    # Between 50, where the second begins, and 100, where the first ends: the mean of x and 100 + x.
    assert [*line.points[:1], *line.points[-1:]] == [(50, 100.0), (100, 150.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; its first line must be method,task,"),
        (" \n\n", "is empty"),
        (HEAD, "has no rows below its first line"),
        ("method,task,seed,step,metric\n", "has no column value; its first line must name method"),
        (f"{HEAD}x,t,1,10,r,1\nx,t,1,20,r,abc\n", "row 3: value is 'abc', not a number"),
        (f"{HEAD}x,t,1,10,r,nan\n", "row 2: value is 'nan', not a number"),
        (f"{HEAD}x,t,1,10,r\n", "row 2: value is None, not a number"),
        (f"{HEAD}x,t,1,ten,r,1\n", "row 2: step is 'ten', not a whole number"),
        (f"{HEAD}x,t,1,inf,r,1\n", "row 2: step is 'inf', not a whole number"),
        (f"{HEAD}x,t,1.5,1,r,1\n", "row 2: seed is '1.5', not a whole number"),
        (f"{HEAD}x,t,1,1,r,1\nx,t,1,1.0,r,2\n", "row 3: x on t, seed 1, step 1 is there already"),
        (f"{HEAD}x,t,1,1,a,1\nx,t,1,1,b,2\n", "has no metric eval_return_mean .*--metric"),
        ("\ud800", "holds bytes that are not text"),
    ],
)
def test_a_bad_file_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(DataError, match=message):
        read_curves(path)
    assert str(path) in run_cli("compare", "--with", path, "-o", tmp_path / "c.svg").sentence()
    assert not (tmp_path / "c.svg").exists()


def test_other_mistakes_are_one_sentence_too(runs: Path, tmp_path: Path) -> None:
    missing = run_cli("compare", "--with", tmp_path / "no.csv").sentence()
    assert "no.csv cannot be read (No such file or directory)" in missing
    assert "compare needs runs, a file of curves" in run_cli("compare").sentence()
    assert "writes .svg or .html" in run_cli("compare", runs, "-o", "c.png").sentence()

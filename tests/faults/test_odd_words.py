"""Words on the command line that nobody would type by mistake: each is refused in one sentence."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiny import clean_environment, run_cli, tiny_config, write_tiny
from helpers.warm import CLOSED, run_warm
from rl_training.runtime.train import train


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path)


def test_settings_that_no_folder_or_picture_can_have_leave_nothing_behind(tiny: Path) -> None:
    size = "env_kwargs.wrappers.pixels.resize_shape"
    for setting, expected in {
        f"run_name={'n' * 201}": "run_name: must have at most 200 bytes, got 201",
        f"run_name={'é' * 101}": "run_name: must have at most 200 bytes, got 202",
        'output_dir="a\\0b"': "output_dir: must be a path, which holds no null character",
        'from_checkpoint="a\\0b"': "from_checkpoint: must be a path, which holds no null",
        f"{size}=[0, 0]": "resize_shape",
        f"{size}=[1000000000, 1000000000]": "resize_shape",
    }.items():
        assert expected in run_cli("train", "-c", tiny, "--set", setting).sentence(), setting
    assert not (tiny.parent / "runs").exists()


def test_a_range_of_seeds_beyond_all_measure_costs_nothing(tiny: Path) -> None:
    for words in (("train", "-c", tiny), ("sweep", "-c", tiny, "-o", tiny.parent / "sweep")):
        done = run_cli(*words, "--seeds", "0..99999999999")
        assert done.sentence() == "--seeds 0..99999999999: at most 10000 seeds can be given"
    assert [path.name for path in tiny.parent.iterdir()] == [tiny.name]


def test_observations_of_any_depth_and_size_are_one_sentence(tmp_path: Path) -> None:
    run = train(tiny_config("sac", tmp_path)).run_dir
    for obs, expected in {
        "[1, 2, null]": "the observation must be numbers",
        f"[1, 2, {'9' * 400}]": "the observation must be numbers",
        f"[1, 2, {'9' * 5000}]": "--obs is nested too deeply, or a number in it is too long",
        "[" * 100_000: "--obs is nested too deeply, or a number in it is too long",
        "[1, 2, 1e39]": "the observation holds NaN or infinity",
    }.items():
        done = run_cli("predict", "--checkpoint", run, "--obs", obs)
        assert done.sentence().startswith(expected), obs[:20]


def test_names_that_no_file_can_have_are_one_sentence(tiny: Path) -> None:
    name = "n" * 5000
    for command in (
        ("train", "--config", name),
        ("resume", "--checkpoint", name),
        ("eval", "--checkpoint", name),
        ("export", "--checkpoint", name),
        ("report", name),
        ("leaderboard", name),
        ("data", "inspect", f"{name}.npz"),
        ("data", "collect", f"{name}.npz", "--env", "Pendulum-v1", "--steps", 3),
        ("data", "collect", tiny / "a.npz", "--env", "Pendulum-v1", "--steps", 3),
    ):
        assert len(run_cli(*command).sentence()) < 6000, command


def test_an_error_of_many_lines_is_shown_as_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "raise RuntimeError('first\\nsecond [red]\\n\\n' + 'x' * 100_000)"
    (tmp_path / "wordy_tasks.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    done = run_cli("train", "-c", tiny, "--set", "env_id=wordy_tasks:Any")
    line = done.sentence()
    assert "first second [red] xxx" in line
    assert " ... xxx" in line
    assert len(line) < 4100


@pytest.mark.matrix
def test_streams_that_are_closed_full_or_no_text_are_one_sentence(tmp_path: Path) -> None:
    run = train(tiny_config("sac", tmp_path)).run_dir
    predict = ("-m", "rl_training", "predict", "--checkpoint", run)
    for option in ("--obs", "--input"):
        closed = run_warm(*predict, option, "-", stdin=CLOSED).sentence()
        assert closed.startswith("stdin is closed; give the observations themselves"), option
    assert run_warm(*predict, "--obs", "-", stdin=sys.executable).sentence()
    for place in (CLOSED, "/dev/full"):
        done = run_warm("-m", "rl_training", "eval", "--checkpoint", "nowhere", stderr=place)
        assert (done.code, done.out, done.err) == (2, "", ""), place


@pytest.mark.matrix
def test_streams_are_told_by_a_new_interpreter_too(tmp_path: Path) -> None:
    run = train(tiny_config("sac", tmp_path)).run_dir
    predict = f"predict --checkpoint {shlex.quote(str(run))}"
    for words, expected in {
        f"{predict} --obs - <&-": "error: stdin is closed; give the observations themselves",
        f"{predict} --input - <&-": "error: stdin is closed; give the observations themselves",
        f"{predict} --obs - < {sys.executable}": "error: ",
        "eval --checkpoint nowhere 2>&-": "",
        "eval --checkpoint nowhere 2>/dev/full": "",
    }.items():
        command = f"{shlex.quote(sys.executable)} -m rl_training {words}"
        done = subprocess.run(
            ["sh", "-c", command], env=clean_environment(), capture_output=True, text=True
        )
        assert done.returncode == 2, (words, done)
        assert done.stderr.startswith(expected), words
        assert len(done.stderr.splitlines()) == bool(expected), words


def test_a_title_that_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    run = train(tiny_config("sac", tmp_path)).run_dir
    page = tmp_path / "page.html"
    assert run_cli("report", run, "-o", page, "--title", "mine \udcff").code == 0
    assert "mine ?" in page.read_text(encoding="utf-8")

"""Files that commands write: whole or not at all, never over a pipe, never through a link.

Pipes stand for devices here, which only the system's administrator can remove.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.datasets import tiny_columns, write_columns
from helpers.tiny import run_cli, tiny_config
from rl_training.errors import CheckpointError, EnvError
from rl_training.output_files import written_beside
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent
from rl_training.tools import video


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_config("dqn", tmp_path_factory.mktemp("output"))).run_dir


def test_nothing_is_put_in_the_place_of_a_pipe(run: Path, tmp_path: Path) -> None:
    data = write_columns(tmp_path / "data.npz", tiny_columns())
    for name, command in {
        "policy.onnx": ("export", "--checkpoint", run, "-o"),
        "policy.pt2": ("export", "--checkpoint", run, "--format", "torch", "-o"),
        "video.gif": ("record", "--checkpoint", run, "--max-steps", 2, "-o"),
        "copy.npz": ("data", "convert", "--force", data),
        "copy.hdf5": ("data", "convert", "--force", data),
        "columns": ("data", "convert", "--to", "npy", "--force", data),
    }.items():
        os.mkfifo(target := tmp_path / name)
        assert "a folder, device or pipe is there" in run_cli(*command, target).sentence(), name
        assert stat.S_ISFIFO(target.lstat().st_mode), name
        target.unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["data.npz"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that root cannot write to")
@pytest.mark.parametrize(("form", "ending"), [("onnx", "onnx"), ("torch", "pt2")])
def test_a_folder_that_takes_no_policy_is_one_sentence(run: Path, form: str, ending: str) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript")
    target = f"/proc/policy.{ending}"
    done = run_cli("export", "--checkpoint", run, "--format", form, "-o", target)
    assert done.sentence().startswith(f"{target} cannot be written (No such file or directory")


def test_an_agent_is_not_saved_in_the_place_of_a_pipe(tmp_path: Path) -> None:
    from rl_training.experiment.checkpoint.single import save_single_file

    os.mkfifo(target := tmp_path / "agent")
    with pytest.raises(CheckpointError, match="a folder, device or pipe is there"):
        save_single_file(target, header={}, states={})
    assert stat.S_ISFIFO(target.lstat().st_mode)


def test_the_picture_of_a_run_is_not_drawn_through_a_link(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = train(tiny_config("dqn", tmp_path)).run_dir
    (target := tmp_path / "precious").write_text("keep me")
    (run / "curves.png").symlink_to(target)
    done = run_cli("resume", "--checkpoint", run, "--total-timesteps", 80, "--quiet")
    assert (done.code, done.values["plots"]) == (0, str(run / "curves.png"))
    assert target.read_text() == "keep me"
    assert not (run / "curves.png").is_symlink()


def test_a_picture_that_cannot_be_drawn_does_not_fail_the_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = train(tiny_config("dqn", tmp_path)).run_dir
    (run / "curves.png").mkdir()
    done = run_cli("resume", "--checkpoint", run, "--total-timesteps", 80, "--quiet")
    assert done.code == 0
    assert done.values["plots"].startswith("none (a folder, device or pipe is there")


@pytest.mark.parametrize("ending", ["gif", "mp4"])
def test_a_video_that_fails_leaves_nothing_and_the_old_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    target = tmp_path / f"video.{ending}"
    target.write_text("the old one")
    agent = load_agent(run)

    def pictures(*shown: Any) -> Any:
        left = iter(shown)
        return lambda env: next(left)

    small, large = np.zeros((16, 16, 3), np.uint8), np.zeros((18, 18, 3), np.uint8)
    for shown, expected in (
        ((small, large), r"returns frames \(16, 16, 3\), then \(18, 18, 3\)"),
        ((small / 255.0,), "does not return an image"),
        ((small[:0],), "an empty image"),
        ((small, None), "does not return an image"),
    ):
        monkeypatch.setattr("gymnasium.Wrapper.render", pictures(*shown))
        with pytest.raises(EnvError, match=expected):
            video.record_agent(agent, target)
        assert target.read_text() == "the old one"
        assert [p.name for p in tmp_path.iterdir()] == [target.name]


def test_actions_for_a_file_are_written_whole_or_not_at_all(run: Path, tmp_path: Path) -> None:
    (tmp_path / "obs.jsonl").write_text("[0, 0, 0, 0]\n" * 1500 + "[0, 0]\n")
    options = ("predict", "--checkpoint", run, "--input", tmp_path / "obs.jsonl", "-o")
    for name in ("actions.jsonl", "actions.npy"):
        run_cli(*options, tmp_path / name).sentence()
    assert [p.name for p in tmp_path.iterdir()] == ["obs.jsonl"]


def test_a_file_is_moved_into_place_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.txt"
    with written_beside(target) as part:
        part.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"

    def fail(part: Path) -> None:
        part.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), written_beside(target) as part:
        fail(part)
    assert target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]

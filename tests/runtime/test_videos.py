"""`record` and `watch`: episodes of a checkpoint as a video or in a window."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import pytest

from helpers.tiny import run_cli, tiny_config
from rl_training.envs.factory import make_env
from rl_training.errors import EnvError, MissingExtraError
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent
from rl_training.tools import video
from rl_training.tools.video import record_agent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_config("dqn", tmp_path_factory.mktemp("video"))).run_dir


def test_a_video_has_a_frame_per_state_and_is_where_the_report_looks(run: Path) -> None:
    done = run_cli("record", "--checkpoint", run, "--max-steps", 6, "--seed", 3)
    assert done.code == 0, done.err
    video_file = run / "videos" / "step_64.mp4"
    assert done.values["video"] == str(video_file)
    assert done.values["steps"] == "6"
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(video_file))
    assert (frames, seconds) == (7, pytest.approx(7 / 50, abs=0.02))


def test_a_gif_holds_several_episodes_and_the_same_seed_the_same_ones(
    run: Path, tmp_path: Path
) -> None:
    options = ["--checkpoint", run / "checkpoints" / "step_64", "--episodes", 2, "--seed", 5]
    first = run_cli("record", *options, "-o", tmp_path / "a" / "a.gif", "--max-steps", 3)
    again = run_cli("record", *options, "-o", tmp_path / "b.gif", "--max-steps", 3)
    assert first.code == 0, first.err
    assert first.out.splitlines()[:3] == again.out.splitlines()[:3]
    assert first.out.count("episode=") == 2
    assert (tmp_path / "a" / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()


def test_recording_looks_for_no_display_and_leaves_the_settings_as_they_were(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    seen: list[str | None] = []

    def make(*given: Any) -> Any:
        seen.append(os.environ.get("SDL_VIDEODRIVER"))
        return make_env(*given)

    monkeypatch.setattr(video, "make_env", make)
    record_agent(load_agent(run), tmp_path / "video.gif", max_steps=1)
    assert seen == [None, "dummy"]
    assert "SDL_VIDEODRIVER" not in os.environ


def test_a_window_shows_an_episode(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    done = run_cli("watch", "--checkpoint", run, "--max-steps", 2)
    assert (done.code, done.values["steps"]) == (0, "2"), done.err


def test_mistakes_are_one_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert "no screen" in run_cli("watch", "--checkpoint", run).sentence()
    options = ["record", "--checkpoint", run, "-o"]
    assert ".mp4, .gif, .webm" in run_cli(*options, tmp_path / "video.avi").sentence()
    wrong = run_cli(*options, tmp_path / "video.mp4", "--episodes", 0).sentence()
    assert "episodes must be >= 1, got 0" in wrong
    assert "there is no folder" in run_cli("record", "--checkpoint", tmp_path / "no").sentence()


def test_a_task_without_pictures_is_named(tmp_path: Path) -> None:
    config = tiny_config("dqn", tmp_path, env_id="rl_training/Catch-v0", env_kwargs={})
    agent = load_agent(train(config).run_dir)
    with pytest.raises(EnvError, match="has no render mode rgb_array"):
        record_agent(agent, tmp_path / "a.mp4")


def test_a_missing_package_names_the_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match=r"imageio_ffmpeg; pip install .*\[video\]"):
        record_agent(load_agent(run), tmp_path / "a.mp4")

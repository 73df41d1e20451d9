"""Looking at a world model: predictions without sight, videos, and no trace in training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.tiny import learner_digest
from rl_training.algorithms.dreamer.health import OpenLoop, open_loop, open_loop_errors
from rl_training.data.batch import SequenceBatch
from rl_training.models.dreamer import WorldModel
from rl_training.rng import Rng
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.health.world_model import video_frames, write_gif
from rl_training.runtime.train import train
from rl_training.testing.contract import PIXEL_TASK, small_config

S, B, T = 2, 3, 6


def sequences() -> SequenceBatch:
    first = torch.zeros(S, B, T, dtype=torch.bool)
    first[:, :, 0] = True
    first[:, 1, 4] = True
    return SequenceBatch(
        obs=torch.randn(S, B, T, 4),
        action=torch.zeros(S, B, T, 2),
        reward=torch.zeros(S, B, T),
        is_first=first,
        terminated=torch.zeros(S, B, T, dtype=torch.bool),
    )


def test_with_sight_all_the_way_a_prediction_is_a_reconstruction() -> None:
    model, batch = WorldModel((4,), 2, rng=Rng(range(S), "model")), sequences()
    found = open_loop(model, batch, batch.action, T, Rng(range(S), "noise"))
    seen = model.observe(batch.obs, batch.action, batch.is_first, Rng(range(S), "noise"))
    expected = model.decoder(seen.state.features.flatten(1, 2)).view(S, B, T, 4)
    torch.testing.assert_close(found.predicted, expected)
    torch.testing.assert_close(found.reconstructed, expected)
    assert not found.blind.any()
    blind = open_loop(model, batch, batch.action, 2, Rng(range(S), "noise"))
    torch.testing.assert_close(blind.reconstructed, expected)
    torch.testing.assert_close(blind.predicted[:, :, :2], expected[:, :, :2])
    assert not torch.allclose(blind.predicted[:, :, 2:], expected[:, :, 2:])


def test_without_sight_observations_do_not_matter_until_an_episode_begins() -> None:
    model, batch = WorldModel((4,), 2, rng=Rng(range(S), "model")), sequences()
    other = sequences()
    changed = SequenceBatch(
        obs=torch.cat((batch.obs[:, :, :2], other.obs[:, :, 2:]), 2),
        action=batch.action,
        reward=batch.reward,
        is_first=batch.is_first,
        terminated=batch.terminated,
    )
    ours, theirs = (
        open_loop(model, each, batch.action, 2, Rng(range(S), "noise")) for each in (batch, changed)
    )
    assert ours.blind[0, 0].tolist() == [0, 0, 1, 2, 3, 4]
    assert ours.blind[0, 1].tolist() == [0, 0, 1, 2, 0, 1]
    torch.testing.assert_close(ours.predicted[:, 0], theirs.predicted[:, 0])
    assert not torch.allclose(ours.predicted[:, 1, 4:], theirs.predicted[:, 1, 4:])


def test_errors_are_counted_by_the_number_of_blind_steps() -> None:
    real = torch.zeros(1, 2, 3, 2)
    predicted = (
        torch.tensor([[[1.0, 2.0, 3.0], [3.0, 5.0, 7.0]]]).unsqueeze(-1).expand(-1, -1, -1, 2)
    )
    blind = torch.tensor([[[0, 1, 2], [0, 0, 1]]])
    errors, counts = open_loop_errors(OpenLoop(real, real, predicted, blind))
    assert counts.tolist() == [[3.0, 2.0, 1.0]]
    torch.testing.assert_close(errors, torch.tensor([[35.0 / 3, 53.0 / 2, 9.0]]))


def test_a_video_shows_real_reconstructed_predicted_and_difference_side_by_side(
    tmp_path: Path,
) -> None:
    real = np.zeros((2, 3, 1, 4, 5))
    reconstructed, predicted = np.full_like(real, 0.2), real.copy()
    predicted[0, 1] = 0.5
    predicted[1, 2] = 1.0
    frames = video_frames(real, reconstructed, predicted)
    assert [frame.shape for frame in frames] == [(8, 20, 3)] * 3
    assert (frames[0][:, :5] == 0).all()
    assert (frames[0][:, 5:10] == 51).all()
    assert (frames[0][:, 10:15] == 0).all()
    assert (frames[0][:, 15:] == 128).all()
    assert (frames[2][4:, 10:] == 255).all()
    for channels in (2, 3, 12):
        many = np.random.default_rng(0).random((1, 2, channels, 4, 5))
        assert video_frames(many, many, many)[0].shape == (4, 20, 3)
    assert write_gif(tmp_path / "videos" / "a.gif", frames)
    from PIL import Image

    with Image.open(tmp_path / "videos" / "a.gif") as found:
        assert found.size == (20, 8)
        assert getattr(found, "n_frames", 1) == 3


class Heard(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, state: TrainerState, text: str) -> None:
        self.texts.append(text)


def run(folder: Path, **settings: Any) -> tuple[Path, list[dict[str, Any]], list[str]]:
    heard = Heard()
    settings = {"batch_length": 8} | settings  # long enough to predict some of it
    config = small_config(
        "dreamer", folder, task=PIXEL_TASK, total_timesteps=60, algo_kwargs=settings
    )
    result = train(config, callbacks=[heard])
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return result.run_dir, [json.loads(line) for line in lines], heard.texts


@pytest.mark.matrix
def test_looking_writes_errors_and_a_video_and_leaves_no_trace(tmp_path: Path) -> None:
    watched, lines, _ = run(tmp_path, watch_model=True, eval_interval=30)
    rows = [line for line in lines if line["kind"] == "model"]
    assert [row["step"] for row in rows] == [30, 60]
    assert all(row["open_loop_error_0"] > 0 for row in rows)
    assert "open_loop_error_3" in rows[0]
    videos = sorted(path.name for path in (watched / "videos").iterdir())
    assert videos == ["model_step_30.gif", "model_step_60.gif"]
    alone, lines, _ = run(tmp_path, watch_model=False, eval_interval=30)
    assert not any(line["kind"] == "model" for line in lines)
    assert not (alone / "videos").exists()
    assert learner_digest(watched) == learner_digest(alone)


def test_without_pillow_one_line_says_how_to_get_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    folder, lines, texts = run(tmp_path, eval_interval=20)
    assert sum(line["kind"] == "model" for line in lines) == 2
    assert not (folder / "videos").exists()
    assert sum("Pillow is not installed" in text for text in texts) == 1

"""Looks at a world model while it learns: errors without sight in the log, and videos in the run.

Draws are numbered by the step, so that looking leaves no trace.
Shapes: S seeds, B sequences, T steps, C channels, H height, W width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.dreamer import Dreamer
from rl_training.algorithms.dreamer.health import open_loop, open_loop_errors
from rl_training.algorithms.dreamer.learner import encode_action
from rl_training.data.replay.sequences import RecurrentReplayBuffer
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.rng import Rng
from rl_training.runtime.health.dynamics import per_seed
from rl_training.runtime.phases.base import LoopPhase
from rl_training.runtime.session import Session

SEQUENCES, SHOWN = 32, 4
"""Sequences that are predicted, and how many of them a video shows."""
CONTEXT = 5
"""Steps that the model sees of each, at most half of them."""
FRAME_MILLISECONDS = 250

Image = NDArray[Any]


class WorldModelHealth(LoopPhase):
    """Predicts real sequences now and then, for the log and as a video."""

    def __init__(self, session: Session, learner: AnyLearner, replay: ReplayBuffer | None) -> None:
        """Take hold of the run, its world model and its sequences."""
        assert isinstance(learner, Dreamer)
        assert isinstance(replay, RecurrentReplayBuffer)
        self.session, self.learner, self.replay = session, learner, replay
        self._can_draw = True

    def after_pass(self) -> None:
        """Look at every evaluation after the first update, where the settings ask for it."""
        config = self.learner.config
        learned = self.learner.num_updates.value > 0
        if config.watch_model and learned and self.session.crossed(config.eval_interval):
            self.look()

    def look(self) -> None:
        """Log the errors, and write the videos of images."""
        learner, replay = self.learner, self.replay
        rng = Rng(learner.seeds, "model health", learner.device)
        rng.seek(4 * self.session.step)
        batch = replay.gather(replay.draw_rows(rng, SEQUENCES))
        context = min(CONTEXT, replay.sequence_length // 2)
        action = encode_action(batch.action, learner.actor)
        loop = open_loop(learner.world_model, batch, action, context, rng)
        errors, counts = open_loop_errors(loop)
        reached = (counts > 0).all(0).tolist()
        names = {
            f"open_loop_error_{steps}": errors[:, steps]
            for steps, some in enumerate(reached)
            if some
        }
        self.session.log_extra("model", per_seed(names))
        pictures = learner.world_model.decoder.pictures
        shown = [pictures(part) for part in (loop.real, loop.reconstructed, loop.predicted)]
        if self._can_draw and all(part is not None for part in shown):
            self._write_videos([part for part in shown if part is not None])

    def _write_videos(self, shown: list[Tensor]) -> None:
        for index, folder in enumerate(self.session.folders):
            parts = [part[index, :SHOWN].clamp(0, 1).cpu().numpy() for part in shown]
            path = folder / "videos" / f"model_step_{self.session.step}.gif"
            self._can_draw = write_gif(path, video_frames(*parts))
            if not self._can_draw:
                self.session.say(
                    "no videos of the world model: Pillow is not installed; run: "
                    'pip install "rl-training[report]"'
                )
                return


def video_frames(real: Image, reconstructed: Image, predicted: Image) -> list[Image]:
    """Put real, reconstructed, predicted and difference side by side, sequences below each other.

    Args:
        real: `[B, T, C, H, W]` in [0, 1].
        reconstructed: The same as the model sees it.
        predicted: The same as it expects it without looking.

    Returns:
        A picture `[B H, 4 W, 3]`, uint8, for each of T steps; in the last part, what is predicted
        less what is real, grey means no difference.
    """
    difference = (predicted - real + 1) / 2
    parts = [_coloured(part) for part in (real, reconstructed, predicted, difference)]
    wide = np.concatenate(parts, -2)  # [B, T, H, 4 W, 3]
    pictures = np.rint(255 * wide).astype(np.uint8)
    return [np.concatenate(list(pictures[:, step]), 0) for step in range(wide.shape[1])]


def _coloured(images: Image) -> Image:
    """Images of any number of channels as red, green and blue, `[B, T, H, W, 3]`."""
    channels = images.shape[2]
    if channels == 1:
        images = np.repeat(images, 3, 2)
    elif channels == 2:
        images = np.concatenate((images, images[:, :, :1] * 0 + images.min()), 2)
    return np.moveaxis(images[:, :, -3:], 2, -1)


def write_gif(path: Path, frames: list[Image]) -> bool:
    """Write pictures as an animation; returns False without Pillow."""
    try:
        from PIL import Image as Picture
    except ImportError:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [Picture.fromarray(frame) for frame in frames]
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=FRAME_MILLISECONDS, loop=0
    )
    return True

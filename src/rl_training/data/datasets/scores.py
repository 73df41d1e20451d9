"""Returns of a random and an expert policy, which normalised scores are measured between.

The figures are those of D4RL (arXiv:2004.07219), one pair per task whatever the dataset and its
version.  Minari's `mujoco/*` datasets carry none of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_training.errors import DataError
from rl_training.validation import suggest

SCORE = "eval_score"
"""Metric of an evaluation: 0 is a random policy's mean return, 100 an expert's."""


@dataclass(frozen=True)
class ReferenceScores:
    """Mean returns that count as 0 and as 100."""

    random: float
    expert: float

    def score(self, value: float) -> float:
        """Return `100 (value - random) / (expert - random)`."""
        return 100.0 * (value - self.random) / (self.expert - self.random)


TASKS = {
    "halfcheetah": ReferenceScores(-280.178953, 12135.0),
    "hopper": ReferenceScores(-20.272305, 3234.3),
    "walker2d": ReferenceScores(1.629008, 4592.3),
    "ant": ReferenceScores(-325.6, 3879.7),
    "antmaze": ReferenceScores(0.0, 1.0),
    "kitchen": ReferenceScores(0.0, 4.0),
    "pen": ReferenceScores(96.262799, 3076.8331017826877),
    "hammer": ReferenceScores(-274.856578, 12794.134825156867),
    "relocate": ReferenceScores(-6.425911, 4233.877797728884),
    "door": ReferenceScores(-56.512833, 2880.5693087298737),
    "maze2d-open": ReferenceScores(0.01, 20.66),
    "maze2d-umaze": ReferenceScores(23.85, 161.86),
    "maze2d-medium": ReferenceScores(13.13, 277.39),
    "maze2d-large": ReferenceScores(6.7, 273.99),
    "maze2d-open-dense": ReferenceScores(11.17817, 27.166538620695782),
    "maze2d-umaze-dense": ReferenceScores(68.537689, 193.66285642381482),
    "maze2d-medium-dense": ReferenceScores(44.264742, 297.4552547777125),
    "maze2d-large-dense": ReferenceScores(30.569041, 303.4857382709002),
}
OTHER_NAMES = {
    "adroithandpen": "pen",
    "adroithandhammer": "hammer",
    "adroithandrelocate": "relocate",
    "adroithanddoor": "door",
    "frankakitchen": "kitchen",
}
"""What Gymnasium-Robotics calls them."""


def reference_scores(name: str) -> ReferenceScores | None:
    """Return the figures of a task, or None where there are none.

    Args:
        name: A name of D4RL (`halfcheetah-medium-v2`), a Gymnasium id (`HalfCheetah-v5`) or a
            Minari id (`mujoco/halfcheetah/expert-v0`).
    """
    task = _task_of(name)
    return None if task is None else TASKS[task]


def scores_in(provenance: Mapping[str, Any]) -> ReferenceScores | None:
    """Return the reference returns that a dataset's description holds, if it does."""
    scores = provenance.get("scores")
    if not isinstance(scores, Mapping):
        return None
    low, high = scores.get("random"), scores.get("expert")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    return ReferenceScores(low, high) if math.isfinite(low) and low < high < math.inf else None


def normalized_score(name: str, value: float) -> float:
    """Return `100 (value - random) / (expert - random)` for a task's return.

    Raises:
        DataError: When there are no figures for the task.
    """
    scores = reference_scores(name)
    if scores is None:
        words = re.split(r"[/-]", name.lower())
        near = next((text for word in words if "mean" in (text := suggest(word, TASKS))), "")
        raise DataError(
            f"there are no reference scores for {name!r}{near}; known are {', '.join(TASKS)}"
        )
    return scores.score(value)


def _task_of(name: str) -> str | None:
    # The tasks of Minari are folders: mujoco/halfcheetah/expert-v0, D4RL/door/human-v2.
    parts = name.lower().split("/")
    text = "-".join(parts[-2:]).replace("_", "-")
    for other, task in OTHER_NAMES.items():
        if text.startswith(f"{other}-"):
            return task
    fitting = [task for task in TASKS if text.startswith(f"{task}-") or text == task]
    return max(fitting, key=len, default=None)

"""Early stopping, looked at after each evaluation; its state is part of the checkpoint."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rl_training.algorithms.config import EarlyStopping
from rl_training.state import StateDict

_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {
    "eval_return_mean": statistics.fmean,
    "eval_return_min": min,
    "eval_return_median": statistics.median,
}


class StopRule:
    """Decides whether a run has reached its target, or gains nothing any more."""

    def __init__(self, settings: EarlyStopping | None) -> None:
        self.settings = settings
        self.best: float | None = None
        self.streak = 0

    def judge(self, step: int, returns: Sequence[Sequence[float]]) -> str | None:
        """Take in an evaluation (episode returns per seed) and return a reason to stop, or None."""
        if self.settings is None:
            return None
        summary = _SUMMARIES[self.settings.metric]
        value = statistics.fmean([summary(episodes) for episodes in returns])
        reason = self._reached(value) if self.settings.target is not None else self._stalled(value)
        return reason if step >= self.settings.min_steps else None

    def _reached(self, value: float) -> str | None:
        assert self.settings is not None
        assert self.settings.target is not None
        sign = 1 if self.settings.mode == "max" else -1
        self.streak = self.streak + 1 if sign * (value - self.settings.target) >= 0 else 0
        if self.streak < self.settings.patience:
            return None
        return f"{self.settings.metric} {value:.1f} reached the target {self.settings.target:g}"

    def _stalled(self, value: float) -> str | None:
        assert self.settings is not None
        sign = 1 if self.settings.mode == "max" else -1
        if self.best is None or sign * (value - self.best) > self.settings.min_delta:
            self.best, self.streak = value, 0
            return None
        self.streak += 1
        if self.streak < self.settings.patience:
            return None
        return f"{self.settings.metric} gained nothing in {self.streak} evaluations"

    def state_dict(self) -> StateDict:
        """Return the rule's memory."""
        return {"best": self.best, "streak": self.streak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rule's memory."""
        self.best, self.streak = state["best"], state["streak"]

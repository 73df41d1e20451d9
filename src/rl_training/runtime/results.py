"""What training and evaluation return."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_training.data.datasets.scores import SCORE, ReferenceScores
from rl_training.errors import RLTrainingError
from rl_training.experiment.summary import SUCCESS, over_seeds


@dataclass(frozen=True)
class TrainResult:
    """Where a run is, and its final figures (of the last step, not of the best)."""

    run_dir: Path
    checkpoint_path: Path
    metrics: Mapping[str, float]
    stop_reason: str | None = None
    """Why the run ended before `total_timesteps`, if it did."""
    per_seed: tuple[TrainResult, ...] = field(default=())
    """One result per member of a group, in the order of `TrainConfig.members`."""


@dataclass(frozen=True)
class EvalResult:
    """Returns of evaluation episodes."""

    returns: tuple[float, ...]
    step: int
    scores: ReferenceScores | None = None
    """What a normalised score is measured between, where the task has such returns."""
    successes: tuple[float, ...] | None = None
    """Whether each episode succeeded, 0 or 1, where the task says so."""

    @property
    def metrics(self) -> dict[str, float]:
        """Summary under the names that `TrainResult.metrics` uses."""
        return summarize_returns(self.returns, self.scores, self.successes)


class TrainingInterrupted(RLTrainingError):
    """A signal stopped the run; it is saved and can be resumed."""

    def __init__(self, signal_name: str, run_dir: Path, checkpoint: Path, step: int) -> None:
        super().__init__(
            f"{signal_name} received: saved step {step} to {checkpoint}; continue with "
            f"`rl-training resume --checkpoint {run_dir}`"
        )
        self.run_dir, self.checkpoint = run_dir, checkpoint


def summarize_returns(
    returns: Sequence[float],
    scores: ReferenceScores | None = None,
    successes: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return mean, standard deviation, median, extremes and number; NaN when there are none.

    With reference scores also the normalised score of the mean, under the name `SCORE`; with
    successes their mean, under the name `SUCCESS`.
    """
    if not returns:
        names = ("mean", "std", "median", "min", "max")
        return {**{f"eval_return_{name}": math.nan for name in names}, "eval_episodes": 0.0}
    mean = statistics.fmean(returns)
    metrics = {
        "eval_return_mean": mean,
        "eval_return_std": statistics.pstdev(returns),
        "eval_return_median": statistics.median(returns),
        "eval_return_min": min(returns),
        "eval_return_max": max(returns),
        "eval_episodes": float(len(returns)),
    }
    if scores is not None:
        metrics[SCORE] = scores.score(mean)
    if successes is not None:
        metrics[SUCCESS] = statistics.fmean(successes)
    return metrics


def summarize_members(results: Sequence[EvalResult]) -> dict[str, float]:
    """Return figures over the mean returns of a group's members; episodes are those of each."""
    final = over_seeds([statistics.fmean(result.returns) for result in results])
    figures = {
        "eval_return_mean": final.mean,
        "eval_return_iqm": final.iqm,
        "eval_return_iqm_low": final.iqm_low,
        "eval_return_iqm_high": final.iqm_high,
        "eval_return_worst": final.min,
        "eval_return_best": final.max,
    }
    known = {name: math.nan if value is None else value for name, value in figures.items()}
    rates = [statistics.fmean(result.successes) for result in results if result.successes]
    if rates:
        known[SUCCESS] = statistics.fmean(rates)
    return known | {"eval_episodes": float(len(results[0].returns))}

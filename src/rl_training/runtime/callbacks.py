"""Callbacks: they observe a run, and may ask it to stop; they change nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class TrainerState:
    """What a callback sees of a run."""

    algo: str
    env_id: str
    seeds: tuple[int, ...]
    run_dir: Path
    total_timesteps: int
    step: int = 0
    start_step: int = 0
    """Step at which this process took the run up: 0, or where it resumed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Latest value of every metric, averaged over seeds."""
    stop_reason: str | None = None

    def request_stop(self, reason: str) -> None:
        """Ask the run to end after the current step; it is saved as usual."""
        self.stop_reason = self.stop_reason or reason


class Callback:
    """Base of callbacks; override what you need."""

    def on_start(self, state: TrainerState) -> None:
        """The run begins or is taken up again."""

    def on_step(self, state: TrainerState) -> None:
        """One pass of the loop is done; called often, so be quick."""

    def on_log(self, state: TrainerState, values: Mapping[str, float]) -> None:
        """Metrics were written; `values` are averages over seeds."""

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        """An evaluation is done; `returns` holds the episode returns of each seed."""

    def on_checkpoint(self, state: TrainerState, paths: Sequence[Path]) -> None:
        """A checkpoint was written, one folder per seed."""

    def on_message(self, state: TrainerState, text: str) -> None:
        """Something a person should know happened."""

    def on_end(self, state: TrainerState) -> None:
        """The run is over, finished or stopped."""

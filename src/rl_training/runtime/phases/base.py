"""What some methods add to a loop: pretraining, a model to fit, demonstrations to show.

A method names its phases in `SPEC`; a loop calls them at fixed points and knows nothing else of
them, so no loop asks which method it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.algorithms.base import AnyLearner
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.runtime.compile.runner import ReplayRunner
from rl_training.runtime.session import Session


class LoopPhase:
    """Does nothing; a phase overrides what it needs."""

    def __init__(self, session: Session, learner: AnyLearner, replay: ReplayBuffer | None) -> None:
        """Prepare the phase; nothing of the run is on disk yet.

        Args:
            session: The run.
            learner: Who learns.
            replay: What it learns from; None in the on-policy loop.
        """

    def parts(self) -> Mapping[str, Any]:
        """Return what a checkpoint must hold of it, by name."""
        return {}

    def notes(self) -> Sequence[str]:
        """Return what there is to say about its data."""
        return ()

    def counts(self) -> Mapping[str, float]:
        """Return numbers for the log."""
        return {}

    def batches(self, replay: ReplayBuffer) -> ReplayBuffer:
        """Return what batches are drawn from in place of `replay`."""
        return replay

    def first(self) -> None:
        """Look at the data once, when a new run begins."""

    def before_loop(self, runner: ReplayRunner) -> None:
        """Do what comes before the first pass, or is left of it."""

    def before_pass(self, runner: ReplayRunner) -> None:
        """Do what is due at this step."""

    def stops(self) -> Sequence[int]:
        """Return the next steps at which a pass must begin."""
        return ()

    def after_pass(self) -> None:
        """Look at what was learned, before the pass is logged."""


class Phases(LoopPhase):
    """All phases of a run as one."""

    def __init__(self, phases: Sequence[LoopPhase]) -> None:
        self._phases = tuple(phases)
        # Only what a phase overrides: a method without phases pays nothing at its passes.
        self.before_each = [p.before_pass for p in phases if _overrides(p, "before_pass")]
        self.after_each = [p.after_pass for p in phases if _overrides(p, "after_pass")]

    def parts(self) -> dict[str, Any]:
        """Return the parts of all."""
        return {name: part for phase in self._phases for name, part in phase.parts().items()}

    def notes(self) -> list[str]:
        """Return the notes of all."""
        return [note for phase in self._phases for note in phase.notes()]

    def counts(self) -> dict[str, float]:
        """Return the numbers of all."""
        return {name: value for phase in self._phases for name, value in phase.counts().items()}

    def batches(self, replay: ReplayBuffer) -> ReplayBuffer:
        """Return what batches are drawn from when all have had their say."""
        for phase in self._phases:
            replay = phase.batches(replay)
        return replay

    def first(self) -> None:
        """Let each look at the data."""
        for phase in self._phases:
            phase.first()

    def before_loop(self, runner: ReplayRunner) -> None:
        """Let each do what comes before the first pass."""
        for phase in self._phases:
            phase.before_loop(runner)

    def stops(self) -> list[int]:
        """Return the stops of all."""
        return [stop for phase in self._phases for stop in phase.stops()]


def _overrides(phase: LoopPhase, name: str) -> bool:
    return getattr(type(phase), name) is not getattr(LoopPhase, name)

"""Moves everything that depends on the stage of a run to another stage, and back.

A number that an update takes from Python becomes a constant of its program.  One that changes
during a run shows when the update is traced at two stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from rl_training.algorithms.base import AnyLearner, Learner
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.mixed import Mixed
from rl_training.data.replay.storage import ReplayBuffer

EARLY, LATE = 0.0, 0.93
"""Shares of a run: before every schedule has moved, and after most have."""
MOST_PHASES = 10_000
"""How many updates are looked through for another one of the same phase."""


@contextmanager
def at_stage(owners: Mapping[str, object], progress: float) -> Iterator[None]:
    """Let learners and buffers believe that this share of the run is done.

    At `LATE` also their counts of updates and of stored rows are other ones.
    """
    with ExitStack() as stack:
        for owner in owners.values():
            if isinstance(owner, Learner):
                _move_learner(owner, progress, stack)
            elif isinstance(owner, ReplayBuffer):
                _move_buffer(owner, progress, stack)
        yield


def _move_learner(learner: AnyLearner, progress: float, stack: ExitStack) -> None:
    stack.callback(learner.set_progress, learner.progress)
    learner.set_progress(progress)
    if progress == LATE:
        count = learner.num_updates.value
        stack.callback(setattr, learner.num_updates, "value", count)
        learner.num_updates.value = _later_count(learner)


def _later_count(learner: AnyLearner) -> int:
    """Return a larger number of updates after which the next is of the same phase as now."""
    now, phase = learner.num_updates.value, learner.phase()
    try:
        for learner.num_updates.value in range(now + 1, now + MOST_PHASES):
            if learner.phase() == phase:
                return learner.num_updates.value
    finally:
        learner.num_updates.value = now
    return now


def _move_buffer(buffer: ReplayBuffer, progress: float, stack: ExitStack) -> None:
    stack.callback(buffer.set_progress, buffer.progress)
    buffer.set_progress(progress)
    parts = [buffer, buffer.other] if isinstance(buffer, Mixed) else [buffer]
    for part in parts if progress == LATE else ():
        if isinstance(part, DatasetBuffer):
            continue  # the number of recorded rows never changes: it may be a constant
        count, half = part.inserted.value, max(part.capacity // 2, 1)
        stack.callback(part.set_inserted, count)
        part.set_inserted(part.capacity if count == half else half)

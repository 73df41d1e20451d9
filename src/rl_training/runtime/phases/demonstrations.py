"""Demonstrations in the on-policy loop: loaded when a run starts or is resumed."""

from __future__ import annotations

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.gail import GAIL
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.runtime.phases.base import LoopPhase
from rl_training.runtime.replay import load_buffer
from rl_training.runtime.session import Session


class Demonstrations(LoopPhase):
    """Shows a learner somebody else's episodes; checkpoints hold their digest too."""

    def __init__(self, session: Session, learner: AnyLearner, replay: ReplayBuffer | None) -> None:  # noqa: ARG002
        """Load the demonstrations."""
        assert isinstance(learner, GAIL)
        self.learner = learner
        self._shown, self._notes = load_buffer(learner, session.env_spec)
        learner.attach(self._shown)

    def parts(self) -> dict[str, DatasetBuffer]:
        """Return the demonstrations, of which only the digest is saved."""
        return {"demonstrations": self._shown}

    def notes(self) -> list[str]:
        """Return what loading them found."""
        return list(self._notes)

    def first(self) -> None:
        """Let the learner see them, for a warm start."""
        self.learner.see_data(self._shown)

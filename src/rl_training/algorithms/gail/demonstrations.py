"""Learners that act in an environment and are shown somebody else's episodes beside it."""

from __future__ import annotations

from rl_training.algorithms.base import OnPolicyLearner
from rl_training.data.replay.pairs import Pairs
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.state import transient


class Demonstrated(OnPolicyLearner):
    """Part of a learner: holds the demonstrations, which are no part of its state.

    A checkpoint has their digest beside the learner, so an agent can be loaded without them.
    """

    read_only = ("_shown",)
    """Attributes whose tensors learning does not change."""
    _shown: transient[Pairs] | None = None

    def attach(self, buffer: ReplayBuffer) -> None:
        """Take hold of the demonstrations; called whenever a run starts or is taken up."""
        self._shown = transient(Pairs.of_buffer(buffer))

    @property
    def expert(self) -> Pairs:
        """The demonstrations.

        Raises:
            ConfigError: When there are none.
        """
        if self._shown is None:
            raise ConfigError(
                f"{type(self).__name__} has no demonstrations; give it some with "
                "attach(DatasetBuffer(dataset)) before its first update"
            )
        return self._shown.value

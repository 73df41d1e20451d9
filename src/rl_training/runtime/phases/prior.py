"""Prior data in the off-policy loop: what happens before the first environment step."""

from __future__ import annotations

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.sources import PriorSettings, pretrain_updates
from rl_training.data.replay.mixed import WithPrior
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.runtime.compile.runner import ReplayRunner
from rl_training.runtime.phases.base import LoopPhase
from rl_training.runtime.session import Session

BLOCK = 32
"""Updates of one pass of a loop that takes no environment steps."""


class PriorData(LoopPhase):
    """Statistics of prior data, updates on it alone, and what the log says of it."""

    def __init__(self, session: Session, learner: AnyLearner, replay: ReplayBuffer | None) -> None:
        """Take hold of the run, the learner and its replay, which may have no prior data."""
        self.session, self.learner, self.replay = session, learner, replay

    def first(self) -> None:
        """Let the learner take statistics of the prior data, where there is any."""
        if isinstance(self.replay, WithPrior):
            self.learner.see_data(self.replay.prior)

    def before_loop(self, runner: ReplayRunner) -> None:
        """Do the updates on prior data alone that are still to be done.

        The learner's own count says how many are, so a run that is resumed continues where it was.
        They take no steps: checkpoints, one every `checkpoint_interval` updates, are of step 0, and
        so is the line of the log that has their averages.
        """
        session, learner = self.session, self.learner
        wanted = pretrain_updates(learner)
        if wanted == 0 or session.step > 0:
            return
        learner.set_progress(0.0)
        every = session.config.checkpoint_interval
        while (done := learner.num_updates.value) < wanted and session.running():
            # Blocks end at fixed counts, so that a run does not depend on where it was cut.
            runner.update(min(done - done % BLOCK + BLOCK, wanted) - done)
            session.tick()
            if every > 0 and learner.num_updates.value // every > done // every:
                session.save()
        if session.running() and session.recorder.updates.value:
            session.log()

    def counts(self) -> dict[str, float]:
        """Return the updates done on prior data alone, and the rows of a batch."""
        config = self.learner.config
        if not isinstance(config, PriorSettings) or not isinstance(self.replay, WithPrior):
            return {}
        offline = self.replay.prior_rows(config.batch_size)
        done = min(self.learner.num_updates.value, config.offline_pretrain_updates)
        return {
            "pretrain_updates_done": float(done),
            "offline_batch_size": float(offline),
            "online_batch_size": float(config.batch_size - offline),
        }

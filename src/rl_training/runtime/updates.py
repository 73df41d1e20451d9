"""One update of a learner from a replay: draw, learn, send priorities or beliefs back.

Eager and compiled runs execute this same function; `runtime/compile` only decides who does.
"""

from __future__ import annotations

from rl_training.algorithms.base import AnyLearner, StepOutput
from rl_training.algorithms.sources import OfflineSettings, ReplaySettings
from rl_training.data.replay.sequences import RecurrentReplayBuffer
from rl_training.data.replay.storage import ReplayBuffer


def replay_step(learner: AnyLearner, replay: ReplayBuffer, rows: int) -> StepOutput:
    """Draw a batch of `rows` per seed, learn from it, and send priorities or beliefs back."""
    batch = replay.sample(rows)
    output = learner.learn(batch)
    if batch.index is not None and output.priority is not None:
        replay.update_priorities(batch.index, output.priority)
    if batch.index is not None and output.beliefs is not None:
        assert isinstance(replay, RecurrentReplayBuffer)
        replay.keep_beliefs(batch.index, output.beliefs)
    return output


def rows_per_update(learner: AnyLearner) -> int:
    """Return how many transitions an update takes, per seed."""
    settings = learner.config
    if isinstance(settings, ReplaySettings):
        return settings.rows_per_update
    return learner.part(OfflineSettings).batch_size


def steps_per_update(learner: AnyLearner) -> int:
    """Return how many steps an update learns from, per seed: a sequence counts for many."""
    settings = learner.config
    if isinstance(settings, ReplaySettings):
        return settings.steps_per_update
    return rows_per_update(learner)

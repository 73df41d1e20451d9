"""Recurrent SAC: actor and critics on what recurrent layers of their own remember.

Ni et al. (2022, arXiv:2110.05038) found that this, with separate layers for actor and critics and
sequences from a replay, is a strong method for tasks that are seen in part.  The losses are SAC's.

Deviations: sequences begin with a stored memory and a burn-in (Kapturowski et al., 2019), where
    they replay from the start of episodes; the layers read observations alone, not the action and
    reward before them; the actor climbs critics whose head has moved in this update and whose
    recurrent layer has not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from rl_training.algorithms.actor_critic import networks_of
from rl_training.algorithms.base import StepOutput, weighted_mean
from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.sac import SAC
from rl_training.algorithms.sac import SPEC as SAC_SPEC
from rl_training.algorithms.unrolled import MemoryReplay, MemorySettings, learn_unrolled
from rl_training.data.batch import SequenceBatch, TransitionBatch
from rl_training.models.recurrent_mlp import RecurrentMLP, RecurrentSACModel
from rl_training.validation import Settings


class RecurrentSAC(SAC):
    """SAC on sequences, by networks that remember.

    A row is what actor, critics and target critics remember, side by side.
    """

    parts: ClassVar[tuple[type[Settings], ...]] = (MemorySettings, LearningRate, MemoryReplay)
    batch_class = SequenceBatch
    model: RecurrentSACModel
    target_critic: RecurrentMLP

    @property
    def memory_network(self) -> RecurrentMLP:
        """The actor."""
        return self.model.actor

    @property
    def belief_size(self) -> int:
        """Entries of the memories of actor and critics."""
        return self.model.actor.memory.state_size + self.model.critic.memory.state_size

    @property
    def serial_steps(self) -> int:
        """Those of a sequence."""
        return self.part(MemoryReplay).batch_length

    def learn(self, batch: TransitionBatch | SequenceBatch) -> StepOutput:
        """Do SAC's update on the steps of sequences."""
        return learn_unrolled(
            self, batch, (self.model.actor, self.model.critic), self.target_critic
        )

    def row_mean(self, values: Tensor, batch: TransitionBatch) -> Tensor:
        """Return the mean `[S]` over the steps that count."""
        return weighted_mean(values, batch.weight)


recurrent_sac_networks = networks_of(RecurrentSACModel, "memory", "memory_size")


SPEC = replace(
    SAC_SPEC,
    name="recurrent_sac",
    title="Recurrent SAC",
    paper="arXiv:2110.05038",
    summary="off-policy; SAC with LSTMs or GRUs on replayed sequences; continuous actions",
    counterpart=None,
    learner=RecurrentSAC,
    networks=recurrent_sac_networks,
)

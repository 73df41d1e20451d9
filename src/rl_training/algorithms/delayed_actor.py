"""Actor-critics whose policy moves once in several updates of the critics.

Metrics of the policy are those of its last step, zero before the first.  Shapes: S seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.actor_critic import ActorCritic
from rl_training.data.batch import TransitionBatch
from rl_training.state import Stateful

CRITICS_ONLY, WITH_ACTOR = 0, 1


class LastMetrics(Stateful):
    """The metrics of the last actor step, `[S]` each; part of the checkpoint."""

    def __init__(self, names: tuple[str, ...], num_seeds: int, device: torch.device) -> None:
        self._names = names
        for name in names:
            setattr(self, name, torch.zeros(num_seeds, device=device))

    def keep(self, metrics: Mapping[str, Tensor]) -> None:
        """Take the metrics of an actor step, tensors `[S]` or `[S, B]`."""
        with torch.no_grad():
            for name in self._names:
                value = metrics[name]
                getattr(self, name).copy_(value if value.ndim == 1 else value.mean(1))

    def read(self) -> dict[str, Tensor]:
        """Return copies, which later steps do not change."""
        return {name: getattr(self, name).clone() for name in self._names}


class DelayedActor(ActorCritic):
    """Part of a learner: the policy and its multipliers move at every `actor_delay`-th update."""

    actor_metrics: ClassVar[tuple[str, ...]]
    """What `improve` measures."""

    def setup(self) -> None:
        """Add the metrics of the last actor step."""
        super().setup()
        self.last = LastMetrics(self.actor_metrics, self.num_seeds, self.device)

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per update of the policy."""
        raise NotImplementedError

    def moves_actor(self) -> bool:
        """Whether the next update, or the one in progress, moves the policy."""
        return (self.num_updates.value + 1) % self.actor_delay == 0

    def phase(self) -> int:
        """Tell whether the next update moves the policy."""
        return WITH_ACTOR if self.moves_actor() else CRITICS_ONLY

    def improve(self, batch: TransitionBatch, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move actor and multipliers when it is their turn."""
        if self.moves_actor():
            self.last.keep(super().improve(batch, measured))
        return self.last.read()

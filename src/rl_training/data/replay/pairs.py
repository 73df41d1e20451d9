"""Pairs (s, a) that a discriminator is shown, and those of the policy's last rollouts.

Shapes: S seeds, R rows (a leading 1 instead of S where all seeds share them), B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_training.data.batch import RolloutBatch
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.state import require_same_keys


class Pairs(NamedTuple):
    """Observations `[S, R, ...]`, actions `[S, R, ...]`, and whether the episode terminated."""

    obs: Tensor
    action: Tensor
    ended: Tensor

    @classmethod
    def of_rollout(cls, rollout: RolloutBatch) -> Pairs:
        """Return the rows of a rollout; its rewards are left behind."""
        columns = (rollout.obs, rollout.action, rollout.terminated.float())
        return cls(*(column.flatten(1, 2) for column in columns))

    @classmethod
    def of_buffer(cls, buffer: ReplayBuffer) -> Pairs:
        """Return the rows of a dataset, shared by all seeds; images stay as they are stored."""
        rows = buffer.rows
        return cls(rows["obs"], rows["action"], 1 - rows["continues"])

    @property
    def num_rows(self) -> int:
        """Number of rows R."""
        return self.obs.shape[1]

    def take(self, index: Tensor) -> Pairs:
        """Return the rows `index` `[S, B]`."""
        if self.obs.shape[0] == 1:
            flat = index.flatten()
            columns = (x[0].index_select(0, flat).view(*index.shape, *x.shape[2:]) for x in self)
            return Pairs(*columns)
        seed = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
        return Pairs(*(x[seed, index] for x in self))

    def slice(self, start: int, stop: int) -> Pairs:
        """Return consecutive rows, as views."""
        return Pairs(*(x[:, start:stop] for x in self))


class GeneratorReplay:
    """The pairs of the rollouts before the current one, at most `rollouts` of them.

    How many rows a rollout has, and of which shapes and types, is known when the first arrives;
    until then there are none, and what is loaded brings its own.
    """

    def __init__(
        self, rollouts: int, num_seeds: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        """Begin with nothing.

        Args:
            rollouts: How many past rollouts to keep; 0 keeps none.
            num_seeds: S.
            device: Where loaded rows go.
        """
        self._rollouts = rollouts
        self._past = Pairs(*(torch.zeros(num_seeds, 0, device=device) for _ in Pairs._fields))

    def with_current(self, current: Pairs) -> Pairs:
        """Return the rows kept, followed by those of the current rollout."""
        if not self._past.num_rows:
            return current
        return Pairs(*(torch.cat(pair, 1) for pair in zip(self._past, current, strict=True)))

    def add(self, current: Pairs) -> None:
        """Keep the current rollout, and drop the oldest when there are too many."""
        if self._rollouts:
            joined = self.with_current(current)
            first = max(joined.num_rows - self._rollouts * current.num_rows, 0)
            self._past = Pairs(*(x[:, first:].clone() for x in joined))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the rows kept."""
        return self._past._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the rows kept, however many they are."""
        require_same_keys(self.state_dict(), state, type(self).__name__)
        device = self._past.obs.device
        self._past = Pairs(**{name: rows.to(device) for name, rows in state.items()})

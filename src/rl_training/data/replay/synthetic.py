"""Imagined transitions, mixed with real ones in every batch.

Room is allocated once, for the longest roll-outs of a run; how many of the newest rows count is a
number that moves, so compiled updates need not change when the horizon does.

Shapes: S seeds, K rows of a refresh, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.data.replay.prior import Mixed
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.rng import Rng
from rl_training.state import Counter


class SyntheticBuffer(Mixed):
    """Ring of imagined transitions, all single steps, of which the newest are drawn from.

    A checkpoint holds them: to imagine them again would take the weights of that time.
    """

    _tracks_newest = True

    def __init__(
        self,
        capacity: int,
        obs_shape: Sequence[int],
        action_shape: Sequence[int],
        *,
        real: ReplayBuffer,
        real_ratio: float,
        seeds: Sequence[int],
    ) -> None:
        """Allocate the storage.

        Args:
            capacity: Most rows kept per seed.
            obs_shape: Shape of an observation.
            action_shape: Shape of an action.
            real: Where real rows come from; its draws come from this buffer's randomness from now
                on.
            real_ratio: Share of a batch that is real.
            seeds: Seeds of the sampling.
        """
        self.kept = Counter(capacity)
        """How many of the newest rows count."""
        super().__init__(
            capacity,
            obs_shape,
            action_shape,
            other=real,
            other_ratio=real_ratio,
            seeds=seeds,
            gamma=real.gamma,
            device=real.device,
        )

    def __len__(self) -> int:
        """Rows that are drawn from, per seed."""
        return min(super().__len__(), self.kept.value)

    def extend(self, rows: Mapping[str, Tensor], kept: int) -> None:
        """Store imagined transitions `[S, K, ...]`, and say how many of the newest count.

        Args:
            rows: `obs, action, next_obs, reward` and `terminated`.
            kept: At least K.
        """
        count = rows["reward"].shape[1]
        assert count <= kept <= self.capacity
        never = torch.zeros_like(rows["reward"])
        saved = {name: rows[name] for name in ("obs", "action", "next_obs", "reward")}
        saved |= {"continues": 1 - rows["terminated"].float(), "truncated": never}
        self.load_rows(self.inserted.value, saved)
        self.kept.value = kept
        self.set_inserted(self.inserted.value + count)

    def draw_rows(self, rng: Rng, batch_size: int) -> Tensor:
        """Draw among the newest rows, `[S, B]`."""
        return self._back_from_newest(rng.integers(self._size.tensor, batch_size))

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows."""
        return super().state_dict() | {"kept": self.kept.state_dict()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.kept.load_state_dict(state["kept"])
        super()._restore(state)

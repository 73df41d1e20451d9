"""Prioritized replay, proportional variant (Schaul et al., 2016, arXiv:1511.05952).

P(i) = p_i^a / sum_k p_k^a with p = |TD error| + eps (Eq. 1), and weights (N P(i))^-b / max w (Sec.
3.4).  In place of a sum tree, priorities are in a table of blocks with a sum per block: drawing
picks a block, then a row in it, both by cumulative sums, all as tensor operations without a host
read. Block sums are computed again from their rows, so they never drift, and a restored buffer is
bit-exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.errors import DataError
from rl_training.state import Scalar, copy_tensor

PRIORITY_FLOOR = 1e-6


class PrioritizedReplayBuffer(ReplayBuffer):
    """Ring of transitions drawn in proportion to their priority."""

    stores_by_graph = False
    foreseeable = False

    def __init__(
        self,
        capacity: int,
        obs_shape: Sequence[int],
        action_shape: Sequence[int] = (),
        *,
        priority_exponent: float = 0.6,
        importance_exponent: float = 0.4,
        **options: Any,
    ) -> None:
        """Allocate rows and priorities.

        Args:
            capacity: Rows kept per seed.
            obs_shape: Shape of an observation.
            action_shape: Shape of an action.
            priority_exponent: a of Eq. 1; 0 draws uniformly.
            importance_exponent: b at progress 0; it is 1 at progress 1.
            **options: As for `ReplayBuffer`.
        """
        super().__init__(capacity, obs_shape, action_shape, **options)
        self.priority_exponent = priority_exponent
        self.importance_exponent = importance_exponent
        self._exponent = Scalar(importance_exponent, self.device)
        self._filled = Scalar(0, self.device, torch.int64)
        self.block = 2 ** math.ceil(math.log2(max(math.sqrt(self.capacity), 2)))
        blocks = math.ceil(self.capacity / self.block)
        shape = (self.num_seeds, blocks, self.block)
        self.powers = torch.zeros(shape, dtype=torch.float64, device=self.device)  # p^a, 0 if empty
        self.sums = torch.zeros(shape[:2], dtype=torch.float64, device=self.device)
        self.largest = torch.ones(self.num_seeds, dtype=torch.float64, device=self.device)
        self._seed = torch.arange(self.num_seeds, device=self.device).unsqueeze(1)

    def _added(self, start: int) -> None:
        """Give new rows the largest priority so far, so that each is seen soon."""
        rows = torch.arange(start, start + self.num_envs, device=self.device)
        self._set(rows.expand(self.num_seeds, -1), self.largest.unsqueeze(1))

    def set_inserted(self, count: int) -> None:
        """Say how many rows have been stored so far."""
        super().set_inserted(count)
        self._filled.set(min(count, self.capacity))

    def set_progress(self, progress: float) -> None:
        """Move the exponent of the importance weights towards 1."""
        super().set_progress(progress)
        start = self.importance_exponent
        self._exponent.set(start + (1 - start) * progress)

    def sample(self, batch_size: int) -> TransitionBatch:
        """Draw by priority, one draw from each of `batch_size` equal strata of the total mass."""
        if not len(self):
            raise DataError("the replay buffer is empty: add transitions before sampling")
        strata = torch.arange(batch_size, device=self.device)
        share = (strata + self.rng.uniform(batch_size).double()) / batch_size  # [S, B]
        bounds = self.sums.cumsum(1)
        mass = share * bounds[:, -1:]
        block = torch.searchsorted(bounds, mass, right=True).clamp_(max=self.sums.shape[1] - 1)
        below = bounds.gather(1, block) - self.sums.gather(1, block)
        inner = self.powers[self._seed, block].cumsum(-1)  # [S, B, block]
        rest = (mass - below).unsqueeze(-1)
        column = torch.searchsorted(inner, rest, right=True).squeeze(-1)
        # Rounding at a block's edge may point past its rows, or at an empty one.
        index = block * self.block + column.clamp_(max=self.block - 1)
        index = torch.minimum(index, self._filled.tensor - 1)
        return self.gather(index, self._weights(index, bounds[:, -1:]))

    def _weights(self, index: Tensor, total: Tensor) -> Tensor:
        """Importance weights `[S, B]`, scaled so that the largest is 1."""
        power = self.powers.flatten(1).gather(1, index).clamp_(min=torch.finfo(torch.float64).tiny)
        weight = (self._size.tensor * power / total) ** -self._exponent.tensor
        return (weight / weight.amax(1, keepdim=True)).float()

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of rows `index` `[S, B]` to |TD error| `[S, B]`."""
        power = (priority.double().abs() + PRIORITY_FLOOR) ** self.priority_exponent
        torch.maximum(self.largest, power.amax(1), out=self.largest)
        self._set(index, power)

    def _set(self, index: Tensor, power: Tensor) -> None:
        self.powers.view(self.num_seeds, -1).scatter_(1, index, power.expand(index.shape))
        block = index // self.block
        self.sums.scatter_(1, block, self.powers[self._seed, block].sum(-1))

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows."""
        own = {"powers": self.powers, "sums": self.sums, "largest": self.largest}
        return super().state_dict() | own

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        for name in ("powers", "sums", "largest"):
            copy_tensor(getattr(self, name), state[name], name)

"""Replay of transitions, for S seeds at once.

Rows are stored in time order, `num_envs` rows per step, so the successor of row i in the same
environment is row i + num_envs; n-step returns are therefore made when sampling and need no queue.
Terminations and truncations are kept apart: an n-step sum stops at both, the bootstrap only at the
first.

Shapes: S seeds, C capacity, B batch, n environments per seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.errors import DataError
from rl_training.rng import Rng
from rl_training.state import Counter, require_same_keys

Array = NDArray[Any]
SEGMENT_BYTES = 4 << 20


class ReplayBuffer:
    """Ring of transitions with uniform sampling."""

    def __init__(
        self,
        capacity: int,
        obs_shape: Sequence[int],
        action_shape: Sequence[int] = (),
        *,
        action_dtype: torch.dtype = torch.float32,
        obs_dtype: torch.dtype = torch.float32,
        num_envs: int = 1,
        seeds: Sequence[int] = (0,),
        gamma: float = 0.99,
        n_step: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the storage.

        Args:
            capacity: Rows kept per seed, rounded down to a multiple of `num_envs`.
            obs_shape: Shape of an observation.
            action_shape: Shape of an action; empty for discrete ones.
            action_dtype: int64 for discrete actions.
            obs_dtype: uint8 keeps pixels small; they come back as stored.
            num_envs: Rows added per step.
            seeds: Seeds of the sampling, one per member of the group.
            gamma: Discount that `sample` puts into the batch.
            n_step: Rewards summed before the bootstrap.
            device: Where the rows live and batches are made.

        Raises:
            DataError: When the capacity cannot hold `n_step` steps of all environments.
        """
        self.capacity = capacity - capacity % num_envs
        if self.capacity < num_envs * n_step:
            raise DataError(
                f"buffer_capacity must be >= num_envs * n_step = {num_envs * n_step}, "
                f"got {capacity}"
            )
        self.num_envs, self.num_seeds, self.gamma, self.n_step = num_envs, len(seeds), gamma, n_step
        self.device = torch.device(device)
        self.rng = Rng(seeds, "replay", self.device)
        self.inserted = Counter()
        shapes = {
            "obs": (tuple(obs_shape), obs_dtype),
            "action": (tuple(action_shape), action_dtype),
            "reward": ((), torch.float32),
            "next_obs": (tuple(obs_shape), obs_dtype),
            "terminated": ((), torch.bool),
            "truncated": ((), torch.bool),
        }
        self.rows = {
            name: torch.zeros((self.num_seeds, self.capacity, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        # The same memory, flattened over seeds for sampling and as NumPy for cheap writes.
        self._flat = {name: rows.flatten(0, 1) for name, rows in self.rows.items()}
        on_cpu = self.device.type == "cpu"
        self._arrays = {name: rows.numpy() for name, rows in self.rows.items()} if on_cpu else None
        self._offset = torch.arange(self.num_seeds, device=device).unsqueeze(1) * self.capacity

    def __len__(self) -> int:
        """Rows that hold data, per seed."""
        return min(self.inserted.value, self.capacity)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return sum(rows.numel() * rows.element_size() for rows in self.rows.values())

    def add(
        self,
        obs: Array,
        action: Array,
        reward: Array,
        next_obs: Array,
        terminated: Array,
        truncated: Array,
    ) -> None:
        """Store one step of all environments, arrays `[S, n, ...]`."""
        start = self.inserted.value % self.capacity
        stop = start + self.num_envs
        values = (obs, action, reward, next_obs, terminated, truncated)
        if self._arrays is not None:
            for array, value in zip(self._arrays.values(), values, strict=True):
                array[:, start:stop] = value
        else:
            for rows, value in zip(self.rows.values(), values, strict=True):
                rows[:, start:stop] = torch.from_numpy(np.ascontiguousarray(value)).to(self.device)
        self.inserted.value += self.num_envs

    def sample(self, batch_size: int, progress: float = 0.0) -> TransitionBatch:  # noqa: ARG002
        """Draw `batch_size` transitions per seed, uniformly and with replacement."""
        if not len(self):
            raise DataError("the replay buffer is empty: add transitions before sampling")
        return self.gather(self.rng.integers(len(self), batch_size))

    def gather(self, index: Tensor, weight: Tensor | None = None) -> TransitionBatch:
        """Return the transitions at rows `index` `[S, B]`, as n-step ones when asked for."""
        first = (index + self._offset if self.num_seeds > 1 else index).flatten()
        if self.n_step == 1:
            reward = self._pick("reward", first, index)
            discount = self._pick("terminated", first, index).logical_not().mul(self.gamma)
            last = first
        else:
            reward, discount, last = self._n_step(index)
        return TransitionBatch(
            obs=self._pick("obs", first, index),
            action=self._pick("action", first, index),
            reward=reward,
            next_obs=self._pick("next_obs", last, index),
            discount=discount,
            weight=weight,
            index=index,
        )

    def _pick(self, name: str, flat_index: Tensor, index: Tensor) -> Tensor:
        return (
            self._flat[name]
            .index_select(0, flat_index)
            .view(*index.shape, *self._flat[name].shape[1:])
        )

    def _n_step(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum up to n rewards from `index`, stopping at an episode's end or the newest row.

        Returns:
            The sum `[S, B]`, the discount of the bootstrap `[S, B]`, the flat row whose successor
            bootstraps `[S * B]`.
        """
        age_of_newest = (self.inserted.value - 1 - index) % self.capacity  # steps to the newest row
        ahead = age_of_newest // self.num_envs  # later steps of the same environment
        steps = torch.arange(self.n_step, device=self.device)
        rows = (index.unsqueeze(-1) + steps * self.num_envs) % self.capacity  # [S, B, n]
        flat = (rows + self._offset.unsqueeze(-1)).flatten()
        terminated = self._pick("terminated", flat, rows)
        ended = terminated | self._pick("truncated", flat, rows)
        beyond = steps > ahead.unsqueeze(-1)
        # A step counts while no earlier one ended the episode and it has been stored.
        alive = (ended.long().cumsum(-1) - ended.long() == 0) & ~beyond  # [S, B, n]
        powers = self.gamma ** steps.to(torch.float32)
        reward = (self._pick("reward", flat, rows) * powers * alive).sum(-1)
        count = alive.sum(-1, keepdim=True)  # [S, B, 1], at least 1
        last = rows.gather(-1, count - 1)
        stop = (terminated & alive).any(-1)
        discount = torch.where(stop, 0.0, self.gamma ** count.squeeze(-1).to(torch.float32))
        return reward, discount, (last + self._offset.unsqueeze(-1)).flatten()

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Take new priorities of rows; uniform sampling has no use for them."""

    # State: small parts in `state_dict`, rows as segments that checkpoints share.

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows."""
        return {"inserted": self.inserted.state_dict(), "rng": self.rng.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything but the rows."""
        require_same_keys(self.state_dict(), state, type(self).__name__)
        self.inserted.load_state_dict(state["inserted"])
        self.rng.load_state_dict(state["rng"])

    @property
    def segment_rows(self) -> int:
        """Rows per immutable segment of a checkpoint: about four megabytes."""
        row_bytes = max(1, self.num_bytes // (self.capacity * self.num_seeds))
        rows = min(max(SEGMENT_BYTES // row_bytes, 64), self.capacity)
        return max(rows - rows % self.num_envs, self.num_envs)

    def segment_range(self) -> tuple[int, int]:
        """Return the insertion number of the oldest row kept and of the next row."""
        return self.inserted.value - len(self), self.inserted.value

    def read_rows(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return rows by insertion number, `[S, stop - start, ...]`."""
        index = torch.arange(start, stop, device=self.device) % self.capacity
        return {name: rows.index_select(1, index) for name, rows in self.rows.items()}

    def load_rows(self, start: int, saved: Mapping[str, Tensor]) -> None:
        """Put rows back at their insertion numbers."""
        require_same_keys(self.rows, saved, type(self).__name__)
        count = saved["reward"].shape[1]
        index = torch.arange(start, start + count, device=self.device) % self.capacity
        for name, rows in self.rows.items():
            rows.index_copy_(1, index, saved[name].to(self.device))

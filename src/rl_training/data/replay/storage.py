"""Replay of transitions, for S seeds at once.

Rows are stored in time order, `num_envs` rows per step, so the successor of row i in the same
environment is row i + num_envs; n-step returns are therefore made when sampling and need no queue.
Terminations and truncations are kept apart: an n-step sum stops at both, the bootstrap only at the
first.

Shapes: S seeds, C capacity, B batch, n environments per seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.datasets.blank import DatasetShape
from rl_training.data.datasets.blocks import blocks
from rl_training.data.rewards import scale_rewards
from rl_training.errors import DataError
from rl_training.rng import Rng
from rl_training.state import Counter, Scalar, require_same_keys
from rl_training.transfer import Captured, Staging

Array = NDArray[Any]
Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of what a row holds, by name."""
SEGMENT_BYTES = 4 << 20
ALIGNMENT = 64
"""Of allocated rows in bytes, as PyTorch's own."""
_TABLE, _ROWS, _COUNTS = "table", "places", "counts"
"""Names of what is sent with a step: the table's fields together, its row numbers, the counts."""


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that take memory of the host only where they are written to."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(*shape)


class StepArrays(NamedTuple):
    """One step of all environments, arrays `[S, n, ...]`."""

    obs: Array
    action: Array
    reward: Array
    next_obs: Array
    terminated: Array
    truncated: Array


class ReplayBuffer:
    """Ring of transitions with uniform sampling."""

    read_only: ClassVar[tuple[str, ...]] = ("rows", "_table", "_scalars", "_loose")
    """Attributes whose tensors sampling and learning do not change."""
    notes: tuple[str, ...] = ()
    """What a person should know about the rows, a sentence each."""
    data_shape: DatasetShape | None = None
    """Of the dataset that batches are drawn from, where there is one."""
    _apart: ClassVar[tuple[str, ...]] = ()
    """Fields that a subclass stores and reads in its own way."""
    stores_by_graph: bool = True
    """Whether `store_staged` is all that storing a step takes on the device."""
    _own_fields: tuple[str, ...] = ("obs", "action")
    """Fields that an n-step transition takes from its first row."""
    _successor_fields: tuple[str, ...] = ("next_obs",)
    """Fields that an n-step transition takes from its last row."""
    _tracks_newest: ClassVar[bool] = False
    """Whether what is drawn depends on which row is the newest; n-step returns always do."""
    drawn_outside: bool = False
    """Whether batches are drawn outside of compiled updates: something of the host is needed."""
    foreseeable: ClassVar[bool] = True
    """Whether a batch is one uniform draw of rows, so that the host can tell which it will hold."""

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
        shared: bool = False,
        reward_scale: float = 1.0,
        reward_shift: float = 0.0,
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
            shared: Keep one set of rows for all seeds, as a dataset does.
            reward_scale: Factor on the rewards that `add` stores.
            reward_shift: Added to them after that.

        Raises:
            DataError: When the capacity cannot hold `n_step` steps of all environments.
        """
        self.capacity = capacity - capacity % num_envs
        self.drawable = self.capacity
        """Rows that may be drawn when the ring is full."""
        if self.capacity < num_envs * n_step:
            raise DataError(
                f"buffer_capacity must be >= num_envs * n_step = {num_envs * n_step}, "
                f"got {capacity}"
            )
        self.num_envs, self.num_seeds, self.gamma, self.n_step = num_envs, len(seeds), gamma, n_step
        self.reward_scale, self.reward_shift = reward_scale, reward_shift
        self.num_tables = 1 if shared else self.num_seeds
        self.device = torch.device(device)
        self.rng = Rng(seeds, "replay", self.device)
        self.inserted = Counter()
        self.progress = 0.0
        self._size = Scalar(0, self.device, torch.int64)
        self._next = Scalar(0, self.device, torch.int64)
        self._lay_out(
            self._fields((tuple(obs_shape), obs_dtype), (tuple(action_shape), action_dtype))
        )
        self._allocate()
        on_cpu = self.device.type == "cpu"
        self._arrays = {name: rows.numpy() for name, rows in self.rows.items()} if on_cpu else None
        self._staging: Staging | None = None
        self._staged: Mapping[str, Array] = {}
        self._lanes = np.arange(num_envs)
        self._offset = torch.arange(self.num_tables, device=device).unsqueeze(1) * self.capacity

    def _fields(
        self,
        obs: tuple[tuple[int, ...], torch.dtype],
        action: tuple[tuple[int, ...], torch.dtype],
    ) -> Fields:
        """Return what a row holds, given shapes and types of observations and actions."""
        return {
            "obs": obs,
            "action": action,
            "next_obs": obs,
            "reward": ((), torch.float32),
            # Numbers rather than booleans, so that they lie in the table with the rest.
            "continues": ((), torch.float32),  # 0 where the episode terminated
            "truncated": ((), torch.float32),
        }

    def _lay_out(self, fields: Fields) -> None:
        """Give fields their places; float32 ones share a table, so that a batch is one gather."""
        self._shapes = {name: shape for name, (shape, _) in fields.items()}
        self._dtypes = {name: dtype for name, (_, dtype) in fields.items()}
        self._columns: dict[str, slice | int] = {}
        width = 0
        for name, (shape, dtype) in fields.items():
            if dtype == torch.float32 and name not in self._apart:
                size = math.prod(shape)
                self._columns[name] = slice(width, width + size) if shape else width
                width += size
        self._width = width

    def _allocate(self) -> None:
        """Allocate the rows."""
        lead = (self.num_tables, self.capacity)
        table = untouched_zeros((*lead, self._width), torch.float32, self.device)
        self.rows = {
            name: table[..., self._columns[name]].view(*lead, *shape)
            if name in self._columns
            else self._own_rows(name, (*lead, *shape))
            for name, shape in self._shapes.items()
        }
        # The same memory flattened over seeds, as it is sampled from.
        self._table = table.flatten(0, 1)
        self._scalars = self._table[:, -3:]  # reward, continues, truncated
        self._loose = {
            name: rows.flatten(0, 1)
            for name, rows in self.rows.items()
            if name not in self._columns and name not in self._apart
        }

    def _own_rows(self, name: str, shape: Sequence[int]) -> Tensor:
        """Allocate the rows of a field that is not in the table."""
        return untouched_zeros(shape, self._dtypes[name], self.device)

    def __len__(self) -> int:
        """Rows that may be drawn, per seed."""
        return min(self.inserted.value, self.drawable)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return sum(rows.numel() * rows.element_size() for rows in self.rows.values())

    def parts(self) -> list[tuple[slice, float]]:
        """Return slices of the rows, each with the number of rows that it counts for in batches."""
        return [(slice(0, len(self)), float(len(self)))]

    def add(
        self,
        obs: Array,
        action: Array,
        reward: Array,
        next_obs: Array,
        terminated: Array,
        truncated: Array,
        *,
        store: Callable[[], None] | None = None,
    ) -> None:
        """Store one step of all environments, arrays `[S, n, ...]`.

        Args:
            obs: What was seen.
            action: What was done.
            reward: The task's own.
            next_obs: What was seen then, at the end of an episode its last observation.
            terminated: Where the episode ended.
            truncated: Where it was cut off.
            store: Calls `store_staged` on an accelerator, where that is part of a larger graph.
        """
        self.add_step(StepArrays(obs, action, reward, next_obs, terminated, truncated), store)

    def add_step(self, step: StepArrays, store: Callable[[], None] | None = None) -> None:
        """Store one step of all environments; see `add`."""
        if self.reward_scale != 1.0 or self.reward_shift != 0.0:
            reward = scale_rewards(step.reward, self.reward_scale, self.reward_shift)
            step = step._replace(reward=reward)
        start = self.inserted.value % self.capacity
        stop = start + self.num_envs
        if self._arrays is not None:
            for array, value in zip(self._arrays.values(), self._values(step), strict=True):
                array[:, start:stop] = value
        else:
            self._send(step, store)
        self.set_inserted(self.inserted.value + self.num_envs)
        self._added(start)

    def _values(self, step: StepArrays) -> tuple[Array, ...]:
        """Return what the rows of a step hold, in the order of the fields."""
        ended = (~step.terminated, step.truncated)
        return step.obs, step.action, step.next_obs, step.reward, *ended

    def _added(self, start: int) -> None:
        """Take note of a new step, whose rows begin at `start`; uniform sampling need not."""

    def prepare_staging(self) -> None:
        """Allocate what steps are sent from; `store_staged` may be captured after that."""
        if self._staging is None:
            self._staging = Staging(self._staged_fields(), self.device)
            self._staged = self._places_of_fields(self._staging.writable())
            self._store = Captured(self.store_staged, self.device)

    def _send(self, step: StepArrays, store: Callable[[], None] | None) -> None:
        """Store one step on another device: one transfer and one captured graph."""
        self.prepare_staging()
        assert self._staging is not None
        self._staging.writable()
        for name, value in zip(self.rows, self._values(step), strict=True):
            self._staged[name][...] = value
        before = self.inserted.value
        count, size = before + self.num_envs, min(before + self.num_envs, self.drawable)
        # A step's rows follow each other: the capacity is a multiple of their number.
        np.add(self._lanes, before % self.capacity, out=self._staged[_ROWS])
        counts = self._staged[_COUNTS]
        counts[0], counts[1] = count, size
        if store is None:
            self._store()
            self._staging.mark_sent()
        else:
            store()
        self._next.moved(count)
        self._size.moved(size)

    def _places_of_fields(self, staged: Mapping[str, Array]) -> dict[str, Array]:
        """Return where each field of a step is written to, columns of the table among them."""
        lead, table = (self.num_tables, self.num_envs), staged[_TABLE]
        columns = {
            name: table[..., column].reshape(*lead, *self._shapes[name])  # a view
            for name, column in self._columns.items()
        }
        return {**staged, **columns}

    def _staged_fields(self) -> Fields:
        """Return what one step sends to the device."""
        lead = (self.num_tables, self.num_envs)
        loose = {
            name: ((*lead, *shape), self._dtypes[name])
            for name, shape in self._shapes.items()
            if name not in self._columns
        }
        own = {_ROWS: ((self.num_envs,), torch.int64), _COUNTS: ((2,), torch.int64)}
        return {_TABLE: ((*lead, self._width), torch.float32)} | loose | own

    def store_staged(self) -> None:
        """Send a step and put it into its rows, without a number of Python's; may be captured."""
        assert self._staging is not None
        self._staging.send()
        staged = self._staging.device
        table = self._table.view(self.num_tables, self.capacity, -1)
        table.index_copy_(1, staged[_ROWS], staged[_TABLE])
        for name in self._shapes.keys() - self._columns.keys():
            self.rows[name].index_copy_(1, staged[_ROWS], staged[name])
        counts = [self._next.tensor, self._size.tensor]
        torch._foreach_copy_(counts, list(staged[_COUNTS].unbind()))

    def count_ahead(self) -> None:
        """Count a step on the device whose rows are stored later; may be captured."""
        size = self._size.tensor
        self._next.tensor.add_(self.num_envs)
        size.copy_((size + self.num_envs).clamp_(max=self.drawable))

    def draws_of_newest(self) -> list[range]:
        """Return which draws of `draw_rows` will read the step that is stored next.

        They are numbers below the size of the replay once that step is stored.
        """
        after = self.inserted.value + self.num_envs
        oldest = max(after - self.n_step * self.num_envs, 0)
        return [range(part.start, part.stop) for part in self._slices(oldest, after)]

    def set_inserted(self, count: int) -> None:
        """Say how many rows have been stored so far."""
        self.inserted.value = count
        self._size.set(len(self))
        if self.n_step > 1 or self._tracks_newest or self._staging is not None:
            self._next.set(count)

    def set_progress(self, progress: float) -> None:
        """Move what depends on the share of the run that is done; uniform sampling does not."""
        self.progress = progress

    def sample(self, batch_size: int) -> TransitionBatch:
        """Draw `batch_size` transitions per seed, uniformly and with replacement."""
        if not len(self):
            raise DataError("the replay buffer is empty: add transitions before sampling")
        return self.gather(self.draw_rows(self.rng, batch_size))

    def draw_rows(self, rng: Rng, batch_size: int) -> Tensor:
        """Draw the rows of a batch, `[S, B]`."""
        return rng.integers(self._size.tensor, batch_size)

    def _back_from_newest(self, rows: Tensor) -> Tensor:
        """Turn row numbers into numbers counted back from the newest row, or those into rows."""
        return (self._next.tensor - 1 - rows) % self.capacity

    def observation_blocks(self) -> Iterator[tuple[Tensor, float]]:
        """Give all observations once, `[S or 1, block, ...]`, and how many rows each counts for."""
        row_bytes = 4 * math.prod(self._shapes["obs"])
        for part, weight in self.parts():
            length = part.stop - part.start
            for block in blocks(length, row_bytes):
                rows = slice(part.start + block.start, part.start + block.stop)
                yield self._observations(rows), weight * (block.stop - block.start) / length

    def _observations(self, rows: slice) -> Tensor:
        return self.rows["obs"][:, rows].contiguous()

    def gather(self, index: Tensor, weight: Tensor | None = None) -> TransitionBatch:
        """Return the transitions at rows `index` `[S, B]`, as n-step ones when asked for."""
        flat = self._flat(index)
        here = self._own_fields if self.n_step > 1 else tuple(self._shapes)
        table = self._table_rows(flat, here).view(*index.shape, -1)
        if self.n_step == 1:
            reward = self._field("reward", table, flat)
            discount = self._field("continues", table, flat) * self.gamma
            last_table, flat_last = table, flat
        else:
            reward, discount, last = self._n_step(index)
            flat_last = self._flat(last)
            last_table = self._table_rows(flat_last, self._successor_fields)
            last_table = last_table.view(*index.shape, -1)
        return TransitionBatch(
            obs=self._field("obs", table, flat),
            action=self._field("action", table, flat),
            reward=reward,
            next_obs=self._field("next_obs", last_table, flat_last),
            discount=discount,
            weight=weight,
            index=index,
            **self._return_to_go(table, flat),
            **self._next_action(last_table, flat_last),
        )

    def _return_to_go(self, table: Tensor, flat: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the batch's field of that name, where a learner asked for it.

        Args:
            table: Of the rows that were drawn, `[S, B, width]`.
            flat: Their numbers.
        """
        return {}

    def _next_action(self, table: Tensor, flat: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the batch's fields of the next action; only a dataset has them, when asked to.

        Args:
            table: Of the rows whose successor bootstraps, `[S, B, width]`.
            flat: Their numbers.
        """
        return {}

    def _flat(self, index: Tensor) -> Tensor:
        """Row numbers in the tables that are flattened over seeds, from numbers `[S, B]`."""
        return (index if self.num_tables == 1 else index + self._offset).flatten()

    def _field(self, name: str, table: Tensor, flat: Tensor) -> Tensor:
        """Return one field of drawn rows `[S, B, ...]`: columns of their table, or its own rows."""
        shape = self._shapes[name]
        if name in self._columns:
            columns = table[..., self._columns[name]]
            return columns if len(shape) < 2 else columns.view(*columns.shape[:-1], *shape)
        return self._loose_rows(name, flat).view(*table.shape[:2], *shape)

    # Where rows are read: overridden where they lie elsewhere.

    def _table_rows(self, flat: Tensor, fields: Sequence[str]) -> Tensor:  # noqa: ARG002
        """Return rows of the table `[R, width]`, of which at least `fields` are filled in."""
        return self._table.index_select(0, flat)

    def _scalar_rows(self, flat: Tensor) -> Tensor:
        """Return reward, continues and truncated `[R, 3]`."""
        return self._scalars.index_select(0, flat)

    def _loose_rows(self, name: str, flat: Tensor) -> Tensor:
        """Return rows of a field that is not in the table, `[R, ...]`."""
        return self._loose[name].index_select(0, flat)

    def _n_step(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum up to n rewards from `index`, stopping at an episode's end or the newest row.

        Returns:
            The sum, the discount of the bootstrap, and the row whose successor bootstraps, all
            `[S, B]`.
        """
        steps, rows = self._later_rows(index)
        scalars = self._scalar_rows(self._flat(rows.flatten(1)))
        reward, continues, truncated = scalars.view(*rows.shape, 3).unbind(-1)
        terminated = 1 - continues
        ended = torch.maximum(terminated, truncated)
        ahead = self._back_from_newest(index) // self.num_envs
        total, discount, place = self._summed(steps, reward, terminated, ended, ahead)
        return total, discount, rows.gather(-1, place).squeeze(-1)

    def _later_rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of n steps `[n]` and their rows from `index` on, `[S, B, n]`."""
        steps = torch.arange(self.n_step, device=self.device)
        return steps, (index.unsqueeze(-1) + steps * self.num_envs) % self.capacity

    def _summed(
        self, steps: Tensor, reward: Tensor, terminated: Tensor, ended: Tensor, ahead: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the rewards of n steps.

        Args:
            steps: Their numbers, `[n]`.
            reward: Of each, `[S, B, n]`.
            terminated: 1 where the episode terminated.
            ended: 1 where no step of the episode follows.
            ahead: How many steps after the first have been stored, `[S, B]`.

        Returns:
            The sum and the discount of the bootstrap, `[S, B]`, and which of the steps was the
            last, `[S, B, 1]`.
        """
        # A step counts while no earlier one ended the episode and it has been stored.
        alive = (ended.cumsum(-1) - ended == 0) & (steps <= ahead.unsqueeze(-1))  # [S, B, n]
        powers = self.gamma ** steps.to(torch.float32)
        count = alive.sum(-1)  # at least 1
        stopped = (terminated * alive).amax(-1)
        discount = (1 - stopped) * self.gamma ** count.to(torch.float32)
        return (reward * powers * alive).sum(-1), discount, count.unsqueeze(-1) - 1

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Take new priorities of rows; uniform sampling has no use for them."""

    def keep_beliefs(self, index: Tensor, beliefs: Tensor) -> None:
        """Take what a recurrent model believed at rows; single transitions have no use for it."""

    # State: small parts in `state_dict`, rows as segments that checkpoints share.

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows."""
        return {"inserted": self.inserted.state_dict(), "rng": self.rng.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything but the rows.

        Raises:
            CheckpointError: When the state is of another kind of buffer, or of other data.
        """
        require_same_keys(self.state_dict(), state, type(self).__name__)
        self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take in a state that has the right keys."""
        self.set_inserted(int(state["inserted"]["value"]))
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
        parts = self._slices(start, stop)
        return {
            name: torch.cat([rows[:, part] for part in parts], 1)
            for name, rows in self.rows.items()
        }

    def load_rows(self, start: int, saved: Mapping[str, Tensor]) -> None:
        """Put rows back at their insertion numbers."""
        require_same_keys(self.rows, saved, type(self).__name__)
        done = 0
        for part in self._slices(start, start + saved["reward"].shape[1]):
            size = part.stop - part.start
            for name, rows in self.rows.items():
                rows[:, part] = saved[name][:, done : done + size].to(self.device)
            done += size

    def _slices(self, start: int, stop: int) -> list[slice]:
        """Where rows by insertion number lie in the ring: in one piece, or in two.

        Slices, because rows are columns of a wider table, of which an indexed read copies all.
        """
        first = start % self.capacity
        end = first + stop - start
        if end <= self.capacity:
            return [slice(first, end)]
        return [slice(first, self.capacity), slice(0, end - self.capacity)]

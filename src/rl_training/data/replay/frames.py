"""Replay of images that keeps each frame once.

An observation is a stack of K frames, newest last, filled with the first frame at the start of an
episode.  A row holds only the newest frame of its observation and its age in the episode (up to
K - 1); stacks are put together when sampling, from the rows of the steps before.  The successor of
a row shows the frame of the next row, save where there is none: after a cut-off episode its last
frame lies in a slot of its own, and so does that of the newest step.  A terminated row has no
future: its `next_obs` repeats its last frame.

Beyond the rows that may be drawn, K - 1 older steps are kept, so that the oldest have their stacks.

Shapes: S seeds, R rows, B batch, K frames, c channels of a frame, n environments per seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay.storage import (
    Array,
    Fields,
    ReplayBuffer,
    StepArrays,
    untouched_zeros,
)
from rl_training.errors import DataError
from rl_training.rng import Rng

TERMINATED, CONTINUES = -2.0, -1.0
"""What a row says about its successor in place of a slot."""
NEVER = -(1 << 62)
WORD = torch.int64
_NEWEST = "newest"
SHARE_OF_CUTS = 16
"""Cut-off episodes are expected at most once in this many steps, where no limit is known."""


class FrameReplayBuffer(ReplayBuffer):
    """Ring of transitions whose frames are stored once, with uniform sampling."""

    read_only: ClassVar[tuple[str, ...]] = (*ReplayBuffer.read_only, "store", "_frames")
    _apart = ("frame",)
    _tracks_newest = True

    def __init__(
        self,
        capacity: int,
        obs_shape: Sequence[int],
        action_shape: Sequence[int] = (),
        *,
        frame_stack: int = 1,
        max_episode_steps: int | None = None,
        num_envs: int = 1,
        **options: Any,
    ) -> None:
        """Allocate the storage.

        Args:
            capacity: Rows that may be drawn, per seed.
            obs_shape: `[K c, H, W]`.
            action_shape: Shape of an action.
            frame_stack: K.
            max_episode_steps: Steps after which episodes are cut off, where that is known.
            num_envs: n.
            **options: As for `ReplayBuffer`.
        """
        self.frame_stack = frame_stack
        assert obs_shape[0] % frame_stack == 0, (obs_shape, frame_stack)
        self.frame_channels = obs_shape[0] // frame_stack
        drawable = capacity - capacity % num_envs
        share = min(max_episode_steps or SHARE_OF_CUTS, drawable)
        self.num_slots = drawable // share + num_envs
        rows = drawable + (frame_stack - 1) * num_envs
        super().__init__(rows, obs_shape, action_shape, num_envs=num_envs, **options)
        self.drawable = drawable
        lead = (self.num_seeds, num_envs)
        self._age: Array = np.zeros(lead, np.int64)
        self._cuts = np.zeros(self.num_seeds, np.int64)
        """Slots used so far, per seed."""
        self._cut_at = np.full((self.num_seeds, self.num_slots), NEVER, np.int64)
        """Insertion number of the row that each slot belongs to."""

    def _fields(
        self,
        obs: tuple[tuple[int, ...], torch.dtype],
        action: tuple[tuple[int, ...], torch.dtype],
    ) -> Fields:
        shape, dtype = obs
        return {
            "frame": ((self.frame_channels, *shape[1:]), dtype),
            "action": action,
            "age": ((), torch.float32),
            "slot": ((), torch.float32),  # of the last frame of a cut-off episode
            "reward": ((), torch.float32),
            "continues": ((), torch.float32),
            "truncated": ((), torch.float32),
        }

    def _allocate(self) -> None:
        """Allocate rows, and behind their frames those of newest steps and cut-off episodes."""
        frame, dtype = self._shapes["frame"], self._dtypes["frame"]
        assert dtype == torch.uint8, "frames lie in a storage of their own, not in the table"
        places = self.capacity + self.num_envs + self.num_slots
        self.store = untouched_zeros((self.num_tables, places, *frame), dtype, self.device)
        self._frames = self.store.flatten(0, 1)
        self._places = torch.arange(self.num_tables, device=self.device).view(-1, 1, 1) * places
        super()._allocate()

    def _own_rows(self, name: str, shape: Sequence[int]) -> Tensor:
        return self.store[:, : self.capacity] if name == "frame" else super()._own_rows(name, shape)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        extra = self.store[:, self.capacity :]
        return super().num_bytes + extra.numel() * extra.element_size()

    def _values(self, step: StepArrays) -> tuple[Array, ...]:
        """Return what the rows of a step hold, and keep the frames that come after it."""
        terminated, truncated = step.terminated, step.truncated
        newest = step.next_obs[:, :, -self.frame_channels :]
        self._show_newest(newest)
        slot = np.where(terminated, TERMINATED, CONTINUES)
        cut = truncated & ~terminated
        for seed, env in zip(*(axis.tolist() for axis in cut.nonzero()), strict=True):
            slot[seed, env] = self._keep(seed, env, newest[seed, env])
        age = self._age
        self._age = np.where(terminated | truncated, 0, np.minimum(age + 1, self.frame_stack - 1))
        frame = step.obs[:, :, -self.frame_channels :]
        return frame, step.action, age, slot, step.reward, ~terminated, truncated

    def _show_newest(self, frames: Array) -> None:
        """Keep the frames after the newest step, which no row holds yet, `[S, n, ...]`."""
        if self._staging is not None:
            self._staged[_NEWEST][...] = frames
        else:
            self._newest.copy_(torch.from_numpy(np.ascontiguousarray(frames)))

    @property
    def _newest(self) -> Tensor:
        return self.store[:, self.capacity : self.capacity + self.num_envs]

    def _staged_fields(self) -> Fields:
        own = super()._staged_fields()
        return {**own, _NEWEST: own["frame"]}

    def store_staged(self) -> None:
        """Send a step, with the frames that follow it."""
        super().store_staged()
        assert self._staging is not None
        self._newest.copy_(self._staging.device[_NEWEST])

    def _keep(self, seed: int, env: int, frame: Array) -> int:
        """Keep the last frame of a cut-off episode; returns its slot."""
        slot = int(self._cuts[seed] % self.num_slots)
        if self._cut_at[seed, slot] >= self.inserted.value - self.drawable + self.num_envs:
            raise DataError(
                f"the replay keeps the last frames of {self.num_slots} cut-off episodes, but more "
                f"were cut off within {self.drawable} steps; give the task its limit as "
                "env_kwargs.max_episode_steps, so that there is room for them"
            )
        self._cuts[seed] += 1
        self._cut_at[seed, slot] = self.inserted.value + env
        place = self.capacity + self.num_envs + slot
        source = torch.from_numpy(np.ascontiguousarray(frame))
        self.store[seed, place] = source.to(self.device, self.store.dtype)
        return slot

    def draw_rows(self, rng: Rng, batch_size: int) -> Tensor:
        """Draw the rows of a batch, `[S, B]`, counted back from the newest."""
        return self._back_from_newest(rng.integers(self._size.tensor, batch_size))

    def draws_of_newest(self) -> list[range]:
        """Return which draws will read the step that is stored next, if only its first frame."""
        return [range((self.n_step + 1) * self.num_envs)]

    def gather(self, index: Tensor, weight: Tensor | None = None) -> TransitionBatch:
        """Return the transitions at rows `index` `[S, B]`, as n-step ones when asked for."""
        flat = self._flat(index)
        table = self._table_rows(flat, tuple(self._shapes)).view(*index.shape, -1)
        places = self._stack(index, table)
        if self.n_step == 1:
            reward = self._field("reward", table, flat)
            discount = self._field("continues", table, flat) * self.gamma
            both = self._images(torch.cat((places, self._successor(index, table)), -1))
            obs, next_obs = both[:, :, :-1], both[:, :, 1:]  # the frames between are shared
        else:
            reward, discount, last = self._n_step(index)
            last_table = self._table_rows(self._flat(last), ("age", "slot")).view(*last.shape, -1)
            ends = torch.cat((self._stack(last, last_table), self._successor(last, last_table)), -1)
            obs, next_obs = self._images(places), self._images(ends[..., 1:])
        return TransitionBatch(
            obs=obs.flatten(2, 3),
            action=self._field("action", table, flat),
            reward=reward,
            next_obs=next_obs.flatten(2, 3),
            discount=discount,
            weight=weight,
            index=index,
        )

    def _stack(self, index: Tensor, table: Tensor) -> Tensor:
        """Places of the frames of observations `[S, B, K]`, oldest first."""
        age = table[..., self._columns["age"]].long().unsqueeze(-1)
        back = torch.arange(self.frame_stack - 1, -1, -1, device=self.device)
        return (index.unsqueeze(-1) - torch.minimum(back, age) * self.num_envs) % self.capacity

    def _successor(self, index: Tensor, table: Tensor) -> Tensor:
        """Places of the newest frames of successors `[S, B, 1]`."""
        slot = table[..., self._columns["slot"]].long()
        newest = self._back_from_newest(index) < self.num_envs
        after = torch.where(
            newest,
            self.capacity + index % self.num_envs,
            (index + self.num_envs) % self.capacity,
        )
        kept = torch.where(slot >= 0, self.capacity + self.num_envs + slot, after)
        return torch.where(slot == int(TERMINATED), index, kept).unsqueeze(-1)

    def _images(self, places: Tensor) -> Tensor:
        """Frames at places `[S, B, k]`, as `[S, B, k, c, H, W]`."""
        flat = (places + self._places).flatten()
        rows = self._frames.flatten(1)
        if rows.shape[1] % WORD.itemsize == 0 and rows.device.type == "cpu":
            # By words, and as a step of its own: a compiler that joins the gathering with what
            # comes after would do it again for every use, pixel by pixel.
            found = rows.view(WORD).index_select(0, flat).view(rows.dtype)
        else:
            found = rows.index_select(0, flat)
        return found.view(*places.shape, *self._shapes["frame"])

    # State: rows in segments, as ever; what else there is, is small.

    def segment_range(self) -> tuple[int, int]:
        """Return the insertion number of the oldest row kept and of the next row."""
        count = self.inserted.value
        return count - min(count, self.capacity), count

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows: also the frames that no row holds."""
        used = min(int(self._cuts.max(initial=0)), self.num_slots)
        kept = self.capacity + self.num_envs + used
        own = {
            "frames": self.store[:, self.capacity : kept],
            "age": self._age,
            "cuts": self._cuts,
            "cut_at": self._cut_at,
        }
        return super().state_dict() | own

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        frames = torch.as_tensor(state["frames"])
        self.store[:, self.capacity : self.capacity + frames.shape[1]] = frames.to(self.device)
        self._age, self._cuts = np.array(state["age"]), np.array(state["cuts"])
        self._cut_at = np.array(state["cut_at"])


class PrioritizedFrameReplayBuffer(PrioritizedReplayBuffer, FrameReplayBuffer):
    """Ring of transitions whose frames are stored once, drawn in proportion to their priority."""

    def _added(self, start: int) -> None:
        """Give new rows their priority; rows kept for their frames alone are drawn no more."""
        super()._added(start)
        first = self.inserted.value - self.drawable - self.num_envs
        if first >= 0 and self.capacity > self.drawable:
            rows = torch.arange(first, first + self.num_envs, device=self.device) % self.capacity
            nothing = torch.zeros(1, 1, dtype=torch.float64, device=self.device)
            self._set(rows.expand(self.num_seeds, -1), nothing)

"""Replay of sequences, for learners with a memory.

A row holds what a step arrived at: the observation after it, the action and reward that led there,
and whether that ended the episode.  The first observation of an episode has no such step; it lies
in a slot behind the rows, and a sequence shows it before the row that follows it.  So an episode of
L steps is a sequence of L + 1 observations, the last of them terminal or cut off.

Sequences run on across ends of episodes, and from the newest row back to the oldest; wherever the
past of an observation is not the one before it, `is_first` says so.  At the beginning of a sequence
it does so too, unless the learner has left there what it believed after the row before: a learner
hands back its beliefs about the rows it learned from (`keep_beliefs`), and a sequence that begins
after such a row comes with that belief (`SequenceBatch.start`).

Rows are drawn uniformly, so that every row is equally likely at every place of a sequence; with
`newest_first` stretches of T new steps that nobody has learned from yet are handed out before.

Slots are used in turn.  When episodes are so short that they run out, the oldest first observations
are lost, and their episodes begin with the second.

Shapes: S seeds, C capacity, B batch, T length of a sequence, n environments per seed, F entries of
a belief.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_training.data.batch import SequenceBatch
from rl_training.data.replay.storage import (
    Array,
    Fields,
    ReplayBuffer,
    StepArrays,
    untouched_zeros,
)
from rl_training.errors import DataError

NOT_FIRST = -1.0
"""What a row says in place of a slot when its step did not begin an episode."""
SHARE_OF_STARTS = 4
"""There is a slot for one start in this many steps, where their number is not given."""
NEVER = -1


class RecurrentReplayBuffer(ReplayBuffer):
    """Ring of steps that is drawn from in sequences."""

    read_only: ClassVar[tuple[str, ...]] = (
        *ReplayBuffer.read_only,
        "store",
        "_observations_flat",
        "_owners",
    )
    _apart = ("obs",)
    _tracks_newest = True
    foreseeable = False

    def __init__(
        self,
        capacity: int,
        obs_shape: Sequence[int],
        action_shape: Sequence[int] = (),
        *,
        sequence_length: int = 64,
        num_starts: int | None = None,
        belief_size: int = 0,
        newest_first: bool = False,
        num_envs: int = 1,
        **options: Any,
    ) -> None:
        """Allocate the storage.

        Args:
            capacity: Steps kept per seed, rounded down to a multiple of `num_envs`.
            obs_shape: Shape of an observation.
            action_shape: Shape of an action; empty for discrete ones.
            sequence_length: T.
            num_starts: First observations kept; None is one for 4 steps.
            belief_size: F; 0 keeps no beliefs.
            newest_first: Hand out new stretches first.
            num_envs: n.
            **options: As for `ReplayBuffer`; `obs_dtype=torch.uint8` keeps pixels small.

        Raises:
            DataError: When the capacity is smaller than one sequence of every environment.
        """
        if capacity < sequence_length * num_envs:
            raise DataError(
                f"buffer_capacity must be >= sequence_length * num_envs = "
                f"{sequence_length * num_envs}, got {capacity}"
            )
        self.sequence_length, self.belief_size = sequence_length, belief_size
        self.newest_first = newest_first
        self.num_slots = num_starts or capacity // SHARE_OF_STARTS + num_envs
        super().__init__(capacity, obs_shape, action_shape, num_envs=num_envs, **options)
        self._at_start = np.ones((self.num_seeds, num_envs), np.bool_)
        self._starts = np.zeros(self.num_seeds, np.int64)
        """Episodes begun so far, per seed."""
        self._owners = torch.full(
            (self.num_seeds, self.num_slots), NEVER, dtype=torch.int64, device=self.device
        )
        """Insertion number of the row that each slot belongs to."""
        self._restored = False
        self._handed_out = torch.zeros(self.num_seeds, 1, dtype=torch.int64, device=self.device)
        """New stretches that were drawn first, or overwritten before that, `[S, 1]`."""
        # A last row for what belongs to no row. Halves are exact for latents of classes.
        places = self.capacity + 1
        self._beliefs = untouched_zeros(
            (self.num_seeds, places if belief_size else 0, belief_size), torch.float16, self.device
        )
        self._believed = torch.full(
            self._beliefs.shape[:2], NEVER, dtype=torch.int64, device=self.device
        )
        """Insertion number of the row that each belief is about."""

    def _fields(
        self,
        obs: tuple[tuple[int, ...], torch.dtype],
        action: tuple[tuple[int, ...], torch.dtype],
    ) -> Fields:
        return {
            "obs": obs,
            "action": action,
            "slot": ((), torch.float32),  # of the observation before, where that is a first one
            "reward": ((), torch.float32),
            "continues": ((), torch.float32),
            "truncated": ((), torch.float32),
        }

    def _allocate(self) -> None:
        """Allocate rows, and behind their observations the first ones of episodes."""
        places = self.capacity + self.num_slots
        shape = (self.num_tables, places, *self._shapes["obs"])
        self.store = untouched_zeros(shape, self._dtypes["obs"], self.device)
        self._observations_flat = self.store.flatten(0, 1)
        self._places = torch.arange(self.num_tables, device=self.device).view(-1, 1, 1) * places
        super()._allocate()

    def _own_rows(self, name: str, shape: Sequence[int]) -> Tensor:
        return self.store[:, : self.capacity] if name == "obs" else super()._own_rows(name, shape)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows and slots."""
        extra = (self.store[:, self.capacity :], self._beliefs)
        return super().num_bytes + sum(part.numel() * part.element_size() for part in extra)

    def _values(self, step: StepArrays) -> tuple[Array, ...]:
        """Return what the rows of a step hold, and keep the observations that begin episodes."""
        begins = self._at_start
        if self._restored:
            begins, self._restored = begins | self._went_elsewhere(step.obs), False
        slot = np.full(begins.shape, NOT_FIRST, np.float32)
        for seed, env in zip(*(axis.tolist() for axis in begins.nonzero()), strict=True):
            slot[seed, env] = self._keep(seed, env, step.obs[seed, env])
        self._at_start = step.terminated | step.truncated
        ended = (~step.terminated, step.truncated)
        return step.next_obs, step.action, slot, step.reward, *ended

    def _keep(self, seed: int, env: int, obs: Array) -> int:
        """Keep the first observation of an episode; returns its slot."""
        slot = int(self._starts[seed] % self.num_slots)
        self._starts[seed] += 1
        self._owners[seed, slot] = self.inserted.value + env
        source = torch.from_numpy(np.ascontiguousarray(obs))
        self.store[seed, self.capacity + slot] = source.to(self.device, self.store.dtype)
        return slot

    def _went_elsewhere(self, obs: Array) -> Array:
        """Tell where a run that was resumed does not continue from its newest rows, `[S, n]`."""
        if self.inserted.value == 0:
            return np.zeros(obs.shape[:2], np.bool_)
        start = (self.inserted.value - self.num_envs) % self.capacity
        newest = self.store[:, start : start + self.num_envs].cpu().numpy()
        differs: Array = (newest != obs.astype(newest.dtype)).reshape(*obs.shape[:2], -1).any(-1)
        return differs

    def sample(self, batch_size: int) -> SequenceBatch:  # type: ignore[override]  # of sequences
        """Draw `batch_size` sequences per seed, uniformly and with replacement, or new ones."""
        if not len(self):
            raise DataError("the replay buffer is empty: add steps before sampling")
        index = self.draw_rows(self.rng, batch_size)
        return self.gather(self._with_newest(index) if self.newest_first else index)

    def _with_newest(self, index: Tensor) -> Tensor:
        """Put the beginnings of new stretches in front, `[S, B]`, and count them as handed out.

        Stretch k is of environment k % n and begins with step T (k // n) of the run.
        """
        stored = self._next.tensor // self.num_envs  # steps so far
        oldest = stored - self._size.tensor // self.num_envs
        complete = stored // self.sequence_length * self.num_envs
        lost = -(-oldest // self.sequence_length) * self.num_envs
        first = torch.maximum(self._handed_out, lost)
        number = first + torch.arange(index.shape[1], device=self.device)  # [S, B]
        begins = number // self.num_envs * self.sequence_length - oldest
        rows = begins * self.num_envs + number % self.num_envs
        self._handed_out.copy_(torch.minimum(first + index.shape[1], complete.clamp(min=0)))
        return torch.where(number < complete, rows, index)

    def gather(  # type: ignore[override]  # of sequences
        self,
        index: Tensor,
        weight: Tensor | None = None,  # noqa: ARG002 - sequences have none
    ) -> SequenceBatch:
        """Return the sequences that begin at rows `index` `[S, B]`, counted from the oldest."""
        rows, before, seam = self._walk(index)
        slots = self._table_rows(self._flat(rows.flatten(1)), ("slot",))
        slot = slots.view(*rows.shape, -1)[..., self._columns["slot"]].long()
        shown = self._is_kept(rows, slot)
        unknown = (seam | (slot >= 0)) & ~shown
        start = None
        if self.belief_size:
            belief, is_known = self._belief_of(before)
            # The oldest row is its own beginning: the one before it is the newest.
            has_past = is_known & (slot[..., 0] < 0) & (before != rows[..., 0])
            unknown = torch.cat((unknown[..., :1] & ~has_past.unsqueeze(-1), unknown[..., 1:]), -1)
            start = belief * has_past.unsqueeze(-1)
        place, is_start = _places_of(shown)
        row, slot, unknown = (part.gather(-1, place) for part in (rows, slot, unknown))
        table = self._table_rows(self._flat(row.flatten(1)), tuple(self._shapes))
        table = table.view(*row.shape, -1)
        steps = (~is_start).to(torch.float32)  # a first observation comes without a reward
        return SequenceBatch(
            obs=self._shown_at(torch.where(is_start, self.capacity + slot, row)),
            action=self._action_at(row, table),
            reward=table[..., self._columns["reward"]] * steps,
            is_first=is_start | unknown,
            terminated=(table[..., self._columns["continues"]] == 0) & ~is_start,
            index=torch.where(is_start, NEVER, row) if self.belief_size else None,
            start=start,
        )

    def keep_beliefs(self, index: Tensor, beliefs: Tensor) -> None:
        """Keep what a learner believed after some rows, for sequences that begin after them.

        Of a row that is in a batch twice the later belief counts, on every device.

        Args:
            index: `SequenceBatch.index`, `[S, B, T]`; -1 belongs to no row.
            beliefs: `[S, B, T, F]`.
        """
        row = index.flatten(1)
        is_row = row >= 0
        place = torch.where(is_row, row, self.capacity)  # [S, N]
        order = torch.arange(place.shape[1], device=self.device).expand_as(place)
        latest = torch.zeros_like(self._believed).scatter_reduce(1, place, order, "amax")
        chosen = latest.gather(1, place)
        offset = torch.arange(self.num_seeds, device=self.device).unsqueeze(1)
        values = beliefs.flatten(0, 2).index_select(0, (chosen + offset * row.shape[1]).flatten())
        values = values.to(self._beliefs.dtype) * is_row.flatten().unsqueeze(-1)
        flat = (place + offset * self._beliefs.shape[1]).flatten()
        self._beliefs.view(-1, self.belief_size).index_copy_(0, flat, values)
        self._believed.scatter_(1, place, torch.where(is_row, self._numbers(row), NEVER))

    def _belief_of(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Beliefs about rows `[S, B]`, `[S, B, F]`, and whether there are any, `[S, B]`."""
        offset = torch.arange(self.num_seeds, device=self.device).unsqueeze(1)
        flat = (row + offset * self._beliefs.shape[1]).flatten()
        beliefs = self._beliefs.view(-1, self.belief_size).index_select(0, flat)
        is_known = self._believed.gather(1, row) == self._numbers(row)
        return beliefs.view(*row.shape, -1).float(), is_known

    def _numbers(self, rows: Tensor) -> Tensor:
        """Return the insertion numbers of rows of the ring."""
        newest = self._next.tensor - 1
        return newest - (newest - rows) % self.capacity

    def _walk(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the T steps from `index` on `[S, B, T]`, and the row before them `[S, B]`.

        Also where the step before is not the one in front.  After the newest step comes the oldest,
        which is its own row before.
        """
        env, first = index % self.num_envs, index // self.num_envs
        count = (self._size.tensor // self.num_envs).clamp(min=1)
        oldest = self._next.tensor // self.num_envs - count
        steps = torch.arange(self.sequence_length, device=self.device)
        number = (first.unsqueeze(-1) + steps) % count  # 0 is the oldest step
        ring = (oldest + number) % (self.capacity // self.num_envs)
        rows = ring * self.num_envs + env.unsqueeze(-1)
        earlier = (oldest + (first - 1).clamp(min=0)) % (self.capacity // self.num_envs)
        return rows, earlier * self.num_envs + env, (steps == 0) | (number == 0)

    def _is_kept(self, rows: Tensor, slot: Tensor) -> Tensor:
        """Tell which rows begin an episode whose first observation is still there."""
        inserted = self._numbers(rows)
        held = self._owners.gather(1, slot.clamp(min=0).flatten(1)).view_as(slot)
        return (slot >= 0) & (held == inserted)

    def _shown_at(self, places: Tensor) -> Tensor:
        """Observations at places `[S, B, T]` of the store."""
        flat = (places + self._places).flatten()
        return self._observations_flat.index_select(0, flat).view(
            *places.shape, *self._shapes["obs"]
        )

    def _action_at(self, row: Tensor, table: Tensor) -> Tensor:
        if "action" in self._columns:
            return table[..., self._columns["action"]].view(*row.shape, *self._shapes["action"])
        return self._loose_rows("action", self._flat(row.flatten(1))).view(
            *row.shape, *self._shapes["action"]
        )

    # State: rows in segments, as ever; beside them the first observations that are in use.

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows: also the first observations of episodes."""
        used = min(int(self._starts.max(initial=0)), self.num_slots)
        own = {
            "first_obs": self.store[:, self.capacity : self.capacity + used],
            "owners": self._owners[:, :used],
            "starts": self._starts,
            "at_start": self._at_start,
            "handed_out": self._handed_out,
        }
        if self.belief_size:
            stored = min(self.inserted.value, self.capacity)
            own |= {
                "beliefs": self._beliefs[:, :stored],
                "believed": self._believed[:, :stored],
            }
        return super().state_dict() | own

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        kept = torch.as_tensor(state["first_obs"]).to(self.device)
        self.store[:, self.capacity : self.capacity + kept.shape[1]] = kept
        self._owners.fill_(NEVER)
        self._owners[:, : kept.shape[1]] = torch.as_tensor(state["owners"]).to(self.device)
        self._starts, self._at_start = np.array(state["starts"]), np.array(state["at_start"])
        self._restored = True
        self._handed_out.copy_(torch.as_tensor(state["handed_out"]))
        if self.belief_size:
            beliefs = torch.as_tensor(state["beliefs"])
            self._beliefs[:, : beliefs.shape[1]] = beliefs.to(self.device)
            self._believed.fill_(NEVER)
            self._believed[:, : beliefs.shape[1]] = torch.as_tensor(state["believed"]).to(
                self.device
            )


def _places_of(shown: Tensor) -> tuple[Tensor, Tensor]:
    """Put first observations in front of the steps that follow them.

    Args:
        shown: Which of T steps has one, `[S, B, T]`.

    Returns:
        For each of T places of the sequence the step that is there, and whether it is that
        step's first observation.
    """
    steps = torch.arange(shown.shape[-1], device=shown.device)
    starts = steps + shown.long().cumsum(-1) - shown.long()  # where a step's share begins
    place = (starts.unsqueeze(-2) <= steps.unsqueeze(-1)).sum(-1) - 1  # [S, B, T]
    is_start = shown.gather(-1, place) & (starts.gather(-1, place) == steps)
    return place, is_start

"""Hindsight experience replay (Andrychowicz et al., 2017, arXiv:1707.01495) as a way of drawing.

A drawn transition keeps its goal with probability 1 / (k + 1); otherwise its goal becomes what the
same episode achieved after another of its steps (Sec. 3.3, 4.5), and its reward is computed for
that goal:

- `future`: a step drawn uniformly from this one to the last,
- `final`: the last step,
- `episode`: a step drawn uniformly from the whole episode.

What was achieved after a step is in the step's `next_obs`, so the goal of `future` may be reached
by the very transition that is drawn.  Of an episode in progress the newest step counts as the last;
of one whose beginning has been overwritten, only what is left counts.

Rows stay as they happened, so checkpoints share them, and each draw has a goal of its own.  An
n-step return is paid for one goal throughout; where the task ends at its goal, so does the sum.

Deviations: Algorithm 1 stores k more transitions for every one; here, as in the code that the
authors released, a goal is drawn whenever a transition is.

Shapes: S seeds, C rows of a ring, B batch, G columns of a goal, N steps summed, n environments per
seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay.storage import ReplayBuffer, StepArrays
from rl_training.state import copy_tensor, require_same_keys

Strategy: TypeAlias = Literal["future", "final", "episode"]
UNKNOWN = -1
"""Stands for the number of steps to the end of an episode in progress."""
LARGEST = 2**31 - 1


class Goals(Protocol):
    """A task's goals: where they are in the rows of observations, and what is paid for them."""

    @property
    def achieved(self) -> slice:
        """Columns of what has been achieved."""
        ...

    @property
    def desired(self) -> slice:
        """As many columns of what is wanted."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether the host is asked, so that no compiled update can."""
        ...

    def __call__(self, achieved: Tensor, desired: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what is learned from for goals as rows have them, `[..., G]`.

        Returns:
            Rewards `[...]`, and where the goal ends the episode; None where ends stay as they are.
        """
        ...


class EpisodePlaces:
    """Where each row of a ring is in its episode."""

    def __init__(self, num_seeds: int, capacity: int, num_envs: int, device: torch.device) -> None:
        """Begin with an empty ring.

        Args:
            num_seeds: S.
            capacity: C.
            num_envs: n, rows of a step.
            device: Where the places are read.
        """
        self.ages = torch.zeros(num_seeds, capacity, dtype=torch.int32, device=device)
        """Steps of the episode before each row; its oldest rows may be overwritten by now."""
        self.left = torch.full((num_seeds, capacity), UNKNOWN, dtype=torch.int32, device=device)
        """Steps of the episode after each row, `UNKNOWN` until it has ended."""
        self.running = torch.zeros(num_seeds, num_envs, dtype=torch.int32)
        """Steps of the episodes in progress."""

    def add(self, start: int, ended: NDArray[np.bool_]) -> None:
        """Take note of a step, whose rows begin at `start`; `ended` `[S, n]` are last ones."""
        stop = start + self.running.shape[1]
        self.ages[:, start:stop] = self.running.to(self.ages.device)
        self.left[:, start:stop] = UNKNOWN
        self.running += 1
        if ended.any():
            self.close(start, ended)

    def close(self, start: int, ended: NDArray[np.bool_]) -> None:
        """End episodes with the step whose rows begin at `start`."""
        capacity, num_envs = self.left.shape[1], self.running.shape[1]
        for seed, env in zip(*(axis.tolist() for axis in ended.nonzero()), strict=True):
            steps = min(int(self.running[seed, env]), capacity // num_envs)
            back = np.arange(steps)
            rows = torch.from_numpy((start + env - num_envs * back) % capacity)
            left = torch.from_numpy(back.astype(np.int32))
            self.left[seed, rows.to(self.left.device)] = left.to(self.left.device)
            self.running[seed, env] = 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return all three."""
        return {"ages": self.ages, "left": self.left, "running": self.running}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore them."""
        require_same_keys(self.state_dict(), state, "EpisodePlaces")
        for name, tensor in self.state_dict().items():
            copy_tensor(tensor, state[name], name)


class Hindsight(ReplayBuffer):
    """Part of a buffer: drawn transitions are shown with goals that were achieved later."""

    read_only = (*ReplayBuffer.read_only, "places", "_next_goals")
    stores_by_graph = False
    foreseeable = False
    _tracks_newest = True

    def __init__(
        self, *arguments: Any, goals: Goals, strategy: Strategy, share: float, **options: Any
    ) -> None:
        """Allocate the storage.

        Args:
            *arguments: As for `ReplayBuffer`.
            goals: Where they are in a row, and what is paid for them.
            strategy: Which goals take the place of the drawn ones.
            share: Of a batch that gets other goals.
            **options: As for `ReplayBuffer` or its prioritized kind.
        """
        super().__init__(*arguments, **options)
        self.goals, self.strategy, self.share = goals, strategy, share
        self.drawn_outside = goals.on_host
        sizes = self.num_seeds, self.capacity, self.num_envs
        self.places = EpisodePlaces(*sizes, self.device)
        achieved = self.rows["next_obs"].flatten(0, 1)[:, goals.achieved]
        self._next_goals = achieved  # [S * C, G], a view
        self._is_restored = False

    def add_step(self, step: StepArrays, store: Callable[[], None] | None = None) -> None:
        """Store one step of all environments, and where it is in its episode."""
        start = self.inserted.value % self.capacity
        if self._is_restored:
            self._close_what_was_left(step.obs)
        super().add_step(step, store)
        self.places.add(start, step.terminated | step.truncated)

    def _close_what_was_left(self, obs: NDArray[Any]) -> None:
        """End episodes that a resumed run could not continue with, as it began new ones.

        Where an episode continues, what is seen now is what its last step arrived at.
        """
        self._is_restored = False
        if not self.inserted.value:
            return
        start = (self.inserted.value - self.num_envs) % self.capacity
        last = self.rows["next_obs"][:, start : start + self.num_envs].cpu().numpy()
        differs = (last != obs).reshape(*last.shape[:2], -1).any(-1)
        self.places.close(start, differs & (self.places.running.numpy() > 0))

    def gather(self, index: Tensor, weight: Tensor | None = None) -> TransitionBatch:
        """Return the transitions at rows `index` `[S, B]`, most of them with other goals."""
        flat = self._flat(index)
        table = self._table_rows(flat, self._own_fields).view(*index.shape, -1)
        obs = self._field("obs", table, flat)
        after = self._steps_left(index)
        chosen = self.rng.uniform(index.shape[1]) < self.share  # [S, B]
        other = self._next_goals.index_select(0, self._flat(self._goal_rows(index, after)))
        own = obs[..., self.goals.desired]
        goal = torch.where(chosen.unsqueeze(-1), other.view(own.shape), own)
        reward, discount, last = self._returns(index, after, goal, chosen)
        flat_last, last_table = flat, table
        if self.n_step > 1:
            flat_last = self._flat(last)
            last_table = self._table_rows(flat_last, self._successor_fields)
            last_table = last_table.view(*index.shape, -1)
        return TransitionBatch(
            obs=self._desiring(obs, goal),
            action=self._field("action", table, flat),
            reward=reward,
            next_obs=self._desiring(self._field("next_obs", last_table, flat_last), goal),
            discount=discount,
            weight=weight,
            index=index,
        )

    def example(self, batch_size: int) -> TransitionBatch:
        """Return a batch of stored rows with their own goals, without drawing anything."""
        index = torch.arange(batch_size, device=self.device) % max(1, len(self))
        index = index.expand(self.num_seeds, -1)
        weighted = isinstance(self, PrioritizedReplayBuffer)
        weight = torch.ones(index.shape, device=self.device) if weighted else None
        return super().gather(index, weight)

    def _desiring(self, obs: Tensor, goal: Tensor) -> Tensor:
        """Return observations `[S, B, W]` with other goals."""
        place = self.goals.desired
        return torch.cat([obs[..., : place.start], goal, obs[..., place.stop :]], -1)

    def _steps_left(self, index: Tensor) -> Tensor:
        """Return how many steps of their episode follow rows `[S, B]`, as far as is known."""
        stored = self._back_from_newest(index) // self.num_envs
        left = self.places.left.flatten().index_select(0, self._flat(index)).view(index.shape)
        return torch.where(left == UNKNOWN, stored, left)

    def _goal_rows(self, index: Tensor, after: Tensor) -> Tensor:
        """Return the rows whose successors show the other goals, `[S, B]`."""
        if self.strategy == "final":
            steps = after
        else:
            draw = self.rng.integers(LARGEST, index.shape[1])
            before = torch.zeros_like(after)
            if self.strategy == "episode":
                ages = self.places.ages.flatten().index_select(0, self._flat(index))
                back = self._back_from_newest(index)
                kept = (self._size.tensor - 1 - back) // self.num_envs  # older steps in the ring
                before = torch.minimum(ages.view(index.shape), kept)
            steps = draw % (before + after + 1) - before
        return (index + steps * self.num_envs) % self.capacity

    def _returns(
        self, index: Tensor, after: Tensor, goal: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum rewards for the goals; returns what `_n_step` does."""
        steps, rows = self._later_rows(index)  # [S, B, N]
        flat = self._flat(rows.flatten(1))
        recorded = self._scalar_rows(flat).view(*rows.shape, 3)
        reward, continues, truncated = recorded.unbind(-1)
        terminated = 1 - continues
        ended = torch.maximum(terminated, truncated)
        achieved = self._next_goals.index_select(0, flat).view(*rows.shape, -1)
        paid, ends = self.goals(achieved, goal.unsqueeze(2).expand_as(achieved))
        chosen = chosen.unsqueeze(-1)
        reward = torch.where(chosen, self._scaled(paid), reward)
        if ends is not None:
            terminated = torch.where(chosen, ends.to(terminated.dtype), terminated)
            ended = torch.maximum(ended, terminated)
        total, discount, place = self._summed(steps, reward, terminated, ended, after)
        return total, discount, rows.gather(-1, place).squeeze(-1)

    def _scaled(self, reward: Tensor) -> Tensor:
        """Do to computed rewards what is done to those that are stored."""
        if self.reward_scale == 1.0 and self.reward_shift == 0.0:
            return reward
        return (reward.double() * self.reward_scale + self.reward_shift).float()

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows."""
        return super().state_dict() | {"places": self.places.state_dict()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self.places.load_state_dict(state["places"])
        self._is_restored = True


class HindsightReplayBuffer(Hindsight):
    """Uniform draws with other goals."""


class PrioritizedHindsightReplayBuffer(Hindsight, PrioritizedReplayBuffer):
    """Prioritized draws with other goals; a row's priority is that of the last goal it had."""

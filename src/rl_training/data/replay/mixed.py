"""Replay whose batches hold rows of two buffers.

RLPD puts rows of a fixed dataset beside the run's own experience (symmetric sampling, Sec. 4.1 of
arXiv:2302.02948), MOPO and MBPO real rows beside imagined ones.  Every batch has the same share of
each, or is drawn from the union of a dataset and experience; as long as there are no rows of one's
own, batches hold those of the other buffer alone.

Room for imagined rows is allocated once, for the longest rollouts of a run; how many of the newest
count is a number that moves, so compiled updates need not change when the horizon does.

Shapes: S seeds, B batch, K imagined rows of a refresh, n environments per seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay.returns import EpisodeReturns
from rl_training.data.replay.storage import ReplayBuffer, StepArrays
from rl_training.rng import Rng
from rl_training.state import Counter


class Mixed(ReplayBuffer):
    """Part of a buffer: batches are completed from another one, whose rows come first."""

    read_only = (*ReplayBuffer.read_only, *(f"other.{name}" for name in DatasetBuffer.read_only))
    foreseeable = False

    def __init__(self, *arguments: Any, other: ReplayBuffer, other_ratio: float, **options: Any):
        """Allocate the storage.

        Args:
            *arguments: As for `ReplayBuffer`.
            other: Where the rest of a batch comes from, for as many seeds and with the same
                discount; its draws come from this buffer's randomness from now on.
            other_ratio: Share of a batch that is drawn from it.
            **options: As for `ReplayBuffer` or its prioritized kind.
        """
        super().__init__(*arguments, **options)
        assert (other.num_seeds, other.gamma) == (self.num_seeds, self.gamma)
        assert not getattr(other, "is_mapped", False), "rows on disk are drawn outside of updates"
        self.other, self.other_ratio, self.notes = other, other_ratio, other.notes
        self.data_shape = other.data_shape
        # One source of randomness: two of the same seeds and stream would draw the same numbers.
        other.rng = self.rng

    def other_rows(self, batch_size: int) -> int:
        """Return how many rows of a batch come from the other buffer; all while this is empty."""
        return round(batch_size * self.other_ratio) if len(self) else batch_size

    def set_progress(self, progress: float) -> None:
        """Move what depends on the share of the run that is done, of both."""
        super().set_progress(progress)
        self.other.set_progress(progress)

    def sample(self, batch_size: int) -> TransitionBatch:
        """Draw the other buffer's share of a batch, then the rest from this one's rows."""
        from_other = self.other_rows(batch_size)
        if from_other == 0:
            return super().sample(batch_size)
        other = self.other.sample(from_other)
        if from_other == batch_size:
            return other
        return _joined(other, super().sample(batch_size - from_other))

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Take new priorities of a batch, each buffer those of its own rows."""
        first = self.other_rows(index.shape[1])
        if first > 0:
            self.other.update_priorities(index[:, :first], priority[:, :first])
        if first < index.shape[1]:
            super().update_priorities(index[:, first:], priority[:, first:])


class WithPrior(Mixed):
    """Part of a buffer: rows are the run's own, and batches are completed from `prior`.

    A checkpoint holds the own rows, and of the dataset its digest.  Where batches of the dataset
    hold returns-to-go, those of own rows become known as their episodes end.
    """

    read_only = (*Mixed.read_only, "episode_returns")

    def __init__(self, *arguments: Any, prior: DatasetBuffer, prior_ratio: float, **options: Any):
        """Allocate the storage.

        Args:
            *arguments: As for `ReplayBuffer`.
            prior: The dataset, for as many seeds and with the same discount and number of steps.
            prior_ratio: Share of a batch that is drawn from it.
            **options: As for `ReplayBuffer` or its prioritized kind.
        """
        super().__init__(*arguments, other=prior, other_ratio=prior_ratio, **options)
        assert prior.n_step == self.n_step
        self.prior = prior
        # New rewards on the scale of the dataset's, whose factor may have been found in the data.
        self.reward_scale, self.reward_shift = prior.reward_scale, prior.reward_shift
        self.episode_returns: EpisodeReturns | None = None
        if prior.keeps_returns:
            sizes = self.num_seeds, self.capacity, self.num_envs
            self.episode_returns = EpisodeReturns(*sizes, self.gamma, self.device)
            self.stores_by_graph = False

    def add_step(self, step: StepArrays, store: Callable[[], None] | None = None) -> None:
        """Store one step of all environments, and what is known of returns by it."""
        start = self.inserted.value % self.capacity
        super().add_step(step, store)
        if self.episode_returns is not None:
            ends = step.terminated, step.truncated
            self.episode_returns.add(start, self.rows["reward"], *ends)

    def _return_to_go(self, table: Tensor, flat: Tensor) -> dict[str, Tensor]:
        if self.episode_returns is None:
            return {}
        values = self.episode_returns.values.flatten().index_select(0, flat)
        return {"return_to_go": values.view(table.shape[:2])}

    def prior_rows(self, batch_size: int) -> int:
        """Return how many rows of a batch come from the dataset."""
        return self.other_rows(batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows."""
        state = super().state_dict() | {"prior_digest": self.prior.digest}
        if self.episode_returns is not None:
            state["episode_returns"] = self.episode_returns.state_dict()
        return state

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.prior.require_digest(state["prior_digest"])
        super()._restore(state)
        if self.episode_returns is not None:
            self.episode_returns.load_state_dict(state["episode_returns"])


class MixedReplayBuffer(WithPrior):
    """Uniform draws from both."""


class UnionReplayBuffer(WithPrior):
    """Uniform draws from the union of both: the dataset's share falls as experience grows.

    As if the dataset had been put into the replay before the first step, which is how the authors
    of IQL (arXiv:2110.06169) continue online.
    """

    def __init__(self, *arguments: Any, prior: DatasetBuffer, **options: Any):
        """Allocate the storage; arguments are those of `WithPrior` but the ratio."""
        super().__init__(*arguments, prior=prior, prior_ratio=1.0, **options)

    def other_rows(self, batch_size: int) -> int:
        """Return how many rows of a batch come from the dataset on average."""
        prior = len(self.prior)
        return round(batch_size * prior / (prior + len(self)))

    def sample(self, batch_size: int) -> TransitionBatch:
        """Draw rows of the union; which of the two a row is from is drawn for each by itself."""
        if not len(self):
            return self.prior.sample(batch_size)
        own, prior = ReplayBuffer.sample(self, batch_size), self.prior.sample(batch_size)
        row = self.rng.uniform(batch_size) * (len(self.prior) + self._size.tensor)
        return _chosen(row < len(self.prior), prior, own)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Draws are uniform, so priorities have no use."""


class MixedPrioritizedReplayBuffer(WithPrior, PrioritizedReplayBuffer):
    """Uniform draws from the dataset, prioritized ones from the run's own rows."""


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


FIELDS = ("obs", "action", "reward", "next_obs", "discount", "index")


def _fields_of(batch: TransitionBatch) -> tuple[str, ...]:
    """Return the names of what batches of both buffers hold, but importance weights."""
    return FIELDS if batch.return_to_go is None else (*FIELDS, "return_to_go")


def _chosen(mask: Tensor, first: TransitionBatch, second: TransitionBatch) -> TransitionBatch:
    """Take each row from the first batch where `mask` `[S, B]` holds, else from the second."""

    def pick(name: str) -> Tensor:
        left, right = getattr(first, name), getattr(second, name)
        return torch.where(mask.view(*mask.shape, *[1] * (left.ndim - 2)), left, right)

    return TransitionBatch(**{name: pick(name) for name in _fields_of(first)})


def _joined(first: TransitionBatch, second: TransitionBatch) -> TransitionBatch:
    """Put two batches side by side; rows without an importance weight weigh 1."""

    def both(name: str) -> Tensor:
        return torch.cat((getattr(first, name), getattr(second, name)), 1)

    weights = [
        torch.ones_like(batch.reward) if batch.weight is None else batch.weight
        for batch in (first, second)
    ]
    weighted = first.weight is not None or second.weight is not None
    return TransitionBatch(
        **{name: both(name) for name in _fields_of(first)},
        weight=torch.cat(weights, 1) if weighted else None,
    )

"""Batches that travel from the data layer to learners.

Shapes: S seeds, B batch, T steps of a rollout, n environments per seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_training.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class TransitionBatch:
    """Transitions `[S, B, ...]`; `discount` is gamma^k, and zero where the episode terminated.

    A time limit does not end the future: a truncated transition keeps its discount, and `next_obs`
    is the true successor, never the first observation of the next episode.
    """

    obs: Tensor
    action: Tensor
    reward: Tensor
    next_obs: Tensor
    discount: Tensor
    weight: Tensor | None = None
    """Importance weights `[S, B]` of prioritized sampling."""
    index: Tensor | None = None
    """Rows the transitions were drawn from `[S, B]`, to send priorities back to."""
    next_action: Tensor | None = None
    """What the data did at `next_obs`, for learners that set `needs_next_action`."""
    next_action_mask: Tensor | None = None
    """1 where the data records that action, else 0, `[S, B]`; None means everywhere."""
    return_to_go: Tensor | None = None
    """Discounted rewards from here to the end of the episode, `[S, B]`, for learners with
    `needs_return_to_go`; very low where they are not known yet."""

    @classmethod
    def from_mapping(
        cls, batch: Mapping[str, Tensor], *, gamma: float, num_seeds: int
    ) -> TransitionBatch:
        """Build a batch from named tensors `[B, ...]` (one seed) or `[S, B, ...]`.

        Args:
            batch: `obs, actions, rewards, next_obs` and either `dones` (true where the episode
                *terminated*; time limits are not ends) or `discounts`; optionally `weights, index,
                next_actions, next_action_mask, returns_to_go`.
            gamma: Discount used with `dones`.
            num_seeds: S.

        Raises:
            DataError: For a missing or unknown name or a wrong number of axes.
        """
        values = dict(batch)
        if "discounts" not in values:
            if "dones" not in values:
                raise DataError("the batch has neither dones nor discounts: give one of them")
            values["discounts"] = gamma * (1.0 - values["dones"].float())
        values.pop("dones", None)
        fields = {"obs": "obs", "actions": "action", "rewards": "reward", "next_obs": "next_obs"}
        fields |= {"discounts": "discount", "weights": "weight", "index": "index"}
        fields |= {"next_actions": "next_action", "next_action_mask": "next_action_mask"}
        fields |= {"returns_to_go": "return_to_go"}
        needed = {"obs", "actions", "rewards", "next_obs"}
        values = _with_seed_axis(values, "batch", needed, fields.keys() - needed, "B", num_seeds)
        return cls(**{fields[name]: tensor for name, tensor in values.items()})


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """Consecutive observations `[S, B, T, ...]`, each with what led to it.

    Where `is_first` the past is unknown or of another episode, and the action means nothing.
    """

    obs: Tensor
    action: Tensor
    """The one before each observation."""
    reward: Tensor
    """The one that came with each observation; 0 with the first of an episode."""
    is_first: Tensor
    terminated: Tensor
    """The observation is a terminal state; one at which an episode was cut off is not."""
    index: Tensor | None = None
    """Rows of the replay, -1 for what has none, `[S, B, T]`; None where it keeps no beliefs."""
    start: Tensor | None = None
    """What was believed before the first observation, `[S, B, F]`; 0 where that is a first one."""

    @classmethod
    def from_mapping(
        cls,
        batch: Mapping[str, Tensor],
        *,
        gamma: float = 1.0,  # noqa: ARG003 - every kind of batch is built alike
        num_seeds: int,
    ) -> SequenceBatch:
        """Build a batch from named tensors `[B, T, ...]` (one seed) or `[S, B, T, ...]`.

        Args:
            batch: `obs, actions, rewards, dones` as in the fields, `dones` being terminations, and
                optionally `is_first`; without it only the beginnings of sequences are first.
            gamma: Not used: the learner discounts.
            num_seeds: S.

        Raises:
            DataError: For a missing or unknown name or a wrong number of axes.
        """
        needed = {"obs", "actions", "rewards", "dones"}
        values = _with_seed_axis(batch, "batch", needed, {"is_first"}, "B, T", num_seeds)
        steps = torch.arange(values["rewards"].shape[2], device=values["rewards"].device)
        first = values.get("is_first", torch.zeros_like(values["dones"])).bool() | (steps == 0)
        return cls(
            obs=values["obs"],
            action=values["actions"],
            reward=values["rewards"],
            is_first=first,
            terminated=values["dones"].bool(),
        )


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Consecutive steps of n environments, `[S, T, n, ...]`, gathered by one policy."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    next_obs: Tensor
    """True successors: the final observation where an episode ended."""
    terminated: Tensor
    truncated: Tensor
    memory: Tensor | None = None
    """What acting remembered before the first step, `[S, n, M]`; None is nothing."""

    @classmethod
    def from_mapping(
        cls,
        batch: Mapping[str, Tensor],
        *,
        gamma: float = 1.0,  # noqa: ARG003 - the learner discounts
        num_seeds: int,
    ) -> RolloutBatch:
        """Build a rollout from `obs, actions, rewards, next_obs, dones` and optional `truncations`.

        Tensors are `[T, n, ...]` (one seed) or `[S, T, n, ...]`; `dones` are terminations.
        """
        needed = {"obs", "actions", "rewards", "next_obs", "dones"}
        values = _with_seed_axis(batch, "rollout", needed, {"truncations"}, "T, n", num_seeds)
        done = values["dones"].bool()
        return cls(
            obs=values["obs"],
            action=values["actions"],
            reward=values["rewards"],
            next_obs=values["next_obs"],
            terminated=done,
            truncated=values.get("truncations", torch.zeros_like(done)).bool(),
        )


@dataclass(frozen=True)
class RolloutRows:
    """Rows of a rollout in any order, `[S, B, ...]`; a method adds what it computes of them."""

    obs: Tensor
    action: Tensor

    def slice(self, start: int, stop: int) -> Self:
        """Return consecutive rows, as views."""
        return type(self)(*(x[:, start:stop] for x in vars(self).values()))

    def rows(self, index: Tensor) -> Self:
        """Return the rows `index` `[S, B]`."""
        if index.shape[0] == 1:
            return type(self)(*(x.index_select(1, index[0]) for x in vars(self).values()))
        seed = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
        return type(self)(*(x[seed, index] for x in vars(self).values()))


def _with_seed_axis(
    batch: Mapping[str, Tensor],
    what: str,
    needed: Set[str],
    optional: Set[str],
    axes: str,
    num_seeds: int,
) -> dict[str, Tensor]:
    """Return named tensors with the seed axis in front, given with it or for one seed without.

    Raises:
        DataError: For a missing or unknown name, or rewards of other axes than `axes` names.
    """
    missing, unknown = sorted(needed - batch.keys()), sorted(batch.keys() - needed - optional)
    if missing or unknown:
        raise DataError(f"the {what} lacks {missing or 'nothing'} and has unknown {unknown}")
    values, num_axes = dict(batch), axes.count(",") + 1
    if values["rewards"].ndim == num_axes and num_seeds == 1:
        values = {name: tensor.unsqueeze(0) for name, tensor in values.items()}
    shape = tuple(values["rewards"].shape)
    if len(shape) != num_axes + 1 or shape[0] != num_seeds:
        raise DataError(
            f"rewards have shape {shape}; allowed are [{axes}] for one seed or "
            f"[{num_seeds}, {axes}]"
        )
    return values

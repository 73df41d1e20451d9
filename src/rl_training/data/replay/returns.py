"""Return-to-go: the discounted sum of rewards from a row to the end of its episode.

A truncated episode would have continued, and its future is not recorded: its mean reward is assumed
to continue forever.  Where a task pays the same at every step until it is solved, as sparse ones
do, that is the value of never solving it.

Shapes: S seeds, C rows of a ring, N rows, n environments per seed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.datasets.blocks import RowSource
from rl_training.state import copy_tensor

Array = NDArray[Any]
UNKNOWN = -1e30
"""Marks a return that is not known yet; lower than any, and a finite number for files."""


def returns_to_go(rewards: Array, terminated: Array, truncated: Array, gamma: float) -> Array:
    """Return the discounted sum of rewards `[N]` from each row to the end of its episode.

    Args:
        rewards: In time order, `[N]`.
        terminated: Where an episode ended, `[N]`.
        truncated: Where it was cut off, `[N]`; so it is at the last row, unless that terminated.
        gamma: Discount per step; with 1 nothing is added after a truncation.
    """
    ends = np.flatnonzero(terminated | truncated) + 1
    if len(rewards) and (not len(ends) or ends[-1] != len(rewards)):
        ends = np.append(ends, len(rewards))
    result = np.empty(len(rewards), np.float32)
    for start, stop in pairwise((0, *ends.tolist())):
        episode = rewards[start:stop].astype(np.float64)
        continues = not terminated[stop - 1] and gamma < 1
        total = float(episode.mean()) / (1 - gamma) if continues else 0.0
        values = []
        for reward in reversed(episode.tolist()):
            total = reward + gamma * total
            values.append(total)
        result[start:stop] = values[::-1]
    return result


def dataset_returns(dataset: RowSource, gamma: float) -> Array:
    """Return the return-to-go of every row of a dataset, whose rewards are as they are learned."""
    every = slice(0, len(dataset))
    columns = ("rewards", "terminations", "truncations")
    rewards, terminated, truncated = (np.asarray(dataset.read(name, every)) for name in columns)
    cut = truncated.copy()
    cut[[part.stop - 1 for part in dataset.parts]] = True  # an episode ends with its source
    return returns_to_go(rewards, terminated, cut, gamma)


class EpisodeReturns:
    """Returns-to-go of the rows of a replay: `UNKNOWN` until their episode has ended."""

    def __init__(
        self, num_seeds: int, capacity: int, num_envs: int, gamma: float, device: torch.device
    ) -> None:
        """Begin with an empty ring.

        Args:
            num_seeds: S.
            capacity: C.
            num_envs: n, rows of a step.
            gamma: Discount per step.
            device: Where the values are read.
        """
        self.values = torch.full((num_seeds, capacity), UNKNOWN, device=device)
        self.ages = torch.zeros(num_seeds, num_envs, dtype=torch.int64)
        """Steps of the episodes in progress."""
        self._gamma = gamma

    def add(self, start: int, rewards: Tensor, terminated: Array, truncated: Array) -> None:
        """Take note of a step, whose rows begin at `start`; returns of what it ends become known.

        Args:
            start: Row of the first environment.
            rewards: Those of all rows, `[S, C]`, the step's own among them.
            terminated: Where the episode ended, `[S, n]`.
            truncated: Where it was cut off, `[S, n]`.
        """
        capacity, num_envs = self.values.shape[1], self.ages.shape[1]
        self.values[:, start : start + num_envs] = UNKNOWN
        self.ages += 1
        for seed, env in zip(*np.nonzero(terminated | truncated), strict=True):
            steps = min(int(self.ages[seed, env]), capacity // num_envs)
            rows = (start + env - num_envs * np.arange(steps)[::-1]) % capacity
            index = torch.from_numpy(rows).to(self.values.device)
            last = np.arange(steps) == steps - 1
            ends = last & terminated[seed, env], last
            returns = returns_to_go(rewards[seed, index].cpu().numpy(), *ends, self._gamma)
            self.values[seed, index] = torch.from_numpy(returns).to(self.values.device)
            self.ages[seed, env] = 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is known, and how long the episodes in progress are."""
        return {"values": self.values, "ages": self.ages}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore both."""
        copy_tensor(self.values, state["values"], "values")
        copy_tensor(self.ages, state["ages"], "ages")

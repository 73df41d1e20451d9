"""Fewer or spoiled demonstrations: the first episodes, every k-th row, actions of other states.

Shapes: N rows, E episodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.errors import DataError
from rl_training.rng import derive_seed


def first_episodes(dataset: OfflineDataset, count: int, key: str) -> OfflineDataset:
    """Return the first `count` episodes.

    Args:
        dataset: Whole episodes, in time order.
        count: How many to keep.
        key: The setting that asks for them, for the message.

    Raises:
        DataError: When there are fewer, or they cannot be told.
    """
    dataset.require_episodes(key)
    if count > dataset.num_episodes:
        raise DataError(
            f"{dataset.name}: {key} asks for {count} episodes, but it holds "
            f"{dataset.num_episodes}; ask for fewer, or leave {key} out to take all"
        )
    return dataset.slice(0, int(dataset.episode_stops[count - 1]))


def thinned(dataset: OfflineDataset, every: int, seed: int) -> OfflineDataset:
    """Return every `every`-th row of each episode, from a start drawn per episode.

    As in the experiments of GAIL (arXiv:1606.03476, Section 6).  Because the start is drawn, rows
    that end an episode are kept as often as any others.

    Raises:
        DataError: When episodes cannot be told.
    """
    if every == 1:
        return dataset
    dataset.require_episodes("expert_subsample")
    rng = np.random.default_rng(derive_seed(seed, "thinned"))
    lengths = dataset.episode_lengths()
    offsets = rng.integers(0, np.minimum(every, lengths))  # [E], so that no episode is lost
    place = np.arange(len(dataset)) - np.repeat(dataset.episode_starts, lengths)
    kept = (place - np.repeat(offsets, lengths)) % every == 0
    columns: dict[str, Any] = {name: column[kept] for name, column in dataset.columns()}
    episode = np.repeat(np.arange(len(lengths)), lengths)[kept]
    last = np.append(episode[1:] != episode[:-1], True)
    columns["truncations"] = last & ~columns["terminations"]
    note = f"thinned to every {every}th row of each episode: {int(kept.sum())} rows are left"
    return replace(dataset, **columns, parts=(), notes=(*dataset.notes, note))


def with_shuffled_actions(dataset: OfflineDataset, seed: int) -> OfflineDataset:
    """Return the same states with the same actions, but each action taken from another row.

    A control: what is left of the expert is where it was and how often it did what, not why.
    """
    rng = np.random.default_rng(derive_seed(seed, "shuffled actions"))
    actions = dataset.actions[rng.permutation(len(dataset))]
    note = "a control, not a demonstration: actions were shuffled across states"
    return replace(dataset, actions=actions, notes=(*dataset.notes, note))

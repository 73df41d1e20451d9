"""Find episodes whose rewards are on another scale than those of the rest.

Returns do not tell: a good episode of Pendulum earns a thousandth of a bad one.  So rewards are
compared where the same was done in the same state: each row with its nearest neighbour of another
episode.  If episode e is scaled by exp(s_e), then log|r_i| - log|r_j| = s_e(i) - s_e(j) for
neighbours i and j, up to noise; the s_e are found by repeated medians.

Shapes: M compared rows, D features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import column_blocks, joined
from rl_training.data.datasets.dataset import OfflineDataset

Array = NDArray[Any]
MOST_ROWS = 4_000
"""Rows compared; more would cost time and find no more."""
SUSPECT_ROWS = 12
"""Rows of an episode that is looked at because its rewards stand out."""
MOST_SUSPECTS = 2_000
"""Such episodes, those that stand out most."""
LEAST_PAIRS = 5
"""Neighbours an episode needs before anything is said about it."""
FACTOR = 5.0
"""Scales further apart than this are reported."""
ROUNDS = 30


def reward_scales(dataset: OfflineDataset) -> NDArray[np.float64]:
    """Return the scale of each episode's rewards relative to the most common one, `[E]`.

    1 where nothing can be said.
    """
    drawn = _rows_to_compare(dataset)
    rows = np.concatenate([drawn, _rows_of_suspects(dataset, drawn)])
    scales = np.ones(dataset.num_episodes)
    episodes = np.searchsorted(dataset.episode_stops, rows, side="right")
    if len(np.unique(episodes[: len(drawn)])) < 2:
        return scales
    nearest = _nearest_of_other_episodes(_features(dataset, rows), episodes, len(drawn))
    logs = np.log(np.abs(np.asarray(dataset.rewards[rows], np.float64)))
    found = _solve(logs - logs[nearest], episodes, episodes[nearest], len(scales))
    pairs = np.bincount(episodes, minlength=len(scales))
    counted, compared = pairs >= LEAST_PAIRS, pairs > 0
    if counted.any():
        # Of very many episodes, few have enough pairs, and suspects may be most of them.
        common = found[counted if 2 * counted.sum() >= compared.sum() else compared]
        scales[counted] = np.exp(found[counted] - _most_common(common))
    return scales


def _most_common(values: NDArray[np.float64]) -> float:
    """Return the value with the most others near it; a median could fall between two halves."""
    ranked = np.sort(values)
    near = np.log(2.0)
    count = np.searchsorted(ranked, ranked + near) - np.searchsorted(ranked, ranked - near)
    return float(ranked[np.argmax(count)])


def off_scale(scales: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the episodes whose scale stands out."""
    return np.flatnonzero((scales > FACTOR) | (scales < 1 / FACTOR))


def _rows_to_compare(dataset: OfflineDataset) -> NDArray[np.int64]:
    """Choose rows, the same every time, whose rewards are large enough to have a scale."""
    usable = np.zeros(len(dataset), np.bool_)
    for start, stop in zip(dataset.episode_starts, dataset.episode_stops, strict=True):
        rewards = np.abs(np.asarray(dataset.rewards[start:stop], np.float64))
        kept = np.isfinite(rewards) & (rewards > 0)
        # Rewards near zero have a ratio that means nothing; a tenth of the episode's median is a
        # bound that moves with the scale of the episode.
        median = np.median(rewards[kept]) if kept.any() else 0.0
        usable[start:stop] = kept & (rewards >= 0.1 * median)
    count = int(usable.sum())
    if count <= MOST_ROWS:
        return np.flatnonzero(usable)
    chosen = np.sort(np.random.default_rng(0).choice(count, MOST_ROWS, replace=False))
    # The numbers of all usable rows would take eight times the memory of their flags.
    found, before = [], 0
    for block in column_blocks(usable):
        rows = block.start + np.flatnonzero(usable[block])
        first, last = np.searchsorted(chosen, (before, before + len(rows)))
        found.append(rows[chosen[first:last] - before])
        before += len(rows)
    return joined(found)


def _rows_of_suspects(dataset: OfflineDataset, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose rows of episodes too few of whose rows were drawn, and whose rewards stand out.

    In a million rows, one episode would not be compared at all.
    """
    counts = np.histogram(drawn, np.append(dataset.episode_starts, len(dataset)))[0]
    few = np.flatnonzero((counts < LEAST_PAIRS) & (dataset.episode_lengths() >= LEAST_PAIRS))
    if not len(few):
        return drawn[:0]
    starts, stops = dataset.episode_starts[few], dataset.episode_stops[few]
    spread = np.linspace(starts, stops - 1, SUSPECT_ROWS, dtype=np.int64)  # [rows, episodes]
    sizes = np.abs(np.asarray(dataset.rewards)[spread].astype(np.float64))
    typical = float(np.median(np.abs(np.asarray(dataset.rewards)[drawn]))) if len(drawn) else 0.0
    if not typical > 0:
        return drawn[:0]
    ratio = np.median(sizes, axis=0) / typical
    suspects = np.flatnonzero((ratio > FACTOR) | (ratio < 1 / FACTOR))
    order = np.argsort(-np.abs(np.log(np.maximum(ratio[suspects], 1e-30))), kind="stable")
    chosen = suspects[order[:MOST_SUSPECTS]]
    usable = np.isfinite(sizes[:, chosen]) & (sizes[:, chosen] > 0)
    return np.setdiff1d(spread[:, chosen][usable], drawn)


def _features(dataset: OfflineDataset, rows: NDArray[np.int64]) -> Array:
    """State, action and successor side by side, each entry with deviation 1, `[M, D]`."""
    parts = [dataset.observations[rows], dataset.next_observations[rows]]
    parts = [np.asarray(part, np.float32).reshape(len(rows), -1) for part in parts]
    actions = np.asarray(dataset.actions[rows])
    if dataset.is_discrete:
        actions = (actions[:, None] == np.unique(actions)).astype(np.float32)
    features = np.nan_to_num(np.concatenate([*parts, actions], axis=1))
    deviation = features.std(axis=0)
    kept = deviation > 1e-6
    # Images have too many entries to compare; every k-th serves.
    step = max(1, int(kept.sum()) // 256)
    chosen: Array = (features[:, kept] / deviation[kept])[:, ::step]
    return chosen


def _nearest_of_other_episodes(
    features: Array, episodes: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Return for each row the nearest one of another episode among the first `count`."""
    others, features_of_others = episodes[:count], features[:count]
    squares = (features_of_others * features_of_others).sum(axis=1)
    nearest = np.empty(len(features), np.int64)
    for start in range(0, len(features), 512):
        part = slice(start, start + 512)
        distance = squares - 2 * features[part] @ features_of_others.T
        distance[episodes[part, None] == others] = np.inf
        nearest[part] = distance.argmin(axis=1)
    return nearest


def _solve(
    difference: Array, left: NDArray[np.int64], right: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """Find s with s[left] - s[right] = difference for most pairs, by repeated medians."""
    # Each pair serves both of its episodes.
    owner, other = np.concatenate([left, right]), np.concatenate([right, left])
    values = np.concatenate([difference, -difference])
    order = np.argsort(owner, kind="stable")
    owner, other, values = owner[order], other[order], values[order]
    bounds = np.searchsorted(owner, np.arange(count + 1))
    result = np.zeros(count)
    for _ in range(ROUNDS):
        wanted = values + result[other]
        for episode in np.unique(owner):
            own = wanted[bounds[episode] : bounds[episode + 1]]
            # Half a step: whole ones would let two groups swap their scales forever.
            result[episode] += 0.5 * (np.median(own) - result[episode])
    return result

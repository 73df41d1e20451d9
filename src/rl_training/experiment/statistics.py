"""Figures over seeds, and over tasks and seeds: Agarwal et al., 2021, arXiv:2108.13264.

Interquartile mean, bootstrap intervals, probability of improvement, performance profiles.  A method
that was run on several tasks is a list of samples, one per task, whose scores are comparable: see
`normalised`.

Shapes: n values of one sample, T samples, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_training.errors import DataError

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""A figure of each sample along the last axis: [..., n] to [...]."""
LEVEL = 0.95
RESAMPLES = 10_000


class Interval(NamedTuple):
    """Two ends."""

    low: float
    high: float


def interquartile_mean(values: ArrayLike) -> Floats:
    """Return the mean of the middle half of each sample, `[..., n]` to `[...]`.

    A quarter is cut from each end, Sec. 4 of arXiv:2108.13264.  Where n is not a multiple of four
    the quarter ends inside a value, which then counts with the part that is left of it, so that
    exactly half of the sample counts: the weights of three values are 1/6, 4/6, 1/6.  (Cutting
    whole values only, as `scipy.stats.trim_mean` does, gives the mean for n below four and lets the
    figure jump with n; for multiples of four the two are the same.)  NaN and infinity give NaN.

    Raises:
        DataError: When a sample is empty.
    """
    samples = _samples(values)
    finite = np.asarray(np.isfinite(samples).all(axis=-1))
    size = samples.shape[-1]
    cut = size // 4
    kept = np.sort(np.where(finite[..., None], samples, 0.0), axis=-1)[..., cut : size - cut]
    # In quarters of a value: whole numbers, so that equal values have exactly their value as mean.
    weights = np.full(kept.shape[-1], 4.0)
    weights[0] -= size % 4
    weights[-1] -= size % 4  # a single value is both ends and loses at both
    means = (kept * weights).sum(axis=-1) / (2 * size)
    return np.where(finite, means, np.nan)


def bootstrap_interval(
    values: ArrayLike,
    statistic: Statistic,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the percentile bootstrap interval of a statistic of one sample, `[n]`.

    The same arguments give the same interval.  With n = 1 it is the point itself; below about five
    values it is too narrow and says little.  NaN and infinity give NaN.

    Raises:
        DataError: When the sample is empty, `level` not within (0, 1), or `resamples` below 1.
    """
    row = _samples(values).reshape(1, -1)
    low, high = bootstrap_intervals(row, statistic, level=level, resamples=resamples, seed=seed)[0]
    return Interval(float(low), float(high))


def bootstrap_intervals(
    rows: ArrayLike,
    statistic: Statistic,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Floats:
    """Return low and high ends for several samples of the same members, `[T, n]` to `[T, 2]`.

    Every row is resampled by the same draws: what is drawn is a seed with its whole curve.

    Raises:
        DataError: As `bootstrap_interval`.
    """
    _check_bootstrap(level, resamples)
    samples = _samples(rows)
    size = samples.shape[-1]
    draws = np.random.default_rng(seed).integers(size, size=(resamples, size))  # [R, n]
    ends = _ends(level)
    result = np.full((len(samples), 2), np.nan)
    # Row by row: [T, R, n] at once would take gigabytes for a long run of many seeds.
    for index in np.flatnonzero(np.isfinite(samples).all(axis=-1)):
        result[index] = np.quantile(statistic(samples[index][draws]), ends)
    return result


def probability_of_improvement(better: ArrayLike, worse: ArrayLike) -> Floats:
    """Return how likely one method's run beats another's, `[..., n], [..., m]` to `[...]`.

    The share of pairs in which the first is higher, equals counting half: Sec. 4.3 of
    arXiv:2108.13264, the Mann-Whitney statistic.  0.5 says nothing, and the figure does not say by
    how much.  NaN and infinity give NaN.

    Raises:
        DataError: When a sample is empty.
    """
    first, second = _samples(better)[..., :, None], _samples(worse)[..., None, :]
    wins = np.mean((first > second) + 0.5 * (first == second), axis=(-2, -1))
    finite = np.isfinite(first).all(axis=(-2, -1)) & np.isfinite(second).all(axis=(-2, -1))
    return np.where(finite, wins, np.nan)


def improvement_interval(
    better: ArrayLike,
    worse: ArrayLike,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the percentile bootstrap interval of `probability_of_improvement`, `[n], [m]`.

    Both samples are resampled, each by itself.

    Raises:
        DataError: As `bootstrap_interval`.
    """
    _check_bootstrap(level, resamples)
    generator = np.random.default_rng(seed)
    first, second = (_samples(values).reshape(-1) for values in (better, worse))
    drawn = [s[generator.integers(s.size, size=(resamples, s.size))] for s in (first, second)]
    ends = np.quantile(probability_of_improvement(*drawn), _ends(level))
    return Interval(float(ends[0]), float(ends[1]))


def normalised(values: ArrayLike, *, random: float, reference: float) -> Floats:
    """Return scores: 0 is a random policy's return, 1 the reference's.

    Raises:
        DataError: When the two references are equal or not finite.
    """
    if not np.isfinite([random, reference]).all() or random == reference:
        raise DataError(
            f"scores need two different returns to lie between, got random {random} and reference "
            f"{reference}"
        )
    return (np.asarray(values, dtype=np.float64) - random) / (reference - random)


def aggregate(tasks: Sequence[ArrayLike], statistic: Statistic = interquartile_mean) -> float:
    """Return a statistic of all scores of all tasks together, Sec. 4.2 of arXiv:2108.13264.

    Every score counts once, so that a task with more seeds counts more.

    Raises:
        DataError: When there is no task, or one without a score.
    """
    return float(statistic(np.concatenate(_strata(tasks))))


def stratified_interval(
    tasks: Sequence[ArrayLike],
    statistic: Statistic = interquartile_mean,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the percentile interval of `aggregate` by the stratified bootstrap.

    The seeds of each task are drawn with replacement from that task alone, Sec. 4.1 of
    arXiv:2108.13264: the tasks are what they are, the seeds are a sample.

    Raises:
        DataError: As `aggregate`, or `bootstrap_interval`.
    """
    drawn = _stratified(tasks, level, resamples, np.random.default_rng(seed))
    ends = np.quantile(statistic(np.concatenate(drawn, axis=-1)), _ends(level))
    return Interval(float(ends[0]), float(ends[1]))


def improvement_over_tasks(
    better: Sequence[ArrayLike],
    worse: Sequence[ArrayLike],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, Interval]:
    """Return the mean over tasks of `probability_of_improvement`, and its stratified interval.

    Both lists have the same tasks in the same order; scores need no common scale, because a run
    meets those of its own task alone.

    Raises:
        DataError: When the numbers of tasks differ, or as `stratified_interval`.
    """
    if len(better) != len(worse):
        raise DataError(
            f"two methods are compared on the same tasks, got {len(better)} and {len(worse)}"
        )

    def mean(first: Sequence[ArrayLike], second: Sequence[ArrayLike]) -> Floats:
        pairs = zip(first, second, strict=True)
        return np.asarray(np.mean([probability_of_improvement(x, y) for x, y in pairs], axis=0))

    rng = np.random.default_rng(seed)
    drawn = [_stratified(tasks, level, resamples, rng) for tasks in (better, worse)]
    ends = np.quantile(mean(*drawn), _ends(level))
    middle = float(mean(_strata(better), _strata(worse)))
    return middle, Interval(float(ends[0]), float(ends[1]))


def performance_profile(tasks: Sequence[ArrayLike], thresholds: ArrayLike) -> Floats:
    """Return the share of runs whose score exceeds each threshold, `[K]` to `[K]`.

    The mean over tasks of the share of a task's runs: the score distribution of Sec. 4.3 of
    arXiv:2108.13264, Eq. 1.  Where one method's profile is above another's, it is better there.

    Raises:
        DataError: As `aggregate`.
    """
    return _profile(_strata(tasks), np.asarray(thresholds, dtype=np.float64))


def profile_intervals(
    tasks: Sequence[ArrayLike],
    thresholds: ArrayLike,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Floats:
    """Return pointwise low and high ends of `performance_profile`, `[K]` to `[K, 2]`.

    Raises:
        DataError: As `stratified_interval`.
    """
    drawn = _stratified(tasks, level, resamples, np.random.default_rng(seed))
    places = np.asarray(thresholds, dtype=np.float64)
    # Threshold by threshold: [R, n, K] at once would be large for a fine grid.
    ends = [np.quantile(_profile(drawn, place), _ends(level)) for place in places]
    return np.array(ends).reshape(-1, 2)


def _profile(tasks: Sequence[Floats], thresholds: Floats) -> Floats:
    """Return shares above, for samples `[..., n]` and thresholds `[K]` or one number."""
    shares = [(sample[..., None] > thresholds).mean(axis=-2) for sample in tasks]
    mean: Floats = np.mean(shares, axis=0)
    return mean if thresholds.ndim else mean[..., 0]


def _strata(tasks: Sequence[ArrayLike]) -> list[Floats]:
    """Return a sample per task, each checked."""
    if not len(tasks):
        raise DataError("a figure over tasks needs at least one task, got none")
    return [_samples(values).reshape(-1) for values in tasks]


def _stratified(
    tasks: Sequence[ArrayLike], level: float, resamples: int, rng: np.random.Generator
) -> list[Floats]:
    """Return resamples of each task by itself, `[R, n]` each."""
    _check_bootstrap(level, resamples)
    return [s[rng.integers(s.size, size=(resamples, s.size))] for s in _strata(tasks)]


def _check_bootstrap(level: float, resamples: int) -> None:
    if not 0 < level < 1:
        raise DataError(f"level must be between 0 and 1, such as 0.95, got {level}")
    if resamples < 1:
        raise DataError(f"resamples must be >= 1, got {resamples}")


def _ends(level: float) -> tuple[float, float]:
    return (1 - level) / 2, (1 + level) / 2


def _samples(values: ArrayLike) -> Floats:
    samples = np.asarray(values, dtype=np.float64)
    if samples.ndim == 0 or samples.shape[-1] == 0:
        raise DataError("a figure over seeds needs at least one value, got none")
    return samples

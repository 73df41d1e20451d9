"""Interquartile mean and bootstrap intervals, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from rl_training.errors import DataError
from rl_training.experiment.statistics import (
    Floats,
    Statistic,
    aggregate,
    bootstrap_interval,
    bootstrap_intervals,
    improvement_interval,
    improvement_over_tasks,
    interquartile_mean,
    normalised,
    performance_profile,
    probability_of_improvement,
    profile_intervals,
    stratified_interval,
)


def mean(samples: Floats) -> Floats:
    return np.asarray(samples.mean(axis=-1))


def draw(*shape: int, seed: int = 3) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


# Interquartile mean


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], 7.0),
        ([1.0, 4.0], 2.5),
        ([0.0, 3.0, 12.0], (0 + 4 * 3 + 12) / 6),
        ([-100.0, 1.0, 2.0, 900.0], 1.5),
        ([-100.0, 1.0, 2.0, 5.0, 900.0], (3 * 1 + 4 * 2 + 3 * 5) / 10),
        ([0.0, 1.0, 2.0, 4.0, 8.0, 16.0], (2 * 1 + 4 * 2 + 4 * 4 + 2 * 8) / 12),
        ([0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 99.0], (1 + 4 * 2 + 4 * 4 + 4 * 8 + 16) / 14),
        ([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0], 2.5),
    ],
)
def test_known_samples_have_the_mean_worked_out_by_hand(
    values: list[float], expected: float
) -> None:
    assert float(interquartile_mean(values)) == pytest.approx(expected, rel=1e-15)
    assert float(interquartile_mean(values[::-1])) == float(interquartile_mean(values))


@pytest.mark.parametrize("size", range(1, 14))
def test_exactly_half_of_the_sample_counts(size: int) -> None:
    values = draw(size)
    # Every value four times: the quarters then end between values, and cutting whole ones is right.
    middle = np.sort(np.repeat(values, 4))[size : 3 * size]
    assert float(interquartile_mean(values)) == pytest.approx(middle.mean(), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("size", range(1, 14))
def test_equal_values_have_exactly_their_value(size: int) -> None:
    assert float(interquartile_mean(np.full(size, 500.0))) == 500.0


def test_extremes_beyond_the_quarters_do_not_count() -> None:
    values = np.arange(8.0)
    wild = np.array([-1e9, -1e9, 2.0, 3.0, 4.0, 5.0, 1e9, 1e9])
    assert float(interquartile_mean(values)) == float(interquartile_mean(wild)) == 3.5


def test_the_last_axis_holds_the_sample() -> None:
    values = draw(3, 2, 7)
    means = interquartile_mean(values)
    assert means.shape == (3, 2)
    assert float(means[2, 1]) == float(interquartile_mean(values[2, 1]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_gives_nan_in_its_sample_alone(bad: float) -> None:
    rows = np.array([[1.0, 2.0, 3.0, bad], [1.0, 2.0, 3.0, 4.0]])
    assert np.isnan(interquartile_mean(rows)).tolist() == [True, False]
    assert np.isnan(bootstrap_intervals(rows, interquartile_mean)).tolist() == [
        [True, True],
        [False, False],
    ]


# Intervals


def test_the_interval_of_one_value_is_the_value() -> None:
    assert bootstrap_interval([4.25], interquartile_mean) == (4.25, 4.25)


def test_the_interval_of_equal_values_is_their_value() -> None:
    assert bootstrap_interval([0.1] * 7, interquartile_mean, resamples=200) == (0.1, 0.1)


def test_the_interval_of_two_values_is_the_two() -> None:
    # A resample holds the smaller one twice with probability 1/4, which is more than 2.5%.
    assert bootstrap_interval([3.0, -1.0], interquartile_mean) == (-1.0, 3.0)


def test_the_ends_of_a_three_value_mean_follow_from_its_27_resamples() -> None:
    # The mean of three draws of {0, 1, 2} is 0 with probability 1/27 = 3.7%, at most 1/3 with 4/27.
    assert bootstrap_interval([0.0, 1.0, 2.0], mean) == (0.0, 2.0)
    inner = bootstrap_interval([0.0, 1.0, 2.0], mean, level=0.9)
    assert inner == pytest.approx((1 / 3, 5 / 3))


def test_the_same_arguments_give_the_same_interval_and_leave_the_global_generator_alone() -> None:
    before = repr(np.random.get_state())  # noqa: NPY002 - the global generator is what is watched
    values = draw(9)
    first = bootstrap_interval(values, interquartile_mean)
    assert bootstrap_interval(values, interquartile_mean) == first
    assert bootstrap_interval(values, interquartile_mean, seed=1) != first
    assert repr(np.random.get_state()) == before  # noqa: NPY002


def test_the_interval_moves_with_shift_and_scale() -> None:
    values = draw(10)
    low, high = bootstrap_interval(values, interquartile_mean)
    assert low < float(interquartile_mean(values)) < high
    moved = bootstrap_interval(5.0 + 3.0 * values, interquartile_mean)
    assert moved == pytest.approx((5 + 3 * low, 5 + 3 * high))
    mirrored = bootstrap_interval(-values, interquartile_mean)
    assert mirrored == pytest.approx((-high, -low))


def test_a_higher_level_gives_a_wider_interval() -> None:
    values = draw(12)
    narrow = bootstrap_interval(values, interquartile_mean, level=0.5)
    wide = bootstrap_interval(values, interquartile_mean, level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_rows_are_resampled_by_the_same_draws() -> None:
    rows = draw(4, 6)
    ends = bootstrap_intervals(rows, interquartile_mean, resamples=500)
    for row, (low, high) in zip(rows, ends, strict=True):
        assert bootstrap_interval(row, interquartile_mean, resamples=500) == (low, high)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_intervals_of_normal_samples_hold_the_centre_as_often_as_they_should(
    statistic: Statistic,
) -> None:
    ends = bootstrap_intervals(draw(2000, 24), statistic, resamples=1000)
    covered = ((ends[:, 0] <= 0) & (ends[:, 1] >= 0)).mean()
    # Of the mean: P(|t| < 1.96 sqrt(23/24)) = 0.9325 with 23 degrees of freedom, for the percentile
    # bootstrap is a little narrow in small samples; 0.02 is 3.5 standard errors of this estimate.
    assert covered == pytest.approx(0.9325, abs=0.02)


def test_the_width_is_that_of_the_normal_approximation_for_a_large_sample() -> None:
    values = draw(400)
    low, high = bootstrap_interval(values, mean)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)


@pytest.mark.parametrize("empty", [[], 3.0, np.zeros((2, 0))])
def test_an_empty_sample_is_refused(empty: object) -> None:
    with pytest.raises(DataError, match="at least one value"):
        interquartile_mean(empty)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="at least one value"):
        bootstrap_interval(empty, mean)  # type: ignore[arg-type]


def test_a_wrong_level_or_number_is_refused() -> None:
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(DataError, match="level must be between 0 and 1"):
            bootstrap_interval([1.0], mean, level=level)
    with pytest.raises(DataError, match="resamples must be >= 1, got 0"):
        bootstrap_interval([1.0], mean, resamples=0)


# Probability of improvement


def test_the_probability_of_improvement_counts_pairs_and_halves_of_equals() -> None:
    assert float(probability_of_improvement([3.0, 1.0], [2.0, 1.0])) == (2 + 0 + 0.5) / 4
    assert float(probability_of_improvement([5.0], [1.0, 2.0, 3.0])) == 1.0
    x, y = draw(6), draw(4, seed=5)
    both = probability_of_improvement(x, y) + probability_of_improvement(y, x)
    assert float(both) == pytest.approx(1.0)


def test_a_method_is_no_improvement_over_itself() -> None:
    x = draw(9)
    assert float(probability_of_improvement(x, x)) == 0.5
    low, high = improvement_interval(x, x)
    assert low < 0.5 < high


def test_the_interval_of_the_improvement_is_a_point_where_nothing_overlaps() -> None:
    assert improvement_interval([5.0, 6.0, 7.0], [1.0, 2.0]) == (1.0, 1.0)
    wide = improvement_interval(draw(5), draw(5, seed=8), level=0.99)
    narrow = improvement_interval(draw(5), draw(5, seed=8), level=0.5)
    assert wide.low <= narrow.low < narrow.high <= wide.high


def test_what_is_not_finite_improves_nothing() -> None:
    assert np.isnan(probability_of_improvement([1.0, np.nan], [0.0]))
    with pytest.raises(DataError, match="at least one value"):
        probability_of_improvement([], [0.0])


# Over tasks


def test_scores_lie_between_a_random_policy_and_the_reference() -> None:
    scores = normalised([10.0, 30.0, 50.0, 0.0], random=10.0, reference=50.0)
    assert scores.tolist() == [0.0, 0.5, 1.0, -0.25]
    # A reference below random turns the scale around: costs.
    assert float(normalised(-3.0, random=-1.0, reference=-5.0)) == 0.5
    for reference in (1.0, np.inf, np.nan):
        with pytest.raises(DataError, match="two different returns"):
            normalised([1.0], random=1.0, reference=reference)


def test_the_aggregate_is_the_figure_of_all_scores_together() -> None:
    tasks = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0, 6.0, 7.0]]
    assert aggregate(tasks) == 3.5
    assert aggregate(tasks, mean) == 3.5
    assert aggregate([[0.0, 1.0, 2.0], [90.0]], mean) == 93 / 4


def test_one_task_is_resampled_as_its_seeds_are() -> None:
    values = draw(7)
    alone = bootstrap_interval(values, interquartile_mean)
    assert stratified_interval([values]) == alone


def test_seeds_are_drawn_within_their_task() -> None:
    # Each task's scores are equal, so no resample differs, however far apart the tasks are.
    tasks = [[1.0] * 3, [100.0] * 5]
    assert stratified_interval(tasks, mean, resamples=200) == (63 - 0.125, 63 - 0.125)
    pooled = bootstrap_interval([1.0] * 3 + [100.0] * 5, mean, resamples=200)
    assert pooled.low < 63 - 0.125 < pooled.high


def test_the_stratified_interval_has_the_width_of_the_strata_variances() -> None:
    tasks = [draw(200), 10 + 3 * draw(300, seed=4)]
    low, high = stratified_interval(tasks, mean)
    variance = (200 * tasks[0].var() + 300 * tasks[1].var()) / 500**2
    assert high - low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.05)


def test_the_improvement_over_tasks_is_the_mean_of_the_tasks_own() -> None:
    first, second = [[3.0, 1.0], [5.0]], [[2.0, 1.0], [1.0, 7.0]]
    middle, (low, high) = improvement_over_tasks(first, second, resamples=500)
    assert middle == (2.5 / 4 + 1 / 2) / 2
    assert low <= middle <= high
    # On every task each run beats each: the scales of the tasks do not matter.
    assert improvement_over_tasks([[2.0], [1e6, 2e6]], [[1.0], [3.0]]) == (1.0, (1.0, 1.0))
    with pytest.raises(DataError, match="same tasks, got 2 and 1"):
        improvement_over_tasks(first, second[:1])


def test_the_profile_is_the_mean_over_tasks_of_the_share_above() -> None:
    tasks = [[0.0, 0.5], [0.5, 1.0, 1.0, 1.0]]
    shares = performance_profile(tasks, [-1.0, 0.0, 0.5, 0.9, 1.0])
    # Above 0: half of the first task's runs and all of the second's; "above" is strict.
    assert shares.tolist() == [1.0, 0.75, 0.375, 0.375, 0.0]


def test_the_area_under_a_profile_is_the_mean_over_tasks() -> None:
    tasks = [np.abs(draw(5)), np.abs(draw(9, seed=4))]
    fine = np.linspace(0, 6, 60_000, endpoint=False)
    area = 6 * performance_profile(tasks, fine).mean()
    assert float(area) == pytest.approx(np.mean([task.mean() for task in tasks]), abs=1e-3)


def test_intervals_of_a_profile_hold_it_and_follow_the_binomial() -> None:
    tasks = [np.arange(400.0)]
    ends = profile_intervals(tasks, [-1.0, 199.5, 500.0], resamples=4000)
    assert ends[0].tolist() == [1.0, 1.0]
    assert ends[2].tolist() == [0.0, 0.0]
    assert float(ends[1, 1] - ends[1, 0]) == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.06)
    assert ends[1].mean() == pytest.approx(0.5, abs=0.01)


def test_no_task_is_refused() -> None:
    for call in (aggregate, stratified_interval):
        with pytest.raises(DataError, match="at least one task"):
            call([])
    with pytest.raises(DataError, match="at least one value"):
        performance_profile([[1.0], []], [0.0])

"""Running statistics equal those of all the data at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rl_training.data.normalizer import RunningNorm


def _data(rows: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(0)
    scale, shift = np.array([0.1, 1.0, 30.0]), np.array([5.0, 0.0, -100.0])
    return np.asarray(rng.normal(size=(2, rows, 3)) * scale + shift, dtype=np.float32)


@pytest.mark.parametrize("cuts", [(), (1,), (7, 8, 100), (50, 100, 150)])
def test_batches_together_give_mean_and_variance_of_all_rows(cuts: tuple[int, ...]) -> None:
    data = _data(200)
    norm = RunningNorm(2, (3,), "cpu")
    for batch in np.split(data, cuts, axis=1):
        norm.update(torch.from_numpy(batch))
    everything = data.astype(np.float64)
    np.testing.assert_allclose(norm.mean[:, 0], everything.mean(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.variance[:, 0], everything.var(1), rtol=1e-3)
    assert norm.count.item() == 200


def test_a_batch_counts_for_the_rows_it_is_given_as_weight() -> None:
    data = torch.from_numpy(_data(40))
    weighed, repeated = RunningNorm(2, (3,), "cpu"), RunningNorm(2, (3,), "cpu")
    weighed.update(data[:, :30])
    weighed.update(data[:, 30:], 50.0)
    repeated.update(torch.cat([data[:, :30], *[data[:, 30:]] * 5], 1))
    torch.testing.assert_close(weighed.mean, repeated.mean)
    torch.testing.assert_close(weighed.variance, repeated.variance, rtol=1e-4, atol=1e-4)
    assert weighed.count == repeated.count


def test_seeds_have_statistics_of_their_own() -> None:
    norm = RunningNorm(2, (1,), "cpu")
    norm.update(torch.tensor([[[1.0], [3.0]], [[10.0], [10.0]]]))
    assert norm.mean.flatten().tolist() == [2.0, 10.0]
    assert norm.variance.flatten().tolist() == [1.0, 0.0]


def test_standardised_rows_have_mean_zero_and_variance_one() -> None:
    data = torch.from_numpy(_data(500))
    norm = RunningNorm(2, (3,), "cpu")
    norm.update(data)
    variance, mean = torch.var_mean(norm(data), 1, correction=0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-3, rtol=0)
    torch.testing.assert_close(variance, torch.ones_like(variance), atol=1e-3, rtol=0)


def test_before_any_data_observations_pass_unchanged() -> None:
    x = torch.tensor([[[0.5], [-2.0]]])
    torch.testing.assert_close(RunningNorm(1, (1,), "cpu")(x), x)


def test_outliers_are_clipped_to_ten() -> None:
    norm = RunningNorm(1, (1,), "cpu")
    assert norm(torch.tensor([[[1e9], [-1e9]]])).flatten().tolist() == [10.0, -10.0]


def test_a_constant_observation_does_not_blow_up() -> None:
    norm = RunningNorm(1, (1,), "cpu")
    norm.update(torch.full((1, 10, 1), 3.0))
    assert norm(torch.full((1, 1, 1), 3.0)).item() == 0.0


def test_state_round_trip_goes_on_to_the_bit() -> None:
    data = torch.from_numpy(_data(60))
    first, second = RunningNorm(2, (3,), "cpu"), RunningNorm(2, (3,), "cpu")
    first.update(data[:, :30])
    second.load_state_dict(first.state_dict())
    for norm in (first, second):
        norm.update(data[:, 30:])
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.variance, second.variance)
    assert torch.equal(first(data), second(data))

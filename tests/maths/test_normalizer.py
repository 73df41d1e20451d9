"""Running statistics equal those of all the data at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.datasets import TOY, columns_of, rebuilt, toy_data
from rl_training.algorithms.dynamics.fit import fit_statistics
from rl_training.algorithms.td3_bc import TD3BC
from rl_training.data.normalizer import RunningNorm, divisor
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.models.actor_with_critics import MLPTD3Model
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.ope.fitted_q import _standardized
from rl_training.ope.fqe import ValueUnits


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


@pytest.mark.parametrize("jitter", [0.0, 2e-7], ids=["exact", "rounded"])
def test_an_entry_that_never_changed_is_not_amplified_when_it_does(jitter: float) -> None:
    values = torch.tensor([0.0, 0.1, 1e4 + 0.3, -3e6])
    generator = torch.Generator().manual_seed(0)
    norm = RunningNorm(1, (4,), "cpu")
    for size, weight in ((7, None), (1000, 3.0), (64, None), (1000, 1e5)):
        noise = 1 + jitter * (torch.rand(1, size, 4, generator=generator) - 0.5)
        norm.update(values * noise, weight)
    shift = 1e-3 * values.abs().clamp(min=1.0)
    assert (norm(values.view(1, 1, 4)).abs() <= 0.1 * shift).all()
    moved = norm((values + shift).view(1, 1, 4))
    assert (moved.abs() <= torch.minimum(1.2 * shift, torch.tensor(10.0))).all()


@pytest.mark.parametrize(
    ("deviation", "mean", "expected"),
    [
        (1.0, 0.0, 1.0),
        (0.02, 5.0, 0.02),
        (1e-4, 0.0, 1e-3),  # changes, but in units so small that it is hardly amplified
        (2e-6, 0.0, 1e-3),
        (1e-7, 0.0, 1.0),
        (0.0, -3.0, 1.0),
        (1e-3, 1e4, 1.0),  # a millionth of its size: rounding
        (30.0, -1e4, 30.0),
    ],
)
def test_what_standardising_divides_by(deviation: float, mean: float, expected: float) -> None:
    divided_by = divisor(torch.tensor([mean]), torch.tensor([deviation]))
    torch.testing.assert_close(divided_by, torch.tensor([expected]))


def test_every_standardiser_leaves_a_constant_entry_its_scale() -> None:
    """A learner on recorded rows, a model of the dynamics, and offline evaluation."""
    columns = columns_of(toy_data(200))
    for name in ("observations", "next_observations"):
        columns[name][:, 1] = 0.1
    data = rebuilt(columns).in_learner_units(TOY)
    learner = TD3BC(model=MLPTD3Model(3, 2, (8,)), seeds=(0,))
    learner.see_data(DatasetBuffer(data))
    obs = torch.from_numpy(data.observations[:1])[None]
    moved = obs + torch.tensor([0.0, 1e-3, 0.0])
    apart = learner.normalize(moved) - learner.normalize(obs)
    torch.testing.assert_close(apart[0, 0], torch.tensor([0.0, 1e-3, 0.0]), atol=1e-6, rtol=0)
    model = MLPMOPOEnsembleModel(3, 2, hidden_sizes=(8,))
    near = torch.cat([torch.from_numpy(data.observations), torch.from_numpy(data.actions)], 1)
    near[:, 1] += 1e-5 * torch.rand(200, generator=torch.Generator().manual_seed(0))
    fit_statistics(model, near[None])
    assert model.input_scale.max() <= 1000.0
    shown = _standardized(data, ValueUnits(0.0, 1.0), 0.9)
    assert np.abs(shown.observations[:, 1]).max() < 1e-6


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

"""Batch renormalisation against NumPy, through its warm-up and past its bounds."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.models.batch_renorm import RenormedMLP, StackedBatchRenorm, batch_statistics
from rl_training.rng import Rng

Array = NDArray[np.float64]
I, B, N = 4, 6, 2
EPS = 1e-3


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def batches(count: int, seeds: tuple[int, ...] = (0,), *, members: int = 0) -> list[Tensor]:
    """Batches whose place and width change far more than statistics can follow."""
    rng = Rng(seeds, "batches")
    lead = (members,) if members else ()
    return [
        rng.normal(*lead, B, I) * (0.2 if key % 3 else 6.0) + (80.0 if key % 5 == 4 else 0.5)
        for key in range(count)
    ]


class Reference:
    """The paper's Algorithm 1 for one seed and member, and a warm-up of plain normalisation."""

    def __init__(self, momentum: float, warmup: int, scale: Array, shift: Array) -> None:
        self.mean, self.var, self.steps = np.zeros(I), np.ones(I), 0
        self.momentum, self.warmup, self.scale, self.shift = momentum, warmup, scale, shift
        self.bounded: set[str] = set()

    def train(self, x: Array) -> Array:
        mean, var = x.mean(0), x.var(0)
        sigma, running = np.sqrt(var + EPS), np.sqrt(self.var + EPS)
        r, d = np.ones(I), np.zeros(I)
        if self.steps >= self.warmup:
            r, d = sigma / running, (mean - self.mean) / running
            self.bounded |= {"r"} if ((r > 3) | (r < 1 / 3)).any() else set()
            self.bounded |= {"d"} if (np.abs(d) > 5).any() else set()
            r, d = np.clip(r, 1 / 3, 3), np.clip(d, -5, 5)
        self.mean = self.momentum * self.mean + (1 - self.momentum) * mean
        self.var = self.momentum * self.var + (1 - self.momentum) * var
        self.steps += 1
        y: Array = ((x - mean) / sigma * r + d) * self.scale + self.shift
        return y

    def evaluate(self, x: Array) -> Array:
        return (x - self.mean) / np.sqrt(self.var + EPS) * self.scale + self.shift


def make_layer(
    seeds: tuple[int, ...] = (0,), members: tuple[int, ...] = (), **changes: Any
) -> StackedBatchRenorm:
    settings = {"momentum": 0.9, "warmup": 3} | changes
    layer = StackedBatchRenorm(I, Rng(seeds, "layer"), members, **settings)
    with torch.no_grad():  # the same for every seed and member
        rng = Rng((5,), "affine")
        layer.scale.copy_((rng.uniform(1, I) + 0.5).expand_as(layer.scale))
        layer.shift.copy_(rng.normal(1, I).expand_as(layer.shift))
    return layer


def test_every_batch_and_statistic_is_that_of_numpy() -> None:
    layer = make_layer((0, 1), (N,))
    scale, shift = array(layer.scale)[0, 0, 0], array(layer.shift)[0, 0, 0]
    references = {(s, n): Reference(0.9, 3, scale, shift) for s in range(2) for n in range(N)}
    for x in batches(12, (0, 1), members=N):
        with batch_statistics(layer):
            trained = array(layer(x))
        evaluated = array(layer(x))
        for (seed, member), reference in references.items():
            rows = array(x)[seed, member]
            np.testing.assert_allclose(
                trained[seed, member], reference.train(rows), rtol=1e-4, atol=1e-4
            )
            np.testing.assert_allclose(
                array(layer.mean)[seed, member, 0], reference.mean, rtol=1e-5, atol=1e-6
            )
            np.testing.assert_allclose(
                array(layer.variance)[seed, member, 0], reference.var, rtol=1e-5
            )
            np.testing.assert_allclose(
                evaluated[seed, member], reference.evaluate(rows), rtol=1e-4, atol=1e-4
            )
    assert layer.steps == 12
    assert all(reference.bounded == {"r", "d"} for reference in references.values())


def test_while_it_warms_up_a_batch_has_mean_0_and_variance_1() -> None:
    layer = make_layer(warmup=2)
    with torch.no_grad():
        layer.scale.fill_(1.0)
        layer.shift.zero_()
    spread = []
    for x in batches(3):
        with batch_statistics(layer), torch.no_grad():
            y = layer(100 * x)
        spread.append(float(y.var(-2, correction=0).mean()))
        if len(spread) <= 2:
            torch.testing.assert_close(y.mean(-2), torch.zeros(1, I), atol=1e-5, rtol=0)
    assert spread[:2] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert spread[2] != pytest.approx(1.0, abs=0.1), "then the running statistics count"


def test_no_gradient_flows_through_r_and_d() -> None:
    layer = make_layer(warmup=0).double()
    weight = Rng((7,), "weight").normal(B, I).double()
    x = batches(2)[1].double() * 3
    running = (array(layer.mean)[0], array(layer.variance)[0])

    def frozen(rows: Array, r: Array, d: Array) -> float:
        sigma = np.sqrt(rows.var(0) + EPS)
        y = ((rows - rows.mean(0)) / sigma * r + d) * array(layer.scale)[0, 0]
        return float((y * array(weight)[0]).sum())

    rows = array(x)[0]
    deviation = np.sqrt(running[1][0] + EPS)
    r = np.clip(np.sqrt(rows.var(0) + EPS) / deviation, 1 / 3, 3)
    d = np.clip((rows.mean(0) - running[0][0]) / deviation, -5, 5)
    assert ((r > 1 / 3) & (r < 3)).any(), "r is not at its bound everywhere"
    expected = np.zeros_like(rows)
    for place in np.ndindex(*rows.shape):
        moved = [rows.copy(), rows.copy()]
        moved[0][place] += 1e-5
        moved[1][place] -= 1e-5
        expected[place] = (frozen(moved[0], r, d) - frozen(moved[1], r, d)) / 2e-5
    x.requires_grad_()
    with batch_statistics(layer):
        loss = (layer(x) * weight).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    np.testing.assert_allclose(array(gradient)[0], expected, rtol=1e-4, atol=1e-6)


def test_a_unit_that_never_fires_has_a_finite_gradient() -> None:
    layer = make_layer(warmup=0)
    x = torch.zeros(1, B, I, requires_grad=True)
    for _ in range(2):
        with batch_statistics(layer):
            loss = layer(x).square().sum()
        assert torch.autograd.grad(loss, x)[0].isfinite().all()


def test_evaluation_moves_nothing_and_shows_some_members_what_all_are_shown() -> None:
    layer = make_layer((0, 1), (3,))
    with batch_statistics(layer):
        layer(batches(1, (0, 1), members=3)[0])
    before = copy.deepcopy(layer.state_dict())
    x = batches(1, (0, 1), members=3)[0]
    chosen = torch.tensor([[2, 0], [1, 2]])
    rows = torch.stack([x[seed, chosen[seed]] for seed in range(2)])
    expected = torch.stack([layer(x)[seed, chosen[seed]] for seed in range(2)])
    torch.testing.assert_close(layer(rows, chosen), expected)
    after = layer.state_dict()
    assert after.keys() == {"scale", "shift", "mean", "variance", "steps"}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def make_network(seeds: tuple[int, ...] = (0,), members: tuple[int, ...] = (N,)) -> RenormedMLP:
    return RenormedMLP((I, 5, 3, 1), Rng(seeds, "net"), members=members, momentum=0.9, warmup=1)


def test_a_network_normalises_inputs_and_what_follows_each_activation() -> None:
    network, x = make_network(), batches(2)[1]
    with batch_statistics(network):
        out = array(network.forward(x))

    def plain(h: Array) -> Array:
        result: Array = (h - h.mean(0)) / np.sqrt(h.var(0) + EPS)
        return result

    for member in range(N):
        h = plain(array(x)[0])
        for index, layer in enumerate(network.layers):
            h = h @ array(layer.weight)[0, member] + array(layer.bias)[0, member]  # type: ignore[arg-type]
            h = plain(np.maximum(h, 0)) if index < 2 else h
        np.testing.assert_allclose(out[0, member], h, rtol=1e-3, atol=1e-4)


def test_seeds_of_a_group_have_the_statistics_they_have_alone() -> None:
    group, single = make_network((3, 8)), make_network((8,))
    for both, own in zip(batches(4, (3, 8)), batches(4, (8,)), strict=True):
        with batch_statistics(group), batch_statistics(single):
            torch.testing.assert_close(group.forward(both)[1:], single.forward(own))
    for name, value in single.state_dict().items():
        other = group.state_dict()[name]
        torch.testing.assert_close(other if value.ndim == 0 else other[1:], value)


def test_members_and_seeds_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = torch.baddbmm

    def counted(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        sizes.append(weight.shape[0])
        return original(bias, x, weight)

    monkeypatch.setattr(torch, "baddbmm", counted)
    make_network((0, 1, 2)).forward(batches(1, (0, 1, 2))[0])
    assert sizes == [3 * N] * 3

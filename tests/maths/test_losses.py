"""Shared losses: advantages against slow references, the rest against numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import td_target, weighted_mean
from rl_training.algorithms.losses import (
    gae,
    huber,
    ppo_policy_loss,
    ppo_value_loss,
    quantile_huber,
)

Array = NDArray[Any]
FLAGS = npst.arrays(
    bool,
    npst.array_shapes(min_dims=3, max_dims=3, max_side=6).map(lambda s: (2, s[1], min(s[2], 3), 2)),
)
NUMBERS = st.integers(0, 2**32 - 1)
LAMBDAS = st.sampled_from([0.0, 0.3, 0.95, 1.0])
GAMMA = 0.9


class Rollout:
    """Random numbers [S, T, n] under given flags [S, T, n, 2]."""

    def __init__(self, flags: Array, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.terminated, self.truncated = flags[..., 0], flags[..., 1]
        self.shape = self.terminated.shape
        self.reward, self.value, self.next_value = rng.normal(size=(3, *self.shape))
        # Inside an episode the successor is the next row, so its value is that row's.
        inside = ~(self.terminated | self.truncated)[:, :-1]
        self.next_value[:, :-1][inside] = self.value[:, 1:][inside]

    def advantage(self, gae_lambda: float) -> Array:
        tensors = [torch.from_numpy(x) for x in (self.reward, self.value, self.next_value)]
        flags = [torch.from_numpy(x.copy()) for x in (self.terminated, self.truncated)]
        result: Array = gae(*tensors, *flags, gamma=GAMMA, gae_lambda=gae_lambda).numpy()
        assert result.shape == self.shape
        return result

    def td_errors(self) -> Array:
        bootstrap: Array = np.where(self.terminated, 0.0, self.next_value)
        errors: Array = self.reward + GAMMA * bootstrap - self.value
        return errors


def forward_sum(rollout: Rollout, gae_lambda: float) -> Array:
    """Eq. 16 as it is written, a sum forward in time, one environment after another."""
    errors = rollout.td_errors()
    ended = rollout.terminated | rollout.truncated
    result = np.zeros(rollout.shape)
    seeds, steps, envs = rollout.shape
    for seed, start, env in np.ndindex(seeds, steps, envs):
        for step in range(start, steps):
            result[seed, start, env] += (GAMMA * gae_lambda) ** (step - start) * errors[
                seed, step, env
            ]
            if ended[seed, step, env]:
                break
    return result


def monte_carlo_return(rollout: Rollout, seed: int, start: int, env: int) -> float:
    """Discounted rewards to the episode's end, with the value where the future was only cut off."""
    total, discount = 0.0, 1.0
    for step in range(start, rollout.shape[1]):
        at = (seed, step, env)
        total += discount * rollout.reward[at]
        discount *= GAMMA
        if rollout.terminated[at]:
            return float(total)
        if rollout.truncated[at] or step == rollout.shape[1] - 1:
            return float(total + discount * rollout.next_value[at])
    raise AssertionError("the last step returns")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(FLAGS, NUMBERS, LAMBDAS)
def test_gae_equals_the_sum_of_discounted_td_errors(
    flags: Array, seed: int, gae_lambda: float
) -> None:
    rollout = Rollout(flags, seed)
    np.testing.assert_allclose(
        rollout.advantage(gae_lambda), forward_sum(rollout, gae_lambda), atol=1e-12
    )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(FLAGS, NUMBERS)
def test_gae_with_lambda_one_is_the_monte_carlo_return_minus_the_value(
    flags: Array, seed: int
) -> None:
    rollout = Rollout(flags, seed)
    returns = np.array([monte_carlo_return(rollout, *at) for at in np.ndindex(rollout.shape)])
    expected = returns.reshape(rollout.shape) - rollout.value
    np.testing.assert_allclose(rollout.advantage(1.0), expected, atol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(FLAGS, NUMBERS)
def test_gae_with_lambda_zero_is_the_one_step_td_error(flags: Array, seed: int) -> None:
    rollout = Rollout(flags, seed)
    np.testing.assert_allclose(rollout.advantage(0.0), rollout.td_errors(), atol=1e-12)


def test_gae_by_hand_over_a_time_limit_and_a_termination() -> None:
    # Steps: goes on, time limit, goes on, termination; gamma = lambda = 1/2.
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
    value = torch.tensor([1.0, 1.0, 1.0, 1.0]).view(1, 4, 1)
    next_value = torch.tensor([1.0, 8.0, 1.0, 8.0]).view(1, 4, 1)
    terminated = torch.tensor([False, False, False, True]).view(1, 4, 1)
    truncated = torch.tensor([False, True, False, False]).view(1, 4, 1)
    result = gae(reward, value, next_value, terminated, truncated, gamma=0.5, gae_lambda=0.5)
    # delta = 0.5, 5, 2.5, 3; a quarter of the next advantage is added inside an episode only.
    assert result.flatten().tolist() == [0.5 + 0.25 * 5, 5.0, 2.5 + 0.25 * 3, 3.0]


def test_gae_lets_termination_win_when_both_flags_are_set() -> None:
    one, both = torch.ones(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool)
    result = gae(3 * one, one, 100 * one, both, both, gamma=0.9, gae_lambda=0.95)
    assert result.item() == 2.0


def test_gae_keeps_environments_and_seeds_apart() -> None:
    rollout = Rollout(np.zeros((2, 5, 3, 2), dtype=bool), 0)
    before = rollout.advantage(0.95)
    rollout.reward[1, :, 2] += 100.0
    after = rollout.advantage(0.95)
    changed = (before != after).any(1)
    assert changed.tolist() == [[False, False, False], [False, False, True]]


def test_td_target_by_hand() -> None:
    reward, discount = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.0]])
    target = td_target(reward, discount, torch.tensor([[4.0, 1000.0]]))
    assert target.tolist() == [[3.0, 2.0]]


def test_weighted_mean_divides_by_the_batch_not_by_the_weights() -> None:
    loss = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert weighted_mean(loss, None).tolist() == [2.0, 2.0]
    weight = torch.tensor([[1.0, 0.5], [0.0, 0.25]])
    assert weighted_mean(loss, weight).tolist() == [1.25, 0.25]


def test_huber_is_quadratic_inside_and_linear_outside() -> None:
    error = torch.tensor([0.0, 0.5, -0.5, 1.0, 3.0, -3.0])
    assert huber(error, torch.zeros_like(error)).tolist() == [0.0, 0.125, 0.125, 0.5, 2.5, 2.5]
    # kappa (|x| - kappa / 2) with kappa 2
    assert huber(torch.tensor([1.0, 3.0]), torch.zeros(2), kappa=2.0).tolist() == [0.5, 4.0]


def test_huber_has_the_gradient_of_a_clipped_error() -> None:
    error = torch.tensor([-3.0, -0.5, 0.25, 7.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(huber(error, torch.zeros_like(error)).sum(), error)
    assert gradient.tolist() == [-1.0, -0.5, 0.25, 1.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 2.0, -2.4, 0.0),  # better action, already likelier than the clip allows: 1.2 * 2
        (0.5, 2.0, -1.0, -2.0),  # better action made rarer: no clipping, it must be mended
        (1.5, -2.0, 3.0, 2.0),  # worse action made likelier: no clipping either
        (0.5, -2.0, 1.6, 0.0),  # worse action, already rarer than the clip allows: 0.8 * 2
        (1.1, 2.0, -2.2, -2.0),  # inside the interval nothing is clipped
        (0.9, -2.0, 1.8, 2.0),
    ],
)
def test_clipped_surrogate_in_every_sign_and_clip_case(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    r = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    result: Tensor = ppo_policy_loss(r, torch.tensor([advantage], dtype=torch.float64), 0.2)
    assert result.item() == pytest.approx(loss)
    assert torch.autograd.grad(result.sum(), r)[0].item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("value", "target", "loss"),
    [
        (2.0, 2.0, 0.5 * 0.8**2),  # clipped prediction 1.2 is worse than a perfect one: it counts
        (2.0, 0.0, 0.5 * 2.0**2),  # the plain error is worse than the clipped one: it counts
        (1.1, 3.0, 0.5 * 1.9**2),  # inside the clip both agree
    ],
)
def test_value_loss_takes_the_worse_of_plain_and_clipped(
    value: float, target: float, loss: float
) -> None:
    now, old, wanted = (torch.tensor([x], dtype=torch.float64) for x in (value, 1.0, target))
    assert ppo_value_loss(now, old, wanted, 0.2).item() == pytest.approx(loss)


def test_value_loss_without_clip_is_half_the_squared_error() -> None:
    loss = ppo_value_loss(torch.tensor([5.0]), torch.tensor([-9.0]), torch.tensor([2.0]), None)
    assert loss.item() == 4.5


def slow_quantile_huber(
    prediction: Array, target: Array, tau: Array, kappa: float
) -> list[list[float]]:
    """Eq. 10 of arXiv:1710.10044 by loops."""

    def one(u: float, fraction: float) -> float:
        weight = abs(fraction - float(u < 0))
        if kappa == 0:
            return weight * abs(u)
        square, line = 0.5 * u * u, kappa * (abs(u) - 0.5 * kappa)
        return weight * (square if abs(u) <= kappa else line) / kappa

    return [
        [
            sum(float(np.mean([one(y - q, f) for y in ys])) for q, f in zip(qs, fs, strict=True))
            for qs, ys, fs in zip(*seed, strict=True)
        ]
        for seed in zip(prediction, target, tau, strict=True)
    ]


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0, 5.0])
def test_quantile_huber_equals_a_slow_version(kappa: float) -> None:
    random = np.random.default_rng(0)
    prediction, target = random.normal(size=(2, 3, 4)) * 2, random.normal(size=(2, 3, 6)) * 2
    tau = random.uniform(size=(2, 3, 4))
    tensors = [torch.from_numpy(array) for array in (prediction, target, tau)]
    found = quantile_huber(tensors[0], tensors[1], tensors[2], kappa)
    np.testing.assert_allclose(found.numpy(), slow_quantile_huber(prediction, target, tau, kappa))


def test_the_slope_of_the_plain_quantile_loss_is_the_share_of_targets_below_less_tau() -> None:
    target = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    for value, below in ((0.0, 0.0), (2.5, 0.5), (3.5, 0.75), (9.0, 1.0)):
        prediction = torch.tensor([[value]], requires_grad=True)
        loss = quantile_huber(prediction, target, torch.tensor([0.7]), 0.0).sum()
        (slope,) = torch.autograd.grad(loss, prediction)
        assert slope.item() == pytest.approx(below - 0.7)

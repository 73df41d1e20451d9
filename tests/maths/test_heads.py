"""Action distributions: densities that integrate to one, and samples that follow them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, distributions

from rl_training.models.actor_with_critics import tanh_gaussian_sample
from rl_training.models.heads import categorical_log_prob_entropy, gaussian_log_prob, gumbel_sample
from rl_training.models.mlp_actor_critic import MLPActorCriticModel
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng


def library_log_prob(distribution: distributions.Distribution, value: Tensor) -> Tensor:
    result: Tensor = distribution.log_prob(value)
    return result


def library_entropy(distribution: distributions.Distribution) -> Tensor:
    result: Tensor = distribution.entropy()
    return result


def entropy_of(logits: Tensor) -> float:
    """Entropy of one categorical distribution; the action does not matter to it."""
    return categorical_log_prob_entropy(logits, torch.zeros((), dtype=torch.int64))[1].item()


def _at(pre_tanh: Tensor, mean: float, log_std: float) -> tuple[Tensor, Tensor]:
    """Action and log density for given values before the tanh, `[B, 1]`."""
    noise = (pre_tanh - mean) / math.exp(log_std)
    shape = torch.ones_like(pre_tanh)
    return tanh_gaussian_sample(mean * shape, log_std * shape, noise)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.3, -0.5), (-1.0, 0.5), (0.5, -3.0)])
def test_tanh_gaussian_density_integrates_to_one(mean: float, log_std: float) -> None:
    width = 12 * math.exp(log_std)
    grid = torch.linspace(mean - width, mean + width, 200_001, dtype=torch.float64).unsqueeze(-1)
    action, log_prob = _at(grid, mean, log_std)
    assert (action.abs() < 1).float().mean() > 0.5, "the grid lies inside the interval"
    total = torch.trapezoid(log_prob.exp(), action.squeeze(-1))
    assert total.item() == pytest.approx(1.0, abs=1e-4)


def test_tanh_gaussian_log_density_is_the_change_of_variables() -> None:
    grid = torch.linspace(-4, 4, 101, dtype=torch.float64).unsqueeze(-1)
    action, log_prob = _at(grid, 0.4, -0.7)
    normal = distributions.Normal(0.4, math.exp(-0.7))
    expected = library_log_prob(normal, grid) - torch.log(1 - torch.tanh(grid) ** 2)
    torch.testing.assert_close(log_prob, expected.squeeze(-1))
    torch.testing.assert_close(action, torch.tanh(grid))


def test_tanh_gaussian_log_density_sums_over_action_dimensions() -> None:
    noise = Rng((0,), "noise").normal(5, 3)
    mean, log_std = torch.full_like(noise, 0.2), torch.full_like(noise, -0.3)
    _, joint = tanh_gaussian_sample(mean, log_std, noise)
    single = [
        tanh_gaussian_sample(mean[..., i : i + 1], log_std[..., i : i + 1], noise[..., i : i + 1])
        for i in range(3)
    ]
    torch.testing.assert_close(joint, sum((s[1] for s in single), torch.zeros(1, 5)))


@pytest.mark.parametrize("extreme", [-20.0, 20.0])
def test_tanh_gaussian_stays_finite_far_out(extreme: float) -> None:
    mean = torch.tensor([[extreme]], requires_grad=True)
    log_std = torch.zeros(1, 1, requires_grad=True)
    action, log_prob = tanh_gaussian_sample(mean, log_std, torch.zeros(1, 1))
    # log(1 - tanh(u)^2) tends to 2 log 2 - 2 |u|, so the density is that of N(0) with it taken off.
    expected = -0.5 * math.log(2 * math.pi) - (2 * math.log(2) - 2 * abs(extreme))
    assert log_prob.item() == pytest.approx(expected, rel=1e-6)
    assert abs(action.item()) <= 1.0
    gradients = torch.autograd.grad((log_prob + action.sum(-1)).sum(), (mean, log_std))
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0].item() == pytest.approx(2.0 * math.copysign(1, extreme), rel=1e-5)


def test_tanh_gaussian_is_reparametrised() -> None:
    mean = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor([[0.7]], dtype=torch.float64)
    action, _ = tanh_gaussian_sample(mean, torch.full_like(mean, -1.0).detach(), noise)
    slope = torch.autograd.grad(action.sum(), mean)[0]
    assert slope.item() == pytest.approx(1 - math.tanh(0.5 + math.exp(-1) * 0.7) ** 2)


def test_gaussian_log_prob_equals_the_normal_density() -> None:
    noise, log_std = torch.tensor([[0.5, -2.0]]), torch.tensor([[0.1, -1.2]])
    value = 3.0 + log_std.exp() * noise
    expected = library_log_prob(distributions.Normal(3.0, log_std.exp()), value).sum(-1)
    torch.testing.assert_close(gaussian_log_prob(noise, log_std), expected)


def test_gumbel_samples_follow_the_softmax() -> None:
    logits = torch.tensor([1.0, -0.5, 0.0, 2.0])
    draws = 40_000
    sample = gumbel_sample(
        logits.expand(draws, 4), Rng((3,), "gumbel").exponential(draws, 4)[0].log()
    )
    expected = torch.softmax(logits, -1) * draws
    counts = torch.bincount(sample, minlength=4)
    chi_square = ((counts - expected).square() / expected).sum().item()
    assert chi_square < 16.27, "the 99.9 % point with 3 degrees of freedom"


def test_gumbel_sample_takes_the_extreme_draws() -> None:
    # The least noise wins among equal logits, even where it rounded to zero.
    noise = torch.tensor([[1.0, 1e-38, 2.0], [0.0, 1.0, 1.0], [90.0, 91.0, 1e-30]])
    assert gumbel_sample(torch.zeros(3, 3), noise.log()).tolist() == [1, 0, 2]


def test_gumbel_sample_by_hand() -> None:
    # logits - log(noise): 1 - log 4 < 0 - log 1 < 0.5 - log 1
    sample = gumbel_sample(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([4.0, 1.0, 1.0]).log())
    assert sample.item() == 2


def test_gumbel_sample_never_takes_an_impossible_action() -> None:
    logits = torch.tensor([0.0, -1e9]).expand(1000, 2)
    assert not gumbel_sample(logits, Rng((0,), "gumbel").exponential(1000, 2)[0].log()).any()


def test_categorical_log_prob_and_entropy_equal_the_library() -> None:
    logits = Rng((0,), "logits").normal(5, 3) * 3
    action = torch.tensor([[0, 1, 2, 1, 0]])
    reference = distributions.Categorical(logits=logits)
    log_prob, entropy = categorical_log_prob_entropy(logits, action)
    torch.testing.assert_close(log_prob, library_log_prob(reference, action))
    torch.testing.assert_close(entropy, library_entropy(reference))


@pytest.mark.parametrize("actions", [2, 5, 17])
def test_entropy_of_the_uniform_distribution_is_log_a(actions: int) -> None:
    entropy = entropy_of(torch.full((actions,), 0.7))
    assert entropy == pytest.approx(math.log(actions), rel=1e-6)


def test_entropy_of_a_certain_action_is_zero() -> None:
    assert entropy_of(torch.tensor([1000.0, -1000.0])) == 0.0


def test_gaussian_policy_equals_the_library() -> None:
    model = MLPActorCriticModel(
        3, 2, (16,), discrete=False, initial_log_std=-0.4, rng=Rng((0,), "m")
    )
    rng = Rng((0,), "data")
    obs, action = rng.normal(8, 3), rng.normal(8, 2)
    log_prob, entropy = model.log_prob_entropy(obs, action)
    reference = distributions.Normal(model.mode(obs), math.exp(-0.4))
    torch.testing.assert_close(log_prob, library_log_prob(reference, action).sum(-1))
    torch.testing.assert_close(entropy, library_entropy(reference).sum(-1))


def test_gaussian_policy_samples_around_its_mode() -> None:
    model = MLPActorCriticModel(
        3, 2, (16,), discrete=False, initial_log_std=-1.0, rng=Rng((0,), "m")
    )
    obs, noise = Rng((0,), "data").normal(8, 3), Rng((0,), "noise").normal(8, 2)
    torch.testing.assert_close(model.sample(obs, noise), model.mode(obs) + math.exp(-1.0) * noise)


def test_sac_policy_bounds_its_log_std() -> None:
    model = MLPSACModel(1, 2, (16,), rng=Rng((0,), "m"))
    log_std = model.policy(torch.tensor([[[1e6], [-1e6], [0.0]]]))[1]
    low, high = MLPSACModel.log_std_range
    assert low <= log_std.min().item() <= log_std.max().item() <= high

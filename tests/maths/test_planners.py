"""CEM, iCEM and MPPI on objectives whose optimum is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_training.algorithms.pets.planners import (
    Bounds,
    PlannerName,
    PlannerSettings,
    capped_variance,
    coloured_basis,
    coloured_noise,
    elites_of,
    mppi_weights,
    refit,
    search,
)
from rl_training.rng import Rng

S, N, H, A = 2, 3, 4, 2
BOX = Bounds(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]))
TARGET = torch.tensor([0.3, -0.7])


def quadratic(plans: Tensor) -> Tensor:
    """Highest at TARGET in every step."""
    assert plans.shape[:2] == (S, N)
    return -(plans - TARGET).square().sum((3, 4))


def found(name: PlannerName, bounds: Bounds = BOX) -> Tensor:
    settings = PlannerSettings(
        name=name, candidates=1000, topk=50, iterations=12, temperature=0.1, noise_scale=0.3
    )
    start = bounds.middle.expand(S, N, H, A)
    kept = start.unsqueeze(2).expand(-1, -1, settings.num_kept, -1, -1)
    plan, handed_on = search(quadratic, start, kept, bounds, settings, Rng((1, 2), "test"))
    assert handed_on.shape == kept.shape
    return plan


@pytest.mark.parametrize(("name", "error"), [("cem", 0.02), ("icem", 0.05), ("mppi", 0.15)])
def test_a_planner_finds_the_top_of_a_quadratic(name: PlannerName, error: float) -> None:
    plan = found(name)
    assert plan.shape == (S, N, H, A)
    assert (plan - TARGET).abs().max() < error


@pytest.mark.parametrize("name", ["cem", "icem", "mppi"])
def test_a_top_outside_the_box_is_sought_at_its_edge(name: PlannerName) -> None:
    tight = Bounds(torch.tensor([-1.0, -0.5]), torch.tensor([0.1, 0.5]))
    seen: list[Tensor] = []

    def watched(plans: Tensor) -> Tensor:
        seen.append(plans)
        return quadratic(plans)

    settings = PlannerSettings(
        name=name, candidates=1000, topk=50, iterations=20, temperature=0.05, epsilon=0.0
    )
    start = tight.middle.expand(S, N, H, A)
    kept = start.unsqueeze(2).expand(-1, -1, settings.num_kept, -1, -1)
    plan, _ = search(watched, start, kept, tight, settings, Rng((1, 2), "test"))
    for plans in (*seen, plan):
        assert (plans >= tight.low).all()
        assert (plans <= tight.high).all()
    assert (plan - torch.tensor([0.1, -0.5])).abs().max() < 0.12


def test_searches_do_not_mix_seeds_or_environments() -> None:
    goal = torch.linspace(-0.8, 0.3, S * N).view(S, N, 1, 1, 1)
    start = BOX.middle.expand(S, N, H, A)
    settings = PlannerSettings(candidates=1000, topk=50, iterations=12)
    kept = start.unsqueeze(2)[:, :, :0]
    plan, _ = search(
        lambda p: -(p - goal).square().sum((3, 4)), start, kept, BOX, settings, Rng((1, 2), "t")
    )
    assert (plan - goal.squeeze(2)).abs().max() < 0.02


def test_truncated_numbers_are_normal_within_two_deviations() -> None:
    drawn = Rng((0,), "test").truncated_normal(200_000)
    assert drawn.abs().max() <= 2
    inside = math.erf(math.sqrt(2))
    density = math.exp(-2) / math.sqrt(2 * math.pi)
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(drawn.var()) == pytest.approx(1 - 4 * density / inside, abs=0.01)
    below_one = math.erf(1 / math.sqrt(2)) / inside
    assert float((drawn.abs() < 1).float().mean()) == pytest.approx(below_one, abs=0.005)


def test_variance_is_capped_by_the_half_distance_to_the_nearer_bound() -> None:
    mean = torch.tensor([[0.6, -1.8]])
    capped = capped_variance(mean, torch.tensor([[0.25, 0.25]]), BOX)
    torch.testing.assert_close(capped, torch.tensor([[0.2**2, 0.1**2]]))
    wide = capped_variance(torch.tensor([[0.0, -0.75]]), torch.tensor([[0.01, 0.02]]), BOX)
    torch.testing.assert_close(wide, torch.tensor([[0.01, 0.02]]))


def test_mean_and_variance_keep_the_share_of_momentum() -> None:
    mean, variance = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    elites = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1, 1)  # mean 2, variance 1 over two
    new, spread = refit(mean, variance * 4, elites, PlannerSettings(momentum=0.25))
    assert float(new) == pytest.approx(0.25 * 0 + 0.75 * 2)
    assert float(spread) == pytest.approx(0.25 * 4 + 0.75 * 1)


def test_a_converged_search_stands_still_and_the_others_go_on() -> None:
    mean = torch.zeros(1, 2, 1, 2)
    variance = torch.tensor([[[[1e-4, 9e-4]], [[1e-4, 2e-3]]]])
    elites = torch.ones(1, 2, 5, 1, 2)
    new, spread = refit(mean, variance, elites, PlannerSettings(epsilon=1e-3))
    assert torch.equal(new[:, 0], mean[:, 0])
    assert torch.equal(spread[:, 0], variance[:, 0])
    torch.testing.assert_close(new[:, 1], torch.full((1, 1, 2), 0.9))


def test_elites_are_the_plans_of_highest_return_best_first() -> None:
    plans = torch.arange(4.0).view(1, 1, 4, 1, 1)
    elites = elites_of(plans, torch.tensor([[[1.0, 5.0, -2.0, 3.0]]]), 2)
    assert elites.flatten().tolist() == [1.0, 3.0]


def test_mppi_weighs_candidates_by_the_exponential_of_their_return() -> None:
    returns = torch.tensor([[1.0, 2.0, 4.0]])
    expected = torch.tensor([[math.exp(r / 2) for r in (1, 2, 4)]])
    torch.testing.assert_close(mppi_weights(returns, 2.0), expected / expected.sum())
    assert torch.isfinite(mppi_weights(torch.tensor([[-1e6, 0.0]]), 1.0)).all()


def test_mppi_returns_the_weighted_mean_of_its_candidates() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def rate(plans: Tensor) -> Tensor:
        seen.append((plans, quadratic(plans)))
        return seen[-1][1]

    start = BOX.middle.expand(S, N, H, A)
    settings = PlannerSettings(name="mppi", candidates=7, topk=2, iterations=1, temperature=0.5)
    plan, _ = search(rate, start, start.unsqueeze(2)[:, :, :0], BOX, settings, Rng((1, 2), "t"))
    plans, returns = seen[0]
    weights = torch.softmax(returns / 0.5, -1)
    torch.testing.assert_close(plan, torch.einsum("snc,sncha->snha", weights, plans))


@pytest.mark.parametrize("horizon", [15, 16])
def test_coloured_noise_has_the_asked_spectrum_and_unit_variance(horizon: int) -> None:
    noise = coloured_noise(Rng((0,), "test"), 2.0, 40_000, horizon, 1)[0, :, :, 0]
    torch.testing.assert_close(noise.var(0), torch.ones(horizon), atol=0.05, rtol=0)
    power = torch.fft.rfft(noise).abs().square().mean(0)
    inner = torch.arange(1, (horizon + 1) // 2)
    slope = (power[inner] * inner**2.0) / power[1]
    torch.testing.assert_close(slope, torch.ones_like(slope), atol=0.06, rtol=0)


def test_noise_of_exponent_zero_is_white() -> None:
    basis = coloured_basis(12, 0.0)
    torch.testing.assert_close(basis.T @ basis, torch.eye(12), atol=1e-5, rtol=0)


def test_icem_keeps_elites_and_shrinks_its_population_down_to_twice_the_elites() -> None:
    settings = PlannerSettings(name="icem", candidates=100, topk=20, population_decay=2.0)
    assert [settings.population(i) for i in range(4)] == [100, 50, 40, 40]
    assert settings.num_kept == 6
    sizes: list[int] = []

    def rate(plans: Tensor) -> Tensor:
        sizes.append(plans.shape[2])
        return quadratic(plans)

    start = BOX.middle.expand(S, N, H, A)
    kept = TARGET.expand(S, N, settings.num_kept, H, A)
    plan, _ = search(rate, start, kept, BOX, settings, Rng((1, 2), "t"))
    assert sizes == [107, 57, 47, 47, 47]
    assert tuple(sizes) == settings.rated
    assert torch.equal(plan, TARGET.expand_as(plan)), "a kept optimum is found again"

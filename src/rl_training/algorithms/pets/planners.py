"""Search for action sequences of high return: CEM, iCEM and MPPI.

CEM as in PETS (Chua et al., 2018, Sec. 5 and the authors' code of arXiv:1805.12114), iCEM of
Pinneri et al. (2020, arXiv:2008.06389), MPPI of Williams et al. (2017, arXiv:1707.02342).  Many
searches run at once, without reading a number back: a search that has converged rests by a mask.
Shapes: S seeds, n environments, C candidates, K elites, H steps, A action.

Deviations: CEM takes all its iterations and lets those after convergence change nothing; the
spectrum of iCEM's noise is made by a product with sines and cosines instead of a Fourier transform,
which is the same distribution; MPPI has no term for the effort of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_training.rng import Rng

Objective = Callable[[Tensor], Tensor]
"""Plans `[S, n, C, H, A]` to their returns `[S, n, C]`, all finite."""
PlannerName = Literal["cem", "icem", "mppi"]


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """What the planners need to know; see `PETSConfig` for the meaning of each."""

    name: PlannerName = "cem"
    candidates: int = 400
    topk: int = 40
    iterations: int = 5
    momentum: float = 0.1
    epsilon: float = 1e-3
    spread: float = 0.25
    noise_exponent: float = 2.0
    keep_fraction: float = 0.3
    population_decay: float = 1.25
    temperature: float = 1.0
    noise_scale: float = 0.5

    @property
    def num_kept(self) -> int:
        """Elites that iCEM hands on, between iterations and between steps."""
        return math.ceil(self.topk * self.keep_fraction) if self.name == "icem" else 0

    def population(self, iteration: int) -> int:
        """New candidates of an iteration: fewer each time in iCEM, but twice the elites."""
        if self.name != "icem":
            return self.candidates
        shrunk = int(self.candidates * self.population_decay**-iteration)
        return min(self.candidates, max(shrunk, 2 * self.topk))

    @property
    def rated(self) -> tuple[int, ...]:
        """Candidates that each iteration of a search rates."""
        old = self.num_kept + (self.name == "icem")
        return tuple(self.population(index) + old for index in range(self.iterations))


@dataclass(frozen=True)
class Bounds:
    """Box of the actions; tensors `[A]`."""

    low: Tensor
    high: Tensor

    @property
    def middle(self) -> Tensor:
        """What a plan is filled up with."""
        return (self.low + self.high) / 2

    def variance(self, spread: float) -> Tensor:
        """Variance `[A]` of a deviation that is this share of the range."""
        return (spread * (self.high - self.low)).square()

    def clamp(self, action: Tensor) -> Tensor:
        """Bring actions into the box."""
        return torch.minimum(torch.maximum(action, self.low), self.high)


def search(
    objective: Objective,
    start: Tensor,
    kept: Tensor,
    bounds: Bounds,
    settings: PlannerSettings,
    rng: Rng,
) -> tuple[Tensor, Tensor]:
    """Search from the plans `start` `[S, n, H, A]`.

    Args:
        objective: Rates plans.
        start: The first mean.
        kept: Plans to try as they are `[S, n, settings.num_kept, H, A]`.
        bounds: Where actions must lie.
        settings: Which planner, and its sizes.
        rng: Source of the candidates.

    Returns:
        The plan found `[S, n, H, A]`, and plans to hand to the next search, like `kept`.
    """
    planner = {"cem": _cem, "icem": _icem, "mppi": _mppi}[settings.name]
    return planner(objective, start, kept, bounds, settings, rng)


def capped_variance(mean: Tensor, variance: Tensor, bounds: Bounds) -> Tensor:
    """Least of a variance and the squared half distances to the bounds.

    Two deviations then end within the box, where the truncated normal ends too.
    """
    room = torch.minimum(mean - bounds.low, bounds.high - mean) / 2
    return torch.minimum(room.square(), variance)


def elites_of(plans: Tensor, returns: Tensor, count: int) -> Tensor:
    """The `count` plans of highest return, best first: `[S, n, count, H, A]`."""
    best = returns.topk(count, dim=2).indices
    index = best.view(*best.shape, 1, 1).expand(-1, -1, -1, *plans.shape[3:])
    return plans.gather(2, index)


def refit(
    mean: Tensor, variance: Tensor, elites: Tensor, settings: PlannerSettings
) -> tuple[Tensor, Tensor]:
    """Move mean and variance towards those of the elites; a converged search stays.

    new = momentum old + (1 - momentum) (mean or variance of the elites), while the largest
    variance of a plan is above epsilon.
    """
    goal_variance, goal = torch.var_mean(elites, 2, correction=0)
    running = (variance.amax((2, 3), keepdim=True) > settings.epsilon).to(mean.dtype)
    step = running * (1 - settings.momentum)
    return mean.lerp(goal, step), variance.lerp(goal_variance, step)


def _cem(
    objective: Objective,
    start: Tensor,
    kept: Tensor,
    bounds: Bounds,
    settings: PlannerSettings,
    rng: Rng,
) -> tuple[Tensor, Tensor]:
    mean, variance = start, bounds.variance(settings.spread).expand_as(start)
    for _ in range(settings.iterations):
        noise = rng.truncated_normal(start.shape[1], settings.candidates, *start.shape[2:])
        deviation = capped_variance(mean, variance, bounds).sqrt()
        plans = bounds.clamp(mean.unsqueeze(2) + deviation.unsqueeze(2) * noise)
        elites = elites_of(plans, objective(plans), settings.topk)
        mean, variance = refit(mean, variance, elites, settings)
    return mean, kept


def coloured_basis(horizon: int, exponent: float, device: torch.device | str = "cpu") -> Tensor:
    """Matrix `[2 F, H]` that turns white noise into noise of power f^-exponent and variance 1.

    Rows are cosines and sines of the frequencies f = 1/H, 2/H, ... up to 1/2, and the constant,
    which has the power of the lowest frequency (Sec. 3.1 of iCEM).
    """
    time = torch.arange(horizon, device=device) / horizon
    number = torch.arange(horizon // 2 + 1, device=device).unsqueeze(1)
    power = number.clamp(min=1).float() ** -exponent
    # The constant and, for even horizons, the highest frequency have no twin at -f.
    alone = (number == 0) | (2 * number == horizon)
    amplitude = (power * torch.where(alone, 0.5, 1.0)).sqrt()
    angle = 2 * math.pi * number * time
    rows = torch.cat((amplitude * angle.cos(), amplitude * angle.sin()))
    return rows / rows.square().sum(0, keepdim=True).sqrt()


def coloured_noise(rng: Rng, exponent: float, *shape: int) -> Tensor:
    """Draw noise `[S, *shape, A]` for a shape that ends in H, A, coloured along H."""
    *lead, horizon, size = shape
    basis = coloured_basis(horizon, exponent, rng.device)
    return rng.normal(*lead, size, basis.shape[0]).matmul(basis).transpose(-1, -2)


def _icem(
    objective: Objective,
    start: Tensor,
    kept: Tensor,
    bounds: Bounds,
    settings: PlannerSettings,
    rng: Rng,
) -> tuple[Tensor, Tensor]:
    mean, variance = start, bounds.variance(settings.spread).expand_as(start)
    elites = start.unsqueeze(2)
    for index in range(settings.iterations):
        lead = (start.shape[1], settings.population(index))
        noise = coloured_noise(rng, settings.noise_exponent, *lead, *start.shape[2:])
        plans = mean.unsqueeze(2) + variance.sqrt().unsqueeze(2) * noise
        # The mean is a candidate too, so that the best plan is never worse than it.
        plans = bounds.clamp(torch.cat((plans, kept, mean.unsqueeze(2)), 2))
        elites = elites_of(plans, objective(plans), settings.topk)
        mean, variance = refit(mean, variance, elites, settings)
        kept = elites[:, :, : settings.num_kept]
    return elites[:, :, 0], kept


def mppi_weights(returns: Tensor, temperature: float) -> Tensor:
    """Share of each candidate in the plan, softmax(return / temperature) over `[.., C]`."""
    return torch.softmax(returns / temperature, -1)


def _mppi(
    objective: Objective,
    start: Tensor,
    kept: Tensor,
    bounds: Bounds,
    settings: PlannerSettings,
    rng: Rng,
) -> tuple[Tensor, Tensor]:
    mean, deviation = start, settings.noise_scale * (bounds.high - bounds.low) / 2
    for _ in range(settings.iterations):
        noise = rng.normal(start.shape[1], settings.candidates, *start.shape[2:])
        plans = bounds.clamp(mean.unsqueeze(2) + deviation * noise)
        weights = mppi_weights(objective(plans), settings.temperature)
        mean = (weights.view(*weights.shape, 1, 1) * plans).sum(2)
    return mean, kept

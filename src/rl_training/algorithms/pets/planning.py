"""Rating plans by trajectory sampling in a dynamics model, and what a planner remembers.

Trajectory sampling of PETS (Chua et al., 2018, Sec. 5.1 of arXiv:1805.12114): every plan is
followed by P particles.  TSinf gives a particle one member for the whole plan, TS1 shuffles the
particles of a plan among the members at each step.  Only the member of a particle predicts it.
Shapes: S seeds, n environments, C candidates, N = n C plans, P particles, M members, H steps,
D observation, A action, O outputs.

Deviations: the members have equal shares of a plan's particles at each step, also in TS1; a learned
reward counts with its mean instead of a draw, which has the same expectation and less noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rl_training.algorithms.base import ActingState
from rl_training.algorithms.dynamics.imagination import Sampling, TransitionFunction
from rl_training.algorithms.pets.planners import Bounds
from rl_training.errors import ConfigError, DataError
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel, Prediction
from rl_training.rng import Rng

WORST_RETURN = -1e6
"""Return of a plan whose imagined rewards are not finite."""
Predict = Callable[[Tensor], Prediction]
"""Inputs `[S, M, B, D + A]`, those of each member, to their predictions `[S, M, B, ...]`."""
Returns = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Observations, plans and `Draws` to returns, see `TrajectorySampler.returns`."""


class Draws(NamedTuple):
    """The randomness of rating plans once."""

    noise: Tensor
    """`[S, H, P, N, D]`, normal."""
    order: Tensor
    """Particles that change places after each step but the last, `[S, H - 1, P, N]`; no steps where
    they keep their member."""


class DynamicsModel(Protocol):
    """Anything that can be planned through."""

    obs_dim: int
    action_dim: int
    num_ensembles: int

    def predict_distribution(self, obs: Any, actions: Any) -> tuple[Tensor, Tensor]:
        """Means and log-variances `[M, B, D + 1]` of change of observation, and reward."""
        ...


class PlanningState(ActingState):
    """Of each environment: what is left of its last plan, and the plans kept beside it."""

    def __init__(self, seeds: tuple[int, ...], shape: tuple[int, ...], kept: int, rng: Rng) -> None:
        """Begin without plans.

        Args:
            seeds: One per member of the group.
            shape: Environments n, steps H, action A.
            kept: Plans that iCEM hands on.
            rng: Source of the candidates; a part of this state.
        """
        num_envs, horizon, size = shape
        self.rng = rng
        self.plan = torch.zeros(len(seeds), num_envs, horizon, size, device=rng.device)
        self.kept = torch.zeros(len(seeds), num_envs, kept, horizon, size, device=rng.device)

    def advance(self, plan: Tensor, kept: Tensor) -> None:
        """Take the plans of this step, moved on to the next and filled up with zeros."""
        self.plan.copy_(shifted(plan))
        self.kept.copy_(shifted(kept))


def shifted(plan: Tensor) -> Tensor:
    """Drop the first action of plans `[.., H, A]` and append zeros."""
    return torch.cat((plan[..., 1:, :], torch.zeros_like(plan[..., :1, :])), -2)


def predictor(model: DynamicsModel, *, keep_reward: bool) -> Predict:
    """Return how each member predicts its own rows; weights are taken now."""
    if isinstance(model, MLPMOPOEnsembleModel):
        return model.members().folded(keep_reward=keep_reward)

    def predict(x: Tensor) -> Prediction:
        """Ask for all predictions of all rows, and keep each row's own."""
        seeds, members, rows, _ = x.shape
        flat = x.reshape(seeds, members * rows, -1)
        flat = flat[0] if seeds == 1 else flat
        outputs = model.predict_distribution(flat[..., : model.obs_dim], flat[..., model.obs_dim :])
        own = [
            part.view(seeds, members, members, rows, -1).diagonal(dim1=1, dim2=2).movedim(-1, 1)
            for part in outputs
        ]
        size = model.obs_dim + keep_reward
        return Prediction(own[0][..., :size], own[1][..., :size], None)

    return predict


@dataclass(frozen=True, kw_only=True)
class TrajectorySampler:
    """Rates plans in a model."""

    model: DynamicsModel
    particles: int
    """P, a multiple of the members."""
    sampling: Sampling = "tsinf"
    gamma: float = 1.0
    reward: TransitionFunction | None = None
    """A known reward; None is the model's."""
    termination: TransitionFunction | None = None
    """When episodes end; None is the model's own head, or never without one."""
    value: TransitionFunction | None = None
    """What is still to come after the last step of a plan; None is nothing."""

    def objective(
        self, obs: Tensor, rng: Rng, returns: Returns | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return the rating of plans that begin at `obs` `[S, n, D]`.

        Args:
            obs: Where plans begin.
            rng: Source of noise and members.
            returns: What to call in place of `returns`, of the same arguments.
        """
        rated = returns or self.returns

        def rate(plans: Tensor) -> Tensor:
            return rated(obs, plans, *self.draw(rng, plans))

        return rate

    def draw(self, rng: Rng, plans: Tensor) -> Draws:
        """Draw what rating plans `[S, n, C, H, A]` takes."""
        _, envs, candidates, horizon, _ = plans.shape
        count = envs * candidates
        noise = rng.normal(horizon, self.particles, count, self.model.obs_dim)
        changes = horizon - 1 if self.sampling == "ts1" else 0
        order = rng.permutation(self.particles, changes, count) if changes else None
        if order is None:
            return Draws(noise, torch.zeros_like(noise[:, :0, :, :, 0], dtype=torch.int64))
        return Draws(noise, order.movedim(-1, 2))

    def returns(self, obs: Tensor, plans: Tensor, noise: Tensor, order: Tensor) -> Tensor:
        """Mean return `[S, n, C]` of plans `[S, n, C, H, A]` from `obs` `[S, n, D]`."""
        predict = predictor(self.model, keep_reward=self.reward is None)
        seeds, envs, candidates = plans.shape[:3]
        start = obs.unsqueeze(2).expand(-1, -1, candidates, -1).flatten(1, 2)
        returns = self._returns(start, plans.flatten(1, 2), predict, Draws(noise, order))
        return returns.view(seeds, envs, candidates)

    def _returns(self, start: Tensor, plans: Tensor, predict: Predict, draws: Draws) -> Tensor:
        """Mean return `[S, N]` of plans `[S, N, H, A]` from `start` `[S, N, D]`."""
        obs = start.unsqueeze(1).expand(-1, self.particles, -1, -1)  # [S, P, N, D]
        total = torch.zeros_like(obs[..., 0])
        alive = torch.ones_like(total, dtype=torch.bool)
        for step in range(plans.shape[2]):
            if step and draws.order.shape[1]:
                obs, total, alive = _shuffled(draws.order[:, step - 1], obs, total, alive)
            action = plans[:, None, :, step].expand(-1, self.particles, -1, -1)
            noise = draws.noise[:, step]
            next_obs, reward, ends = self._step(obs, action, noise, predict, step == 0)
            total = torch.where(alive, total + self.gamma**step * reward, total)
            alive = alive if ends is None else alive & ~ends
            if self.value is not None and step == plans.shape[2] - 1:
                beyond = self.gamma ** (step + 1) * self.value(obs, action, next_obs)
                total = torch.where(alive, total + beyond, total)
            obs = next_obs
        total = torch.where(torch.isfinite(total), total, WORST_RETURN)
        return total.mean(1)

    def _step(
        self, obs: Tensor, action: Tensor, noise: Tensor, predict: Predict, is_first: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Next observations `[S, P, N, D]`, rewards and, if any, ends `[S, P, N]`."""
        seeds, _, plans, size = obs.shape
        members, share = self.model.num_ensembles, self.particles // self.model.num_ensembles
        # At first the particles of a member have not parted yet: it predicts them once.
        every = share if is_first else 1
        x = torch.cat((obs[:, ::every], action[:, ::every]), -1)
        predicted = predict(x.view(seeds, members, -1, x.shape[-1]))
        mean, logvar, terminal = (
            None if part is None else _dealt(part, (seeds, members, share, plans))
            for part in (*predicted[:2], predicted.terminal)
        )
        assert mean is not None
        assert logvar is not None
        deviation = torch.exp(0.5 * logvar[..., :size])
        drawn = torch.addcmul(mean[..., :size], deviation, noise)
        model = self.model
        if isinstance(model, MLPMOPOEnsembleModel):
            next_obs = model.next_obs(obs, drawn)
        else:
            next_obs = obs + drawn
        reward = mean[..., -1] if self.reward is None else self.reward(obs, action, next_obs)
        if self.termination is not None:
            return next_obs, reward, self.termination(obs, action, next_obs)
        return next_obs, reward, None if terminal is None else terminal > 0


def _shuffled(order: Tensor, *parts: Tensor) -> list[Tensor]:
    """Deal the particles of each plan out to the members again, by `order` `[S, P, N]`."""
    return [
        part.gather(1, order if part.ndim == 3 else order.unsqueeze(-1).expand_as(part))
        for part in parts
    ]


def _dealt(part: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Predictions `[S, M, share N, ..]`, or `[S, M, N, ..]` for all shares, as `[S, P, N, ..]`."""
    seeds, members, share, plans = shape
    rest = part.shape[3:]
    part = part.view(seeds, members, -1, plans, *rest)
    return part.expand(seeds, members, share, plans, *rest).reshape(seeds, -1, plans, *rest)


def flat_observations(obs: Tensor, seeds: int, size: int) -> Tensor:
    """Return observations `[D]`, `[B, D]` (one seed) or `[S, B, D]` as `[S, B, D]`.

    Raises:
        DataError: For another shape.
    """
    fits = obs.shape[0] == seeds if obs.ndim == 3 else seeds == 1 and obs.ndim in (1, 2)
    if not fits or obs.shape[-1] != size:
        raise DataError(
            f"obs has shape {tuple(obs.shape)}; allowed are [{seeds}, B, {size}] and, for one "
            f"seed, [B, {size}] and [{size}]"
        )
    return obs.reshape(seeds, -1, size)


def given_or(value: int | None, default: int, name: str) -> int:
    """Return a size that was given, or its default.

    Raises:
        ConfigError: For a size below 1.
    """
    if value is not None and value < 1:
        raise ConfigError(f"plan_action: {name} must be >= 1, got {value}")
    return default if value is None else value


def box(low: float | Tensor, high: float | Tensor, size: int, device: torch.device) -> Bounds:
    """Return bounds of actions from numbers or `[A]`.

    Raises:
        DataError: For another shape, or a lower bound above the upper one.
    """
    sides = []
    for name, side in (("action_low", low), ("action_high", high)):
        side = torch.as_tensor(side, dtype=torch.float32, device=device)
        if side.shape not in ((), (1,), (size,)):
            raise DataError(
                f"{name} has shape {tuple(side.shape)}; allowed are a number or [{size}]"
            )
        sides.append(side.expand(size))
    if not bool((sides[0] <= sides[1]).all()):
        raise DataError(f"action_low {low} must not be above action_high {high} in any entry")
    return Bounds(*sides)

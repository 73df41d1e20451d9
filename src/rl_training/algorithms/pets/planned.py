"""Acting by planning in a model of the dynamics; there is no policy.

Each action is the first of a plan found by a planner, rated by particles that follow members of the
ensemble; what is left of a plan starts the next search.
Shapes: S seeds, n environments, C candidates, H steps, D observation, A action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_training.algorithms.base import ActingPart, ActingState, TransitionLearner
from rl_training.algorithms.dynamics.fit import EnsembleConfig
from rl_training.algorithms.pets.config import PETSConfig, check_planning
from rl_training.algorithms.pets.planners import Bounds, search
from rl_training.algorithms.pets.planning import (
    PlanningState,
    TrajectorySampler,
    box,
    flat_observations,
    given_or,
)
from rl_training.envs.spec import EnvSpec
from rl_training.envs.tasks.functions import BoundFunction, NotImportedError
from rl_training.envs.tasks.rewards import reward_for
from rl_training.envs.tasks.terminations import termination_for
from rl_training.errors import ConfigError
from rl_training.rng import Rng
from rl_training.state import transient


class KnownFunctions(NamedTuple):
    """What is known of a task; None is learned, or not there."""

    reward: BoundFunction | None = None
    ends: BoundFunction | None = None
    value: BoundFunction | None = None
    """Of the last imagined step, for what comes after it."""


class Planned(TransitionLearner):
    """A learner that plans each action in its `dynamics_model`."""

    config: PETSConfig
    dynamics_model: Any  # has `predict_distribution`, `obs_dim`, `action_dim`, `num_ensembles`

    def setup(self) -> None:
        """Plan with what the model has learned until told otherwise."""
        model = self.dynamics_model
        needed = ("predict_distribution", "obs_dim", "action_dim", "num_ensembles")
        missing = [name for name in needed if not hasattr(model, name)]
        if missing:
            raise ConfigError(
                f"dynamics_model needs to be a module with {', '.join(needed)}; "
                f"{type(model).__name__} lacks {', '.join(missing)}"
            )
        # Not part of the state, but an input of compiled programs.
        ones = torch.ones(model.action_dim, device=self.device)
        self._box = transient((-ones, ones))
        self._functions = KnownFunctions()
        self._programs: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._not_imported: NotImportedError | None = None

    def see_task(self, env: EnvSpec, env_kwargs: Mapping[str, Any], may_import: bool) -> None:
        """Take the reward and the ends of episodes that are known of the task.

        A function that would have to be imported, and may not be, is missed when planning.
        """
        try:
            self._functions = self._known_functions(env, env_kwargs, may_import)
        except NotImportedError as error:
            self._not_imported = error
            return
        self._not_imported = None
        self._function_bounds = tuple((f.low, f.high) for f in self._functions if f is not None)

    def _known_functions(
        self, env: EnvSpec, env_kwargs: Mapping[str, Any], may_import: bool
    ) -> KnownFunctions:
        config, device = self.config, self.device

        def rewards(name: str | None) -> BoundFunction | None:
            if name is None or name == "learned":
                return None
            return reward_for(env, env_kwargs, name, device, may_import=may_import)

        ends = None
        learns_ends = self.part(EnsembleConfig).model_learn_terminations
        if not learns_ends or config.termination_function != "auto":
            name = config.termination_function
            ends = termination_for(env, env_kwargs, name, device, may_import=may_import)
        return KnownFunctions(rewards(config.reward_function), ends, rewards(config.value_function))

    def initial_acting_state(self, num_envs: int) -> PlanningState:
        """Return empty plans, and the randomness of the searches from them."""
        shape = (num_envs, self.config.planning_horizon, self.dynamics_model.action_dim)
        rng = Rng(self.seeds, "planning", self.device)
        return PlanningState(self.seeds, shape, self.config.planner_settings().num_kept, rng)

    @torch.no_grad()
    def act_from(
        self,
        state: ActingState | None,
        obs: Tensor,
        *,
        explore: bool = False,  # noqa: ARG002 - the method has no exploration but its model's doubt
    ) -> Tensor:
        """Plan from `obs` `[S, n, D]`, starting at what is left of the last plans."""
        assert isinstance(state, PlanningState)
        rate = self._sampler().objective(obs, state.rng, self._rate)
        settings, box = self.config.planner_settings(), Bounds(*self._box.value)
        plan, kept = search(rate, state.plan, state.kept, box, settings, state.rng)
        state.advance(plan, kept)
        return plan[:, :, 0]

    def follow(
        self,
        state: ActingState | None,
        obs: Tensor,  # noqa: ARG002 - the next search looks for itself
        action: Tensor,  # noqa: ARG002
    ) -> None:
        """Drop the first action of the last plans, whose time has passed."""
        assert isinstance(state, PlanningState)
        state.advance(state.plan, state.kept)

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Plan from `obs` `[S, n, D]` as at the start of an episode."""
        return self.act_from(self.initial_acting_state(obs.shape[1]), obs, explore=explore)

    @torch.no_grad()
    def rate_plans(self, obs: Tensor, plans: Tensor, noise: Tensor, order: Tensor) -> Tensor:
        """Rate plans `[S, n, C, H, A]` from `obs` `[S, n, D]`, see `TrajectorySampler`."""
        return self._sampler().returns(obs, plans, noise, order)

    def _rate(self, obs: Tensor, plans: Tensor, noise: Tensor, order: Tensor) -> Tensor:
        if not self._programs:
            return self.rate_plans(obs, plans, noise, order)
        program = self._programs.get(tuple(plans.shape[1:3]), self.rate_plans)
        rated: Tensor = program(obs, plans, noise, order)
        return rated

    def acting_parts(self, num_envs: int) -> dict[str, ActingPart]:
        """Return the rating of each number of candidates, which a search spends its time in.

        A program of a whole search would be as many times as long as a search has iterations.
        """
        return {
            f"rate-{count}": ActingPart(self.rate_plans, partial(self._examples, num_envs, count))
            for count in sorted(set(self.config.planner_settings().rated))
        }

    def use_programs(self, programs: Mapping[str, Callable[..., Any]], num_envs: int) -> None:
        """Rate with programs of `acting_parts` from now on, where their shapes fit."""
        for name, program in programs.items():
            self._programs[num_envs, int(name.removeprefix("rate-"))] = program

    def _examples(self, num_envs: int, candidates: int) -> tuple[Tensor, ...]:
        rng, model = Rng(self.seeds, "example", self.device), self.dynamics_model
        obs = rng.normal(num_envs, model.obs_dim)
        shape = (num_envs, candidates, self.config.planning_horizon, model.action_dim)
        plans = rng.uniform(*shape) * 2 - 1
        return obs, plans, *self._sampler().draw(rng, plans)

    def _sampler(self) -> TrajectorySampler:
        if self._not_imported is not None:
            raise self._not_imported
        known = self._functions
        if known.reward is None and not getattr(self.dynamics_model, "learn_reward", True):
            raise ConfigError(
                "algo_kwargs.model_learn_reward is false, so the reward must be known; name a "
                "reward_function, or let the model learn the reward"
            )
        return TrajectorySampler(
            model=self.dynamics_model,
            particles=self.config.planning_particles,
            sampling=self.config.trajectory_sampling,
            gamma=self.config.gamma,
            reward=known.reward,
            termination=known.ends,
            value=known.value,
        )

    @torch.no_grad()
    def plan_action(
        self,
        obs: Tensor,
        *,
        action_low: float | Tensor = -1.0,
        action_high: float | Tensor = 1.0,
        horizon: int | None = None,
        num_candidates: int | None = None,
        num_iterations: int | None = None,
        num_topk: int | None = None,
        num_particles: int | None = None,
        deterministic: bool = False,
    ) -> Tensor:
        """Plan from nothing and return the first action.

        Args:
            obs: `[D]`, `[B, D]` or `[S, B, D]`.
            action_low: Least action, in the units of the model's actions; a number or `[A]`.
            action_high: Largest action.
            horizon: Steps to look ahead; this and the following are the config's where None.
            num_candidates: Plans per iteration.
            num_iterations: Iterations of the search.
            num_topk: Elites.
            num_particles: Trajectories per plan.
            deterministic: Give the same action for the same observations and model, by drawing the
                same candidates and particles in every call.

        Returns:
            Actions shaped as `obs`, within the bounds.

        Raises:
            ConfigError: For sizes that do not go together.
            DataError: For observations or bounds of another shape.
        """
        given = flat_observations(obs, self.num_seeds, self.dynamics_model.obs_dim)
        size = self.dynamics_model.action_dim
        bounds = box(action_low, action_high, size, self.device)
        settings = self.config.planner_settings()
        settings = replace(
            settings,
            candidates=given_or(num_candidates, settings.candidates, "num_candidates"),
            topk=given_or(num_topk, settings.topk, "num_topk"),
            iterations=given_or(num_iterations, settings.iterations, "num_iterations"),
        )
        particles = given_or(num_particles, self.config.planning_particles, "num_particles")
        horizon = given_or(horizon, self.config.planning_horizon, "horizon")
        try:
            check_planning(settings, particles, self.dynamics_model.num_ensembles)
        except ValueError as error:
            raise ConfigError(f"plan_action: {error}") from None
        rng = Rng(self.seeds, "planning", self.device) if deterministic else self.rng
        start = bounds.middle.expand(*given.shape[:2], horizon, size)
        kept = start.unsqueeze(2).expand(-1, -1, settings.num_kept, -1, -1)
        rate = replace(self._sampler(), particles=particles).objective(given, rng)
        plan, _ = search(rate, start, kept, bounds, settings, rng)
        return plan[:, :, 0].reshape(*obs.shape[:-1], size)

    def acting_flops(self, num_envs: int) -> float:
        """Multiplications of one search: each particle runs one member at each step."""
        config, model = self.config, self.dynamics_model
        rows = sum(config.planner_settings().rated) * config.planning_particles
        weights: int = sum(p.numel() for p in model.parameters())
        share = weights / config.num_ensembles  # of all seeds
        return 2.0 * rows * config.planning_horizon * num_envs * share

    def random_action(
        self,
        num_envs: int,
        allowed: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Draw actions uniformly from [-1, 1]^A."""
        return self.rng.uniform(num_envs, self.dynamics_model.action_dim) * 2 - 1

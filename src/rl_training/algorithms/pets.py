"""PETS: Probabilistic Ensembles with Trajectory Sampling (Chua et al., 2018, arXiv:1805.12114).

A dynamics ensemble is fitted to everything seen so far by maximum likelihood; each action is the
first of a plan found by the cross-entropy method, rated by particles that follow members of the
ensemble.  There is no policy: what is left of a plan starts the next search.
Shapes: S seeds, n environments, B batch, M members, H steps, D observation, A action.

Deviations: members learn from batches drawn independently from the whole replay instead of from one
    bootstrap sample each; updates go on from the weights and moments before, in rounds of fixed
    length; the reward is learned too, and used where the task's own is not known; actions are
    planned in learner units, [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActingState, StepOutput, TransitionLearner
from rl_training.algorithms.dynamics import (
    batch_rows,
    dealt_rows,
    fit_statistics,
    mopo_model_loss,
)
from rl_training.algorithms.dynamics_config import dynamics_network
from rl_training.algorithms.dynamics_rollout import TransitionFunction
from rl_training.algorithms.pets_config import PETSConfig, check_planning
from rl_training.algorithms.planners import Bounds, search
from rl_training.algorithms.planning import (
    PlanningState,
    TrajectorySampler,
    box,
    flat_observations,
    given_or,
)
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.rewards import reward_for
from rl_training.envs.spec import EnvSpec
from rl_training.envs.terminations import termination_for
from rl_training.errors import ConfigError
from rl_training.models.dynamics import gaussian_nll
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.rng import Rng


def pets_loss(model: nn.Module, batch: TransitionBatch) -> dict[str, Tensor]:
    """Negative log-likelihood of change of observation and reward (Eq. 1), summed over members.

    Args:
        model: The ensemble, or any module with `predict_distribution`.
        batch: Single steps `[S, B, ...]`; members of the ensemble learn from B // M rows each, of
            another module from all of them.

    Returns:
        `model_loss [S]`, to be minimised, and mean absolute errors `reward_mae`, `delta_obs_mae`.
    """
    rows = batch_rows(batch)
    if isinstance(model, MLPMOPOEnsembleModel):
        found = mopo_model_loss(model, dealt_rows(rows, model.num_ensembles))
        names = {"model_loss": "mopo_model_loss"}
        return {n: found[names.get(n, n)] for n in ("model_loss", "reward_mae", "delta_obs_mae")}
    known: Any = model
    inputs = (batch.obs[0], batch.action[0]) if rows.shape[0] == 1 else (batch.obs, batch.action)
    found = known.predict_distribution(*inputs)
    mean, logvar = (part.view(rows.shape[0], -1, *part.shape[-2:]) for part in found)
    target = rows[:, None, :, -mean.shape[-1] - 1 : -1]
    error = (mean - target).detach().abs().mean((1, 2))
    return {
        "model_loss": gaussian_nll(mean, logvar, target).mean((2, 3)).sum(1),
        "reward_mae": error[:, -1],
        "delta_obs_mae": error[:, :-1].mean(1),
    }


class PETS(TransitionLearner):
    """Model learning, and planning in the model."""

    config_class: ClassVar[type[PETSConfig]] = PETSConfig
    config: PETSConfig
    network_names: ClassVar[tuple[str, ...]] = ("dynamics_model",)
    dynamics_model: Any  # has `predict_distribution`, `obs_dim`, `action_dim`, `num_ensembles`

    def setup(self) -> None:
        """Create the optimizer, and plan with what the model has learned until told otherwise."""
        model = self.dynamics_model
        needed = ("predict_distribution", "obs_dim", "action_dim", "num_ensembles")
        missing = [name for name in needed if not hasattr(model, name)]
        if missing:
            raise ConfigError(
                f"PETS(dynamics_model=...) needs a module with {', '.join(needed)}; "
                f"{type(model).__name__} lacks {', '.join(missing)}"
            )
        parameters = [p for p in model.parameters() if p.requires_grad]
        decays = model.decays() if isinstance(model, MLPMOPOEnsembleModel) else None
        if parameters:
            self.optimizer = self.adam(parameters, "model_learning_rate", weight_decay=decays)
        # In a tuple, which holds no state: given anew, but an input of compiled programs.
        ones = torch.ones(model.action_dim, device=self.device)
        self._box = (-ones, ones)
        self._functions: tuple[TransitionFunction | None, TransitionFunction | None] = (None, None)

    def see_task(self, env: EnvSpec, env_kwargs: Mapping[str, Any]) -> None:
        """Take the reward and the ends of episodes that are known of the task."""
        config = self.config
        reward = None
        if config.reward_function != "learned":
            reward = reward_for(env, env_kwargs, config.reward_function, self.device)
        ends = None
        if not config.model_learn_terminations or config.termination_function != "auto":
            ends = termination_for(env, env_kwargs, config.termination_function, self.device)
        self._functions = (reward, ends)
        bounds = [(f.low, f.high) for f in (reward, ends) if f is not None]
        self._function_bounds = tuple(bounds)

    def begin_round(self, buffer: ReplayBuffer) -> None:
        """Standardise the model's inputs by all that was seen."""
        if isinstance(self.dynamics_model, MLPMOPOEnsembleModel):
            seen = (buffer.rows[name][:, : len(buffer)] for name in ("obs", "action"))
            fit_statistics(self.dynamics_model, torch.cat(tuple(seen), -1))

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Take one gradient step of all members."""
        if not hasattr(self, "optimizer"):
            raise ConfigError(
                f"{type(self.dynamics_model).__name__} has no parameters to learn; plan through it "
                "with plan_action, without updates"
            )
        metrics = pets_loss(self.dynamics_model, batch)
        self.optimizer.minimize(metrics["model_loss"])
        return StepOutput(metrics)

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
        rate = self._sampler().objective(obs, state.rng)
        settings = self.config.planner_settings()
        plan, kept = search(rate, state.plan, state.kept, Bounds(*self._box), settings, state.rng)
        state.advance(plan, kept)
        return plan[:, :, 0]

    def act(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Plan from `obs` `[S, n, D]` as at the start of an episode."""
        return self.act_from(self.initial_acting_state(obs.shape[1]), obs, explore=explore)

    def _sampler(self) -> TrajectorySampler:
        reward, termination = self._functions
        return TrajectorySampler(
            model=self.dynamics_model,
            particles=self.config.planning_particles,
            sampling=self.config.trajectory_sampling,
            gamma=self.config.gamma,
            reward=reward,
            termination=termination,
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
        rows = config.planner_settings().total_candidates * config.planning_particles
        weights: int = sum(p.numel() for p in model.parameters())
        share = weights / config.num_ensembles  # of all seeds
        return 2.0 * rows * config.planning_horizon * num_envs * share

    def random_action(self, num_envs: int) -> Tensor:
        """Draw actions uniformly from [-1, 1]^A."""
        return self.rng.uniform(num_envs, self.dynamics_model.action_dim) * 2 - 1


def pets_networks(env: EnvSpec, config: PETSConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the ensemble."""
    return {"dynamics_model": dynamics_network(env, config, rng)}


SPEC = AlgorithmSpec(
    name="pets",
    title="Probabilistic Ensembles with Trajectory Sampling",
    paper="arXiv:1805.12114",
    summary="model-based planning with a dynamics ensemble; continuous actions",
    learner=PETS,
    networks=pets_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    metrics={
        "model_loss": "negative log-likelihood, summed over members, with the bounds' penalty",
        "reward_mae": "mean absolute error of the predicted reward",
        "delta_obs_mae": "mean absolute error of the predicted change of the observation",
    },
)

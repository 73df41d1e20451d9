"""Gather a dataset with a policy: a checkpoint's, or a random one.

The same plan gives the same rows: environments, random actions and the policy's own noise are
seeded by the plan's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.spec import EnvSpec
from rl_training.errors import DataError, exit_is_error
from rl_training.rng import Rng, derive_seed
from rl_training.runtime.workflows import LoadedAgent

Array = NDArray[Any]
Act = Callable[[Array, bool], Array]
"""Of an observation, and whether it is the first of its episode."""


@dataclass(frozen=True, kw_only=True)
class CollectPlan:
    """What to gather: either `steps` transitions or `episodes` whole episodes."""

    env_id: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    """Transitions; the last episode is cut there and marked truncated."""
    episodes: int | None = None
    """Whole episodes."""
    seed: int = 0
    deterministic: bool = False
    """Let the policy take its best action instead of sampling."""
    epsilon: float = 0.0
    """Share of steps with a uniformly random action in place of the policy's."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.episodes is None):
            raise DataError("give either a number of steps or a number of episodes to collect")
        for name, count in (("steps", self.steps), ("episodes", self.episodes)):
            if count is not None and count < 1:
                raise DataError(f"{name} must be >= 1, got {count}")
        if not 0.0 <= self.epsilon <= 1.0:
            raise DataError(f"epsilon must be from 0 to 1, got {self.epsilon:g}")
        if self.seed < 0:
            raise DataError(f"seed must be >= 0, got {self.seed}")


@exit_is_error("collecting")
def collect_dataset(
    plan: CollectPlan,
    agent: LoadedAgent | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> OfflineDataset:
    """Step an environment and keep every transition, with actions in the task's units.

    Args:
        plan: What to gather.
        agent: Whose policy acts; None acts uniformly at random.
        on_progress: Called with the steps or episodes done so far.

    Raises:
        SpecMismatch: When the agent was trained on a task of other shapes.
        EnvError: When the environment fails.
    """
    if agent is not None:
        agent.import_task()
    envs = SeedVectorEnv.make(plan.env_id, plan.env_kwargs, 1, (plan.seed,))
    try:
        policy = _policy(plan, agent, envs.spec)
        columns = _gather(plan, envs, policy, on_progress)
    finally:
        envs.close()
    who = "random policy" if agent is None else f"{agent.config.algo} at step {agent.step:,}"
    if agent is not None and plan.epsilon > 0:
        who += f", {plan.epsilon:g} random actions"
    mode = ", deterministic" if agent is not None and plan.deterministic else ""
    return OfflineDataset(
        **columns,
        name=f"collected {plan.env_id}",
        source=f"{who}{mode} on {plan.env_id}, seed {plan.seed}",
        env_id=plan.env_id,
    )


def _policy(plan: CollectPlan, agent: LoadedAgent | None, spec: EnvSpec) -> Act:
    """Return a function from an observation to an action in learner units."""
    rng = np.random.default_rng(derive_seed(plan.seed, "collect"))
    if agent is None:
        return lambda obs, _: _random_action(spec, obs, rng)
    spec.require_same_task(agent.env_spec, "collect from the checkpoint's own environment")
    learner = agent.learner
    policy_rng = Rng((plan.seed,), "collect", learner.device)
    act = learner.act_from if plan.deterministic else learner.sample_from
    state = learner.initial_acting_state(1)
    if state is not None:
        state.draw_from(policy_rng)

    def policy_action(obs: Array, is_first: bool) -> Array:
        given = torch.from_numpy(obs).to(learner.device)[None, None]  # [S, n, ...]
        if state is not None and is_first:
            state.begin_episodes(torch.ones(1, 1, dtype=torch.bool, device=learner.device))
        with torch.inference_mode(), learner.drawing_from(policy_rng):
            if plan.epsilon > 0 and rng.random() < plan.epsilon:
                taken = _random_action(spec, obs, rng)
                # A policy with a memory must know of this step too.
                learner.follow(state, given, torch.from_numpy(taken).to(learner.device)[None, None])
                return taken
            chosen: Array = act(state, given)[0, 0].cpu().numpy()
        return chosen

    return policy_action


def _random_action(spec: EnvSpec, obs: Array, rng: np.random.Generator) -> Array:
    """Draw an action in learner units uniformly, among those that the task allows in `obs`."""
    if spec.num_actions is not None and not spec.mask_size:
        return np.asarray(rng.integers(spec.num_actions))
    if spec.actions_are_counted:
        return spec.random_choice(obs, rng)
    return rng.uniform(-1.0, 1.0, spec.action_dim).astype(np.float32)


def _gather(
    plan: CollectPlan, envs: SeedVectorEnv, policy: Act, on_progress: Callable[[int], None] | None
) -> dict[str, Any]:
    rows: list[tuple[Any, ...]] = []
    obs, episodes = envs.reset()[0, 0], 0
    while episodes < (plan.episodes or 1 << 62) and len(rows) < (plan.steps or 1 << 62):
        action = policy(obs, not rows or rows[-1][4] or rows[-1][5])
        step = envs.step(action[None, None])
        terminated, truncated = bool(step.terminated[0, 0]), bool(step.truncated[0, 0])
        stored = envs.spec.scale_action(action)
        rows.append((obs, stored, step.reward[0, 0], step.final_obs[0, 0], terminated, truncated))
        episodes += terminated or truncated
        # A view of an array that the next step may write to would change later.
        obs = np.array(step.obs[0, 0])
        if on_progress is not None:
            on_progress(len(rows) if plan.episodes is None else episodes)
    names = ("observations", "actions", "rewards", "next_observations")
    columns: dict[str, Any] = {
        name: np.stack([row[place] for row in rows]) for place, name in enumerate(names)
    }
    for place, name in ((4, "terminations"), (5, "truncations")):
        columns[name] = np.array([row[place] for row in rows], np.bool_)
    for name in ("observations", "next_observations"):
        if columns[name].dtype != np.uint8:
            columns[name] = columns[name].astype(np.float32)
    if envs.spec.num_actions is None:
        columns["actions"] = columns["actions"].astype(np.float32).reshape(len(rows), -1)
    return columns

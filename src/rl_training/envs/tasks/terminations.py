"""Where episodes of known tasks end, as functions of tensors, for rollouts in a learned model.

Without one, a model-based agent is never punished for falling.  The rules are those of Gymnasium's
environments (v4 and v5), read off what the observation shows: a velocity that the environment clips
or hides cannot end an imagined episode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.envs.options import wrapper_options
from rl_training.envs.spec import EnvSpec
from rl_training.envs.tasks.functions import (
    TERMINATION,
    BoundFunction,
    StateFunction,
    check_function,
    family_of,
    own_function,
)

Range = tuple[float, float]
Keywords = Mapping[str, Any]


def never(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:  # noqa: ARG001
    """Episodes end by their time limit alone."""
    return torch.zeros(next_obs.shape[0], dtype=torch.bool, device=next_obs.device)


def termination_for(
    env: EnvSpec,
    env_kwargs: Keywords | None = None,
    name: str = "auto",
    device: torch.device | str = "cpu",
    *,
    may_import: bool = True,
) -> BoundFunction | None:
    """Return the termination function of a task.

    Args:
        env: The task.
        env_kwargs: How its environment is made; healthy ranges and the like are followed.
        name: `auto` for the built-in one of the task, `never`, or `module:function`.
        device: Where it will be used.
        may_import: Import the module of an own function if that has not been done.

    Returns:
        A function of `[S, B, ...]` in learner units, or None where `auto` knows none: then the
        ends of episodes must be learned, or ignored on purpose with `never`.

    Raises:
        EnvError: For an own function that cannot be used.
    """
    function: StateFunction | None
    if name == "never":
        function = never
    elif name == "auto":
        wrappers = wrapper_options(env.env_id, (env_kwargs or {}).get("wrappers"))
        # Around the task, a wrapper may show other observations than the rule is written for.
        function = None if wrappers.chain else built_in_termination(env.env_id, env_kwargs or {})
    else:
        function = own_function(name, TERMINATION, may_import=may_import)
    if function is None:
        return None
    check_function(function, env.env_id if name == "auto" else name, TERMINATION, env)
    return BoundFunction(function, env, device)


def built_in_termination(env_id: str, env_kwargs: Keywords) -> StateFunction | None:
    """Return the rule of a task of Gymnasium's, or None where it is not known."""
    family = family_of(env_id)
    if family in _NEVER:
        return never
    make = _FAMILIES.get(family)
    if make is None:
        return None
    return make(env_kwargs) if env_kwargs.get("terminate_when_unhealthy", True) else never


def _between(value: Tensor, limits: Range) -> Tensor:
    return (value > limits[0]) & (value < limits[1])


def _hidden(keywords: Keywords) -> bool:
    return bool(keywords.get("exclude_current_positions_from_observation", True))


def _hopper(keywords: Keywords) -> StateFunction:
    height = keywords.get("healthy_z_range", (0.7, math.inf))
    angle = keywords.get("healthy_angle_range", (-0.2, 0.2))
    state = keywords.get("healthy_state_range", (-100.0, 100.0))
    first = 0 if _hidden(keywords) else 1

    def hopper(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        upright = _between(next_obs[:, first], height) & _between(next_obs[:, first + 1], angle)
        return ~(upright & _between(next_obs[:, first + 1 :], state).all(-1))

    return hopper


def _walker(keywords: Keywords) -> StateFunction:
    height = keywords.get("healthy_z_range", (0.8, 2.0))
    angle = keywords.get("healthy_angle_range", (-1.0, 1.0))
    first = 0 if _hidden(keywords) else 1

    def walker(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        return ~(_between(next_obs[:, first], height) & _between(next_obs[:, first + 1], angle))

    return walker


def _ant(keywords: Keywords) -> StateFunction:
    limits: Range = keywords.get("healthy_z_range", (0.2, 1.0))
    first = 0 if _hidden(keywords) else 2

    def ant(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        height = next_obs[:, first]
        healthy = (height >= limits[0]) & (height <= limits[1])
        return ~(healthy & torch.isfinite(next_obs).all(-1))

    return ant


def _humanoid(keywords: Keywords) -> StateFunction:
    limits = keywords.get("healthy_z_range", (1.0, 2.0))
    first = 0 if _hidden(keywords) else 2

    def humanoid(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        return ~_between(next_obs[:, first], limits)

    return humanoid


def _inverted_pendulum(_: Keywords) -> StateFunction:
    def inverted_pendulum(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        return ~((next_obs[:, 1].abs() <= 0.2) & torch.isfinite(next_obs).all(-1))

    return inverted_pendulum


def double_pendulum_tip(obs: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the tip of InvertedDoublePendulum is, sideways and up, each `[B]`.

    The environment's own figure is older by one step of its integrator, a fifth of a transition.
    """
    cart, sin_1, sin_2, cos_1, cos_2 = obs[:, :5].unbind(1)
    sideways = cart + 0.6 * (sin_1 + sin_1 * cos_2 + cos_1 * sin_2)
    return sideways, 0.6 * (cos_1 + cos_1 * cos_2 - sin_1 * sin_2)


def _double_pendulum(_: Keywords) -> StateFunction:
    def double_pendulum(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        return ~(double_pendulum_tip(next_obs)[1] > 1)

    return double_pendulum


def _cartpole(_: Keywords) -> StateFunction:
    def cartpole(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        limit = 12 * 2 * math.pi / 360
        return ~((next_obs[:, 0].abs() <= 2.4) & (next_obs[:, 2].abs() <= limit))

    return cartpole


def _mountain_car(keywords: Keywords) -> StateFunction:
    speed = float(keywords.get("goal_velocity", 0))

    def mountain_car(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        return (next_obs[:, 0] >= 0.45) & (next_obs[:, 1] >= speed)

    return mountain_car


_NEVER = (
    *("Pendulum", "HalfCheetah", "Swimmer", "Reacher", "Pusher", "HumanoidStandup"),
    "rl_training/CartPoleSwingUp",
)
_FAMILIES: dict[str, Callable[[Keywords], StateFunction]] = {
    "Hopper": _hopper,
    "Walker2d": _walker,
    "Ant": _ant,
    "Humanoid": _humanoid,
    "InvertedPendulum": _inverted_pendulum,
    "InvertedDoublePendulum": _double_pendulum,
    "CartPole": _cartpole,
    "MountainCarContinuous": _mountain_car,
}

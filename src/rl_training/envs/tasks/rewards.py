"""Rewards of known tasks as functions of tensors, for planning with a learned model.

PETS plans with the task's own reward rather than a learned one.  The rules are those of Gymnasium's
environments; tasks whose reward needs what the observation hides (the position of a runner, say)
are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.envs.options import wrapper_options
from rl_training.envs.spec import EnvSpec
from rl_training.envs.tasks.functions import (
    REWARD,
    BoundFunction,
    StateFunction,
    check_function,
    family_of,
    own_function,
    reward_function,
)
from rl_training.envs.tasks.terminations import built_in_termination, double_pendulum_tip
from rl_training.errors import EnvError

Keywords = Mapping[str, Any]
POLE_LENGTH = 0.6
"""Length of InvertedPendulum's pole."""


def reward_for(
    env: EnvSpec,
    env_kwargs: Keywords | None = None,
    name: str = "auto",
    device: torch.device | str = "cpu",
    *,
    may_import: bool = True,
) -> BoundFunction | None:
    """Return the reward function of a task.

    Args:
        env: The task.
        env_kwargs: How its environment is made.
        name: `auto` for the built-in one of the task, or `module:function`.
        device: Where it will be used.
        may_import: Import the module of an own function if that has not been done.

    Returns:
        A function of `[S, B, ...]` in learner units, or None where `auto` knows none: then the
        reward must be learned.

    Raises:
        EnvError: For an own function that cannot be used, or a built-in one of a task whose reward
            a wrapper changes.
    """
    keywords = env_kwargs or {}
    if name != "auto":
        function = own_function(name, REWARD, may_import=may_import)
        check_function(function, name, REWARD, env)
        return BoundFunction(function, env, device)
    make = _FAMILIES.get(family_of(env.env_id))
    if make is None:
        return None
    changing = {"chain", "reward_scale", "clip_reward"}
    wrappers = wrapper_options(env.env_id, keywords.get("wrappers")).model_fields_set
    changed = sorted(changing & wrappers)
    if changed:
        raise EnvError(
            f"the known reward of {env.env_id} is not the one learned from: "
            f"env_kwargs.wrappers.{changed[0]} changes it; remove the wrapper, name an own reward "
            "function as module:function, or let the model learn the reward"
        )
    function = make(env.env_id, keywords)
    check_function(function, env.env_id, REWARD, env)
    return BoundFunction(function, env, device)


def _ends(env_id: str, keywords: Keywords) -> StateFunction:
    termination = built_in_termination(env_id, keywords)
    assert termination is not None
    return termination


def _pendulum(_: str, __: Keywords) -> StateFunction:
    def pendulum(obs: Tensor, action: Tensor, _: Tensor) -> Tensor:
        cos, sin, speed = obs.unbind(1)
        torque = action[:, 0].clamp(-2, 2)
        angle = torch.atan2(sin, cos)
        return -(angle.square() + 0.1 * speed.square() + 0.001 * torque.square())

    return pendulum


def _inverted_pendulum(env_id: str, keywords: Keywords) -> StateFunction:
    ends = _ends(env_id, keywords)
    # Before v5 the step that ends an episode was rewarded too.
    last = 0.0 if env_id.endswith("-v5") else 1.0

    def inverted_pendulum(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        return torch.where(ends(obs, action, next_obs), last, 1.0).to(obs.dtype)

    return inverted_pendulum


@reward_function
def balanced_pole(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:  # noqa: ARG001
    """How near the tip of InvertedPendulum's pole is to its place, from 0 to 1.

    For planning only, as in PETS' cart-pole: being alive, the task's own reward, is worth the same
    in all plans that do not fall within their horizon.
    """
    place, angle = next_obs[:, 0], next_obs[:, 1]
    sideways = place + POLE_LENGTH * angle.sin()
    below = POLE_LENGTH * (1 - angle.cos())
    return torch.exp(-(sideways.square() + below.square()) / 0.3**2)


def _double_pendulum(env_id: str, keywords: Keywords) -> StateFunction:
    bonus = float(keywords.get("healthy_reward", 10.0))
    ends = _ends(env_id, keywords)
    last = 0.0 if env_id.endswith("-v5") else bonus

    def double_pendulum(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        sideways, up = double_pendulum_tip(next_obs)
        alive = torch.where(ends(obs, action, next_obs), last, bonus)
        distance = 0.01 * sideways.square() + (up - 2).square()
        # Entries 5 to 7 are the velocities of cart and links, clipped to +-10 by the environment.
        speed = 1e-3 * next_obs[:, 6].square() + 5e-3 * next_obs[:, 7].square()
        return alive - distance - speed

    return double_pendulum


def _cartpole(env_id: str, keywords: Keywords) -> StateFunction:
    ends = _ends(env_id, keywords)
    barto = bool(keywords.get("sutton_barto_reward", False))
    alive, last = (0.0, -1.0) if barto else (1.0, 1.0)

    def cartpole(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        return torch.where(ends(obs, action, next_obs), last, alive).to(obs.dtype)

    return cartpole


def _mountain_car(env_id: str, keywords: Keywords) -> StateFunction:
    ends = _ends(env_id, keywords)

    def mountain_car(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        goal = torch.where(ends(obs, action, next_obs), 100.0, 0.0)
        return (goal - 0.1 * action[:, 0].square()).to(obs.dtype)

    return mountain_car


_FAMILIES: dict[str, Callable[[str, Keywords], StateFunction]] = {
    "Pendulum": _pendulum,
    "InvertedPendulum": _inverted_pendulum,
    "InvertedDoublePendulum": _double_pendulum,
    "CartPole": _cartpole,
    "MountainCarContinuous": _mountain_car,
}

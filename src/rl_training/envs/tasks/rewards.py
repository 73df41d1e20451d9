"""Rewards of known tasks as functions of tensors, for planning with a learned model.

PETS plans with the task's own reward rather than a learned one.  The rules are those of Gymnasium's
environments; where the observation hides what the reward needs, none is known: HalfCheetah's place
is seen with `exclude_current_positions_from_observation: false` alone.
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
from rl_training.envs.tasks.swing_up import swing_up_reward
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
    function: StateFunction | None
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
    if function is None:
        return None
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


def _swing_up(_: str, __: Keywords) -> StateFunction:
    def swing_up(_: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        place, angle = next_obs[:, 0], next_obs[:, 1]
        effort = action.square().sum(-1)
        found: Tensor = swing_up_reward(place, angle, effort, torch.exp, torch.sin, torch.cos)
        return found

    return swing_up


def _half_cheetah(_: str, keywords: Keywords) -> StateFunction | None:
    if keywords.get("exclude_current_positions_from_observation", True):
        return None
    forward = float(keywords.get("forward_reward_weight", 1.0))
    control = float(keywords.get("ctrl_cost_weight", 0.1))
    seconds = 0.01 * int(keywords.get("frame_skip", 5))

    def half_cheetah(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        velocity = (next_obs[:, 0] - obs[:, 0]) / seconds
        return forward * velocity - control * action.square().sum(-1)

    return half_cheetah


def _length(way: Tensor) -> Tensor:
    return way.square().sum(-1).sqrt()


def _reacher(env_id: str, keywords: Keywords) -> StateFunction:
    near = float(keywords.get("reward_dist_weight", 1.0))
    is_v5 = env_id.endswith("-v5")
    control = float(keywords.get("reward_control_weight", 1.0))

    def reacher(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        # Entries 8 and on are the way from the target to the fingertip; v4 pays for that before.
        way = (next_obs if is_v5 else obs)[:, 8:]
        return -near * _length(way) - control * action.square().sum(-1)

    return reacher


def _pusher(_: str, keywords: Keywords) -> StateFunction:
    near = float(keywords.get("reward_near_weight", 0.5))
    far = float(keywords.get("reward_dist_weight", 1.0))
    control = float(keywords.get("reward_control_weight", 0.1))

    def pusher(_: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        hand, thing, goal = next_obs[:, 14:17], next_obs[:, 17:20], next_obs[:, 20:23]
        costs = near * _length(thing - hand) + far * _length(thing - goal)
        return -costs - control * action.square().sum(-1)

    return pusher


_FAMILIES: dict[str, Callable[[str, Keywords], StateFunction | None]] = {
    "rl_training/CartPoleSwingUp": _swing_up,
    "HalfCheetah": _half_cheetah,
    "Reacher": _reacher,
    "Pusher": _pusher,
    "Pendulum": _pendulum,
    "InvertedPendulum": _inverted_pendulum,
    "InvertedDoublePendulum": _double_pendulum,
    "CartPole": _cartpole,
    "MountainCarContinuous": _mountain_car,
}

"""The cart-pole of PETS (Chua et al., 2018, App. A.2 of arXiv:1805.12114), without an extra.

A pole hangs from a cart on a rail and is to be swung up and held there.  Sizes and forces are those
of the authors' model; its equations of motion are written out here,

    (M + m) x'' - m l (cos(q) q'' - sin(q) q'^2) = 100 a - x'
    (I + m l^2) q'' - m l cos(q) x'' + m g l sin(q) = -q',

and solved by Runge and Kutta's fourth-order method.  Observations are x, q, x', q'; q is 0 where
the pole hangs.  Episodes have 200 steps and no other end.

Deviations: the cart stops dead at the end of its rail, where the authors' simulator has a stiff
spring.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.spec import Array

DENSITY, GRAVITY, GEAR, DAMPING = 1000.0, 9.81, 100.0, 1.0
POLE, POLE_RADIUS, CART, CART_RADIUS = 0.6, 0.049, 0.2, 0.1
"""Lengths and radii of the capsules that pole and cart are."""
RAIL = 2.5
"""Distance from the middle of the rail to its ends."""
TIME_STEP, NUM_STEPS = 0.02, 2
"""Of the solver, and how many of them are a step of the environment."""
EPISODE = 200


def capsule(length: float, radius: float) -> tuple[float, float]:
    """Return mass and moment of inertia about the middle of a capsule, across its axis."""
    cylinder = DENSITY * math.pi * radius**2 * length
    ball = DENSITY * 4 / 3 * math.pi * radius**3
    of_cylinder = cylinder * (length**2 / 12 + radius**2 / 4)
    of_ball = ball * (2 / 5 * radius**2 + length**2 / 4 + 3 / 8 * length * radius)
    return cylinder + ball, of_cylinder + of_ball


CART_MASS = capsule(CART, CART_RADIUS)[0]
POLE_MASS, POLE_INERTIA = capsule(POLE, POLE_RADIUS)


def swing_up_reward(place: Any, angle: Any, effort: Any, exp: Any, sin: Any, cos: Any) -> Any:
    """Return exp(-|tip - goal|^2 / 0.6^2) - 0.01 a^2, of arrays or tensors by their functions."""
    sideways = place - POLE * sin(angle)
    below = POLE + POLE * cos(angle)
    return exp(-(sideways * sideways + below * below) / POLE**2) - 0.01 * effort


class CartPoleSwingUp(gym.Env[Array, Array]):
    """Swing the pole up and hold it over the middle of the rail."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-3.0, 3.0, (1,), np.float32)
        self.state = np.zeros(4)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin near the middle with a hanging pole."""
        super().reset(seed=seed, options=options)
        self.state = self.np_random.normal(0.0, 0.1, 4)
        return self._obs(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Push the cart for 0.04 seconds."""
        push = float(np.clip(action[0], -3.0, 3.0))
        for _ in range(NUM_STEPS):
            self.state = _solve(self.state, GEAR * push)
            if abs(self.state[0]) > RAIL:
                self.state[0] = math.copysign(RAIL, self.state[0])
                self.state[2] = 0.0
        place, angle = self.state[:2]
        reward = swing_up_reward(place, angle, push**2, np.exp, np.sin, np.cos)
        return self._obs(), float(reward), False, False, {}

    def _obs(self) -> Array:
        return self.state.astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        """Return where the cart and the pole are."""
        return {"state": self.state.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.state = np.array(state["state"])


def accelerations(state: Array, force: float) -> Array:
    """Return the change per second of x, q, x', q'."""
    _, angle, speed, turn = state
    sin, cos = math.sin(angle), math.cos(angle)
    total, arm = CART_MASS + POLE_MASS, POLE_MASS * POLE / 2
    inertia = POLE_INERTIA + POLE_MASS * (POLE / 2) ** 2
    # Two linear equations in x'' and q''.
    first = force - DAMPING * speed - arm * sin * turn**2
    second = -DAMPING * turn - arm * GRAVITY * sin
    determinant = total * inertia - (arm * cos) ** 2
    return np.array(
        [
            speed,
            turn,
            (inertia * first + arm * cos * second) / determinant,
            (total * second + arm * cos * first) / determinant,
        ]
    )


def _solve(state: Array, force: float) -> Array:
    a = accelerations(state, force)
    b = accelerations(state + TIME_STEP / 2 * a, force)
    c = accelerations(state + TIME_STEP / 2 * b, force)
    d = accelerations(state + TIME_STEP * c, force)
    return np.asarray(state + TIME_STEP / 6 * (a + 2 * b + 2 * c + d))

"""CartPole for many environments at once: Gymnasium's dynamics, masked resets, own generators.

Bit-identical to the same environments run one by one: every environment draws from its own
generator, seeded as in `SeedVectorEnv`, and every float64 operation is Gymnasium's or differs from
it by an exact power of two, so the mode in which environments run does not change a result.

Why not Gymnasium's `CartPoleVectorEnv`: it takes one seed for all environments, draws all starts
from one generator and resets on the next step. Used for its dynamics alone, with our generators and
resets around it, it gives the same bits at 0.25 (8 environments) and 0.40 (64) of the speed.

Shapes: S seeds, n environments per seed; all S * n are stepped by the same operations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from rl_training.envs.plain import State, decode, encode
from rl_training.envs.snapshot import ResumeLevel, SnapshotWrapper
from rl_training.envs.spec import Array

CARTPOLE_IDS = ("CartPole-v0", "CartPole-v1")

# Rows of the state. NumPy takes a third of the time for operands without gaps, so rows that are
# worked on together are neighbours: what ends an episode (0-2), what moves (1-4) and by how much
# (3-6).
_STEPS, _X, _THETA, _X_DOT, _THETA_DOT, _X_ACC, _THETA_ACC = range(7)
_STATE_ROWS = np.array([_X, _X_DOT, _THETA, _THETA_DOT])  # the order of Gymnasium
_START = 0.05  # the first state is uniform in [-0.05, 0.05]


class MaskedCartPole:
    """CartPole that never resets by itself; `renew` takes a mask."""

    kind: ClassVar[str] = "cartpole"
    note = "native: all at once as arrays"

    def __init__(self, shape: tuple[int, int], max_episode_steps: int) -> None:
        task = CartPoleEnv()
        self._shape = shape  # (S, n)
        self._generators: list[np.random.Generator] = []
        self._rows = np.zeros((7, *shape))
        self._lanes = self._rows.reshape(7, -1)
        # [S, n, cart or pole, position or velocity]: flattened, Gymnasium's order.
        self._obs = self._rows[_X:_X_ACC].reshape(2, 2, *shape).transpose(2, 3, 1, 0)
        self._obs_shape = (*shape, 4)
        self._rewards = np.ones(shape, dtype=np.float32)
        self._forces = np.array([-task.force_mag, task.force_mag])
        self._force = np.zeros(shape)
        limits = (max_episode_steps - 0.5, task.x_threshold, task.theta_threshold_radians)
        self._limits = self._constants(*limits)
        self._magnitudes = np.zeros((3, *shape))
        self._program = [*self._acceleration(task), *self._motion(task)]

    def _constants(self, *values: float) -> Array:
        return np.stack([np.full(self._shape, value) for value in values])

    def _acceleration(self, task: CartPoleEnv) -> list[Callable[[], object]]:
        """What sets both accelerations; https://coneural.org/florian/papers/05_cart_pole.pdf."""
        # Gymnasium multiplies the denominator by the half length. That is a power of two, so
        # multiplying the constants in it instead gives the same bits.
        assert math.frexp(task.length)[0] == 0.5
        mass, polemass_length = np.array(task.total_mass), np.array(task.polemass_length)
        factors = self._constants(task.polemass_length, task.length * task.masspole)
        minuends = self._constants(task.length * (4.0 / 3.0), 0.0)
        scratch = np.zeros((3, *self._shape))
        differences, sine = np.zeros((2, *self._shape)), np.zeros(self._shape)
        theta, theta_acc = self._rows[_THETA], self._rows[_THETA_ACC]
        cosine = self._rows[_X_ACC]  # beside theta_dot, until the acceleration takes its place
        squares, push, product = scratch[:2], scratch[0], scratch[2]
        return [
            partial(np.cos, theta, cosine),
            partial(np.sin, theta, sine),
            partial(np.square, self._rows[_THETA_DOT:_THETA_ACC], squares),
            partial(np.multiply, squares, factors, squares),
            partial(np.multiply, push, sine, push),
            partial(np.add, self._force, push, push),
            partial(np.divide, squares, mass, squares),
            partial(np.multiply, cosine, push, product),
            partial(np.multiply, np.array(task.gravity), sine, minuends[1]),
            partial(np.subtract, minuends, scratch[1:], differences),
            partial(np.divide, differences[1], differences[0], theta_acc),
            partial(np.multiply, polemass_length, theta_acc, product),
            partial(np.multiply, product, cosine, product),
            partial(np.divide, product, mass, product),
            partial(np.subtract, push, product, self._rows[_X_ACC]),
        ]

    def _motion(self, task: CartPoleEnv) -> list[Callable[[], object]]:
        """What moves cart and pole, counts the step and says how far from the middle they are."""
        assert task.kinematics_integrator == "euler"
        changes, moving = np.zeros((4, *self._shape)), self._rows[_X:_X_ACC]
        steps = self._rows[_STEPS]
        return [
            partial(np.multiply, self._rows[_X_DOT:], np.array(task.tau), changes),
            partial(np.add, moving, changes, moving),
            partial(np.add, steps, np.array(1.0), steps),
            partial(np.absolute, self._rows[:_X_DOT], self._magnitudes),
        ]

    def observations(self) -> Array:
        """The current observations, [S, n, 4]."""
        return self._obs.astype(np.float32, "C").reshape(self._obs_shape)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """One step of all environments; ended ones wait for `renew`.

        Args:
            actions: 0 or 1, [S, n]; not checked, they are indices of the learner's own outputs.
        """
        self._forces.take(actions, out=self._force, mode="clip")
        for operation in self._program:
            operation()
        late, off_track, fallen = np.greater(self._magnitudes, self._limits)
        return self.observations(), self._rewards.copy(), off_track | fallen, late

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes everywhere, with new generators if there are seeds, S * n of them."""
        if seeds is not None:
            self._generators = [np.random.default_rng(seed) for seed in seeds]
        return self.renew(np.ones(self._shape, dtype=np.bool_), self._obs)

    def renew(self, ended: Array, obs: Array) -> Array:  # noqa: ARG002
        """Begin new episodes where `ended`, [S, n]; returns the observations of all."""
        for lane in ended.ravel().nonzero()[0].tolist():
            start = self._generators[lane].uniform(-_START, _START, size=4)
            self._lanes[_STATE_ROWS, lane] = start
            self._lanes[_STEPS, lane] = 0.0
        return self.observations()

    @property
    def resume_level(self) -> ResumeLevel:
        """All of the state is known."""
        return "exact"

    def snapshot(self) -> list[State]:
        """State, step counters and generators of every seed."""
        num_seeds, n = self._shape
        return [
            {
                "kind": self.kind,
                "level": self.resume_level,
                "cartpole": {
                    "state": encode(self._rows[_STATE_ROWS, seed]),
                    "steps": encode(self._rows[_STEPS, seed].astype(np.int32)),
                    "generators": encode(self._generators[seed * n : (seed + 1) * n]),
                },
            }
            for seed in range(num_seeds)
        ]

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots; no environment has anything to report."""
        parts = [state["cartpole"] for state in states]
        for seed, part in enumerate(parts):
            self._rows[_STATE_ROWS, seed] = part["state"]
            self._rows[_STEPS, seed] = part["steps"]
        self._generators = [gen for part in parts for gen in decode(part["generators"])]
        return [None] * len(self._generators)

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """Which environment failed, and why."""
        return 0, error

    def close(self) -> None:
        """Nothing is open."""


class SpreadCartPole(MaskedCartPole):
    """The same for many seeds with few environments each.

    A seed must also resume alone, where its few environments run one by one. So the snapshots are
    those of such environments, taken from and put into a single one that stands for each in turn.
    """

    kind: ClassVar[str] = "wrapped"

    def __init__(
        self, shape: tuple[int, int], max_episode_steps: int, stand_in: SnapshotWrapper
    ) -> None:
        super().__init__(shape, max_episode_steps)
        self._seeds: list[int] = []
        self._stand_in = stand_in
        stand_in.reset(seed=0)

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes everywhere."""
        if seeds is not None:
            self._seeds = list(seeds)
        return super().reset(seeds)

    def snapshot(self) -> list[State]:
        """What every seed's environments would give if run one by one."""
        n = self._shape[1]
        return [
            {
                "kind": self.kind,
                "level": self.resume_level,
                "obs": obs.copy(),
                "envs": [self._lane_state(seed * n + index) for index in range(n)],
            }
            for seed, obs in enumerate(self.observations())
        ]

    def _lane_state(self, lane: int) -> State:
        base: Any = self._stand_in.unwrapped
        base.state = self._lanes[_STATE_ROWS, lane]
        base.steps_beyond_terminated = None
        base._np_random, base._np_random_seed = self._generators[lane], self._seeds[lane]
        self._stand_in.set_wrapper_attr("_elapsed_steps", int(self._lanes[_STEPS, lane]))
        return self._stand_in.snapshot()

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots; no environment has anything to report."""
        base: Any = self._stand_in.unwrapped
        base._np_random = np.random.default_rng(0)  # A restore writes into the one that is there.
        for lane, env in enumerate(env for state in states for env in state["envs"]):
            self._stand_in.restore(env)
            self._lanes[_STATE_ROWS, lane] = base.state
            self._lanes[_STEPS, lane] = self._stand_in.get_wrapper_attr("_elapsed_steps")
            self._generators[lane] = copy.deepcopy(base._np_random)
            self._seeds[lane] = base._np_random_seed
        return [None] * len(self._generators)

    def close(self) -> None:
        """Close the one real environment."""
        self._stand_in.close()

"""Gymnasium's MuJoCo tasks (v4 and v5) for many simulations at once.

Observations, rewards and terminations are bit-equal to those of Gymnasium's classes: each operation
is theirs, in their order and number format. Settings are read from an instance of the class, so
that every keyword of its constructor is followed and no default is written here a second time. How
an episode begins is left to the instance's own `reset_model`.

After a step MuJoCo's positions and velocities are new, but derived fields (`xpos`, `cinert`, ...)
still belong to the start of the last substep, here as in Gymnasium.

L simulations, A action entries, O observation entries; arrays are [L, ...].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np

from rl_training.envs.spec import Array

Bind: TypeAlias = Callable[[str], Array]
"""Gives a live array [L, ...] of an MjData field by its name."""
Rows: TypeAlias = slice | Array
"""Which simulations: all, or those of the given numbers."""


class MujocoTask:
    """Reads a task's observations, rewards and terminations off bound fields."""

    episode_attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes of Gymnasium's instance that a reset changes, beside the simulation."""

    def __init__(self, env: Any, bind: Bind) -> None:
        self.env = env
        self.is_v4 = type(env).__module__.endswith("_v4")
        self.dt: float = env.dt
        self.qpos, self.qvel, self.ctrl = bind("qpos"), bind("qvel"), bind("ctrl")
        self._never = np.zeros(len(self.qpos), np.bool_)

    @property
    def uses_contact_forces(self) -> bool:
        """Whether `cfrc_ext` is observed or paid for."""
        return False

    def before(self) -> Array:
        """What a reward needs to know of the time before the step, [L]."""
        return self._never

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:
        """Rewards [L] and terminations [L] of a step with these actions [L, A]."""
        raise NotImplementedError

    def parts(self, rows: Rows) -> list[Array]:
        """What observations consist of, each [rows, ...]."""
        raise NotImplementedError

    def observe(self, rows: Rows, dtype: type[np.floating[Any]]) -> Array:
        """Observations [rows, O] in memory of their own."""
        return np.concatenate(self.parts(rows), axis=1, dtype=dtype, casting="unsafe")

    def _finite(self) -> Array:
        numbers = np.isfinite(np.concatenate([self.qpos, self.qvel], axis=1))
        finite: Array = np.logical_and.reduce(numbers, axis=1)
        return finite

    def _positions(self, rows: Rows, num_skipped: int) -> Array:
        skip = num_skipped if self.env._exclude_current_positions_from_observation else 0
        return self.qpos[rows, skip:]


def _weighted(weight: float, sums: Array) -> Array:
    """Multiply as Gymnasium multiplies single numbers.

    Whether a float32 number times a Python float is a float32 depends on NumPy's version; for
    arrays it always is.
    """
    product: Array = np.multiply(sums, weight, dtype=_product_dtype(weight, sums.dtype))
    return product


@functools.cache
def _product_dtype(weight: float, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.asarray(weight * dtype.type(1)).dtype


def _sum_of_squares(values: Array) -> Array:
    """Sum over all but the first axis; rows without gaps are summed as `np.sum` sums one."""
    rows = values if values.ndim == 2 else values.reshape(len(values), -1)
    squares = np.square(rows, order="C")
    sums: Array = np.add.reduce(squares, axis=1)
    return sums


def _norm(vectors: Array) -> Array:
    """Lengths [L] of vectors [L, 3] as `np.linalg.norm` gives them: by BLAS, one dot for each."""
    products: Array = np.matmul(vectors[:, None, :], vectors[:, :, None])
    return np.sqrt(products[:, 0, 0])


def _clipped(values: Array) -> Array:
    """`np.clip` to [-10, 10] in a third of its time."""
    clipped: Array = np.minimum(np.maximum(values, -10), 10)
    return clipped


def _within(low: float, values: Array, high: float) -> Array:
    return (low < values) & (values < high)


class Runner(MujocoTask):
    """HalfCheetah: forward velocity less the cost of the actions."""

    num_skipped = 1

    def before(self) -> Array:
        """The position along x."""
        return self.qpos[:, 0].copy()

    def _forward(self, before: Array) -> Array:
        velocity = (self.qpos[:, 0] - before) / self.dt
        forward: Array = self.env._forward_reward_weight * velocity
        return forward

    def _control_cost(self, actions: Array) -> Array:
        return _weighted(self.env._ctrl_cost_weight, _sum_of_squares(actions))

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:
        """Never terminates."""
        return self._forward(before) - self._control_cost(actions), self._never.copy()

    def parts(self, rows: Rows) -> list[Array]:
        """Positions and velocities."""
        return [self._positions(rows, self.num_skipped), self.qvel[rows]]


class Swimmer(Runner):
    """Swimmer: the same in the plane."""

    num_skipped = 2


class _Mortal(Runner):
    """A runner that is paid for being healthy, and whose episode ends when it is not."""

    def _healthy(self) -> Array:
        raise NotImplementedError

    def _survival(self, healthy: Array) -> Array:
        paid = healthy | bool(self.is_v4 and self.env._terminate_when_unhealthy)
        reward: Array = paid * self.env._healthy_reward
        return reward

    def _ended(self, healthy: Array) -> Array:
        return ~healthy if self.env._terminate_when_unhealthy else self._never.copy()

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:
        """Ends where the state leaves the healthy ranges."""
        healthy = self._healthy()
        rewards = self._forward(before) + self._survival(healthy)
        return rewards - self._control_cost(actions), self._ended(healthy)


class Walker2d(_Mortal):
    """Walker2d: upright and not leaning; observed velocities are clipped."""

    def _healthy(self) -> Array:
        env = self.env
        (low_z, high_z), (low_angle, high_angle) = env._healthy_z_range, env._healthy_angle_range
        height, angle = self.qpos[:, 1], self.qpos[:, 2]
        return _within(low_z, height, high_z) & _within(low_angle, angle, high_angle)

    def parts(self, rows: Rows) -> list[Array]:
        """Positions and clipped velocities."""
        return [self._positions(rows, self.num_skipped), _clipped(self.qvel[rows])]


class Hopper(Walker2d):
    """Hopper: as Walker2d, and no entry of the state may be far off."""

    def _healthy(self) -> Array:
        low, high = self.env._healthy_state_range
        state = np.concatenate([self.qpos[:, 2:], self.qvel], axis=1)
        near: Array = np.logical_and.reduce(_within(low, state, high), axis=1)
        return super()._healthy() & near


class Ant(_Mortal):
    """Ant: the main body's velocity; contact forces cost and are observed."""

    num_skipped = 2

    def __init__(self, env: Any, bind: Bind) -> None:
        super().__init__(env, bind)
        name = "torso" if self.is_v4 else env._main_body
        body = env.model.body(name).id
        self._body_x = bind("xpos")[:, body, 0]
        self._forces = bind("cfrc_ext") if self.uses_contact_forces else None

    @property
    def uses_contact_forces(self) -> bool:
        """In v5 always, because they cost something."""
        return not self.is_v4 or bool(self.env._use_contact_forces)

    def before(self) -> Array:
        """The main body's position along x."""
        return self._body_x.copy()

    def _forward(self, before: Array) -> Array:
        velocity = (self._body_x - before) / self.dt
        return velocity if self.is_v4 else velocity * self.env._forward_reward_weight

    def _healthy(self) -> Array:
        low, high = self.env._healthy_z_range
        height = self.qpos[:, 2]
        healthy: Array = self._finite() & (low <= height) & (height <= high)
        return healthy

    def _clipped_forces(self, forces: Array) -> Array:
        low, high = self.env._contact_force_range
        clipped: Array = np.clip(forces, low, high)
        return clipped

    def _control_cost(self, actions: Array) -> Array:
        cost = super()._control_cost(actions)
        if self._forces is None:
            return cost
        forces = self._clipped_forces(self._forces)
        return cost + _weighted(self.env._contact_cost_weight, _sum_of_squares(forces))

    def parts(self, rows: Rows) -> list[Array]:
        """Positions, velocities, contact forces; in v5 not those on the world."""
        parts = super().parts(rows)
        if self._forces is not None and (self.is_v4 or self.env._include_cfrc_ext_in_observation):
            forces = self._clipped_forces(self._forces[rows, 0 if self.is_v4 else 1 :])
            parts.append(forces.reshape(len(forces), -1))
        return parts


class _HumanoidBody(MujocoTask):
    """What Humanoid and HumanoidStandup observe."""

    def __init__(self, env: Any, bind: Bind) -> None:
        super().__init__(env, bind)
        self.forces = bind("cfrc_ext")
        # v5 leaves out the world's body and the joint of the root, and each part on request.
        first, first_force = (0, 0) if self.is_v4 else (1, 6)
        fields = {"cinert": first, "cvel": first, "qfrc_actuator": first_force, "cfrc_ext": first}
        self._observed = [
            _flat_from(bind(name), start)
            for name, start in fields.items()
            if self.is_v4 or getattr(env, f"_include_{name}_in_observation") is True
        ]

    @property
    def uses_contact_forces(self) -> bool:
        """They are paid for or observed."""
        return True

    def parts(self, rows: Rows) -> list[Array]:
        """Positions, velocities, inertias, body velocities, actuator and contact forces."""
        return [self.qpos[rows, self._num_skipped :], self.qvel[rows]] + [
            field[rows] for field in self._observed
        ]

    @property
    def _num_skipped(self) -> int:
        # HumanoidStandup-v4 has no such setting.
        return 2 * bool(getattr(self.env, "_exclude_current_positions_from_observation", True))


def _flat_from(field: Array, first: int) -> Array:
    """A live view [L, ...] of a field [L, N, ...], without its entries before number `first`."""
    flat = field.reshape(len(field), -1)
    return flat[:, first * flat.shape[1] // field.shape[1] :]


class Humanoid(_HumanoidBody, _Mortal):
    """Humanoid: velocity of the centre of mass, less the costs of controls and contacts."""

    def __init__(self, env: Any, bind: Bind) -> None:
        super().__init__(env, bind)
        self._masses = env.model.body_mass
        self._total_mass = self._masses.sum()
        self._body_positions = bind("xipos")

    def before(self) -> Array:
        """The centre of mass along x."""
        # The sum must run over all three axes: a narrower one is rounded elsewhere.
        centre = np.einsum("b,lbj->lj", self._masses, self._body_positions)
        along_x: Array = centre[:, 0] / self._total_mass
        return along_x

    def _forward(self, before: Array) -> Array:
        velocity = (self.before() - before) / self.dt
        forward: Array = self.env._forward_reward_weight * velocity
        return forward

    def _healthy(self) -> Array:
        low, high = self.env._healthy_z_range
        return _within(low, self.qpos[:, 2], high)

    def _control_cost(self, actions: Array) -> Array:  # noqa: ARG002
        cost: Array = self.env._ctrl_cost_weight * _sum_of_squares(self.ctrl)
        if self.is_v4:
            return cost
        contact = self.env._contact_cost_weight * _sum_of_squares(self.forces)
        low, high = self.env._contact_cost_range
        costs: Array = cost + np.clip(contact, low, high)
        return costs


class HumanoidStandup(_HumanoidBody):
    """HumanoidStandup: height, less the costs of controls and impacts."""

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:  # noqa: ARG002
        """Never terminates."""
        env = self.env
        height = self.qpos[:, 2] / env.model.opt.timestep
        controls, impacts = _sum_of_squares(self.ctrl), _sum_of_squares(self.forces)
        if self.is_v4:
            control_cost, impact_cost = 0.1 * controls, np.minimum(0.5e-6 * impacts, 10)
        else:
            control_cost = env._ctrl_cost_weight * controls
            impact_cost = np.clip(env._impact_cost_weight * impacts, *env._impact_cost_range)
        return height - control_cost - impact_cost + 1, self._never.copy()


class Reacher(MujocoTask):
    """Reacher: the distance from fingertip to target; v4 pays for that before the step."""

    episode_attributes = ("goal",)

    def __init__(self, env: Any, bind: Bind) -> None:
        super().__init__(env, bind)
        bodies = bind("xpos")
        self._fingertip = bodies[:, env.model.body("fingertip").id]
        self._target = bodies[:, env.model.body("target").id]

    def before(self) -> Array:
        """The distance, [L]."""
        return _norm(self._fingertip - self._target)

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:
        """Never terminates."""
        controls = -_sum_of_squares(actions)
        if self.is_v4:
            return -before + controls, self._never.copy()
        distance = -self.before() * self.env._reward_dist_weight
        return distance + _weighted(self.env._reward_control_weight, controls), self._never.copy()

    def parts(self, rows: Rows) -> list[Array]:
        """Angles as cosines and sines, the target, velocities, the way to the target."""
        angles = np.array(self.qpos[rows, :2])
        way = self._fingertip[rows] - self._target[rows]
        return [
            np.cos(angles),
            np.sin(angles),
            self.qpos[rows, 2:],
            self.qvel[rows, :2],
            way if self.is_v4 else way[:, :2],
        ]


class Pusher(MujocoTask):
    """Pusher (v5; Gymnasium refuses v4 with this MuJoCo): distances of hand, object and goal."""

    episode_attributes = ("goal_pos", "cylinder_pos", "init_qpos")

    def __init__(self, env: Any, bind: Bind) -> None:
        super().__init__(env, bind)
        bodies = bind("xpos")
        names = ("tips_arm", "object", "goal")
        self._hand, self._object, self._goal = (
            bodies[:, env.model.body(name).id] for name in names
        )

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:  # noqa: ARG002
        """Never terminates."""
        env = self.env
        near = -_norm(self._object - self._hand) * env._reward_near_weight
        distance = -_norm(self._object - self._goal) * env._reward_dist_weight
        control = _weighted(env._reward_control_weight, -_sum_of_squares(actions))
        return distance + control + near, self._never.copy()

    def parts(self, rows: Rows) -> list[Array]:
        """Seven joints, then the places of hand, object and goal."""
        places = [self._hand[rows], self._object[rows], self._goal[rows]]
        return [self.qpos[rows, :7], self.qvel[rows, :7], *places]


class InvertedPendulum(MujocoTask):
    """InvertedPendulum: one for each step in which the pole is up; v4 pays for the last as well."""

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:  # noqa: ARG002
        """Ends when the pole leans too far."""
        up = self._finite() & ~(np.abs(self.qpos[:, 1]) > 0.2)
        return np.ones(len(up)) if self.is_v4 else up.astype(np.float64), ~up

    def parts(self, rows: Rows) -> list[Array]:
        """Positions and velocities."""
        return [self.qpos[rows], self.qvel[rows]]


class InvertedDoublePendulum(MujocoTask):
    """InvertedDoublePendulum: the tip is to be high, in the middle and calm."""

    def __init__(self, env: Any, bind: Bind) -> None:
        super().__init__(env, bind)
        self._tip = bind("site_xpos")[:, 0]
        self._constraint_forces = bind("qfrc_constraint")

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:  # noqa: ARG002
        """Ends when the tip is low."""
        height = self._tip[:, 2]
        ended = height <= 1
        distance = 0.01 * _power_of_two(self._tip[:, 0]) + _power_of_two(height - 2)
        speed = 1e-3 * _power_of_two(self.qvel[:, 1]) + 5e-3 * _power_of_two(self.qvel[:, 2])
        bonus = 10 if self.is_v4 else self.env._healthy_reward * ~ended
        return bonus - distance - speed, ended

    def parts(self, rows: Rows) -> list[Array]:
        """The cart, angles as sines and cosines, clipped velocities and constraint forces."""
        angles = np.array(self.qpos[rows, 1:])
        forces = self._constraint_forces[rows, : None if self.is_v4 else 1]
        return [
            self.qpos[rows, :1],
            np.sin(angles),
            np.cos(angles),
            _clipped(self.qvel[rows]),
            _clipped(forces),
        ]


def _power_of_two(values: Array) -> Array:
    """Squares as Gymnasium computes those of single numbers: by C's `pow`, not by a product.

    The two differ in the last bit of one value in a thousand.
    """
    return np.array([value**2 for value in values.tolist()])


_CLASSES: dict[str, tuple[str, type[MujocoTask], tuple[int, ...]]] = {
    "ant": ("AntEnv", Ant, (4, 5)),
    "half_cheetah": ("HalfCheetahEnv", Runner, (4, 5)),
    "hopper": ("HopperEnv", Hopper, (4, 5)),
    "humanoid": ("HumanoidEnv", Humanoid, (4, 5)),
    "humanoidstandup": ("HumanoidStandupEnv", HumanoidStandup, (4, 5)),
    "inverted_double_pendulum": ("InvertedDoublePendulumEnv", InvertedDoublePendulum, (4, 5)),
    "inverted_pendulum": ("InvertedPendulumEnv", InvertedPendulum, (4, 5)),
    "pusher": ("PusherEnv", Pusher, (5,)),
    "reacher": ("ReacherEnv", Reacher, (4, 5)),
    "swimmer": ("SwimmerEnv", Swimmer, (4, 5)),
    "walker2d": ("Walker2dEnv", Walker2d, (4, 5)),
}
MUJOCO_TASKS: dict[str, type[MujocoTask]] = {
    f"gymnasium.envs.mujoco.{module}_v{version}:{name}": task
    for module, (name, task, versions) in _CLASSES.items()
    for version in versions
}
"""By the full name of Gymnasium's class."""

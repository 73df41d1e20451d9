"""Known ends and rewards against the environments' own, and functions that users write."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.envs.factory import make_env, probe_env
from rl_training.envs.spec import EnvSpec
from rl_training.envs.tasks import swing_up
from rl_training.envs.tasks.functions import (
    StateFunction,
    reward_function,
    termination_function,
)
from rl_training.envs.tasks.rewards import POLE_LENGTH, balanced_pole, reward_for
from rl_training.envs.tasks.terminations import (
    built_in_termination,
    double_pendulum_tip,
    never,
    termination_for,
)
from rl_training.errors import EnvError

MUJOCO = importlib.util.find_spec("mujoco") is not None
needs_mujoco = pytest.mark.skipif(not MUJOCO, reason="needs the mujoco extra")
CLASSIC = [
    *("Pendulum-v1", "CartPole-v1", "MountainCarContinuous-v0"),
    "rl_training/CartPoleSwingUp-v0",
]
SIMULATED = [
    "Hopper-v5",
    "Walker2d-v5",
    "Ant-v5",
    "Humanoid-v5",
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
    "HalfCheetah-v5",
]
PLANNED = ["InvertedPendulum-v5", "InvertedDoublePendulum-v5", "Reacher-v5", "Pusher-v5"]
"""Tasks of the simulator whose reward their observation tells."""
TASKS = [*CLASSIC, *(pytest.param(name, marks=needs_mujoco) for name in SIMULATED)]
NOISE = {
    "Hopper-v5": 0.3,
    "Walker2d-v5": 0.7,
    "Humanoid-v5": 0.4,
    "Ant-v5": 0.3,
    "CartPole-v1": 3.0,
    "MountainCarContinuous-v0": 8.0,
}
"""How far states are pushed, so that both outcomes occur."""

Steps = dict[str, Tensor]


def perturb(env: Any, rng: np.random.Generator, scale: float) -> None:
    """Put the environment into a random state near its first."""
    inner = env.unwrapped
    if hasattr(inner, "state"):
        inner.state = np.array(inner.state) + scale * rng.normal(size=len(inner.state)) * 0.3
        return
    qpos, qvel = inner.init_qpos.copy(), inner.init_qvel.copy()
    inner.set_state(
        qpos + scale * rng.normal(size=qpos.shape), qvel + scale * rng.normal(size=qvel.shape)
    )


def real_steps(env_id: str, count: int = 150, **kwargs: Any) -> tuple[EnvSpec, Steps]:
    """Single steps from perturbed states; actions in learner units."""
    env, rng = make_env(env_id, kwargs), np.random.default_rng(0)
    spec = EnvSpec.from_env(env, env_id)
    rows: dict[str, list[Any]] = {k: [] for k in ("obs", "action", "next_obs", "reward", "end")}
    for number in range(count):
        obs, _ = env.reset(seed=number)
        perturb(env, rng, rng.uniform(0, 1) * NOISE.get(env_id, 0.5))
        discrete = spec.action_kind == "discrete"
        unit: Any = rng.integers(2) if discrete else rng.uniform(-1, 1, size=spec.action_shape)
        _, *_ = env.step(spec.scale_action(unit))  # so that what is seen before is real
        env.unwrapped.steps_beyond_terminated = None  # type: ignore[attr-defined]
        obs = env.unwrapped._get_obs() if hasattr(env.unwrapped, "_get_obs") else _state(env)
        after, reward, end, _, _ = env.step(spec.scale_action(unit))
        unit = np.eye(spec.action_dim)[unit] if discrete else unit
        for name, value in zip(rows, (obs, unit, after, reward, end), strict=True):
            rows[name].append(value)
    return spec, {k: torch.tensor(np.array(v), dtype=torch.float32) for k, v in rows.items()}


def _state(env: Any) -> Any:
    return np.array(env.unwrapped.state, dtype=np.float32)


@pytest.mark.parametrize("env_id", TASKS)
def test_a_known_termination_is_the_environments_own(env_id: str) -> None:
    spec, rows = real_steps(env_id)
    function = termination_for(spec)
    assert function is not None
    said = function(rows["obs"][None], rows["action"][None], rows["next_obs"][None])[0]
    real = rows["end"].bool()
    if env_id == "InvertedDoublePendulum-v5":  # the environment's tip lags: leave out the edge
        clear = (double_pendulum_tip(rows["next_obs"])[1] - 1).abs() > 0.1
        assert clear.float().mean() > 0.5
        said, real = said[clear], real[clear]
    assert torch.equal(said, real)
    if built_in_termination(env_id, {}) is not never:
        assert 0.05 < real.float().mean() < 0.98, "states should do both"


@pytest.mark.parametrize(
    ("kwargs", "ends"),
    [
        ({"terminate_when_unhealthy": False}, False),
        ({"exclude_current_positions_from_observation": False}, None),
        ({"healthy_z_range": (0.9, 1.3), "healthy_angle_range": (-0.05, 0.05)}, None),
    ],
)
@needs_mujoco
@pytest.mark.parametrize("env_id", ["Hopper-v5", "Walker2d-v5"])
def test_ends_follow_the_settings_of_the_environment(
    env_id: str, kwargs: dict[str, Any], ends: bool | None
) -> None:
    spec, rows = real_steps(env_id, 80, **kwargs)
    function = termination_for(spec, kwargs)
    assert function is not None
    said = function(rows["obs"][None], rows["action"][None], rows["next_obs"][None])[0]
    assert torch.equal(said, rows["end"].bool())
    assert bool(said.any()) is (ends is None)


@needs_mujoco
def test_half_cheetahs_reward_is_known_where_its_place_is_seen() -> None:
    seen = {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.3}
    spec, rows = real_steps("HalfCheetah-v5", 50, **seen)
    function = reward_for(spec, seen)
    assert function is not None
    said = function(rows["obs"][None], rows["action"][None], rows["next_obs"][None])[0]
    # A place in single precision, divided by a twentieth of a second.
    torch.testing.assert_close(said, rows["reward"], atol=1e-3, rtol=1e-3)
    assert reward_for(probe_env("HalfCheetah-v5", {})) is None


def test_a_swinging_pole_keeps_its_energy_without_friction() -> None:
    def energy(state: Any) -> float:
        _, angle, speed, turn = state
        arm = swing_up.POLE_MASS * swing_up.POLE / 2
        inertia = swing_up.POLE_INERTIA + arm * swing_up.POLE / 2
        moving = (swing_up.CART_MASS + swing_up.POLE_MASS) * speed**2 + inertia * turn**2
        both = arm * np.cos(angle) * speed * turn
        return float(moving / 2 - both - arm * swing_up.GRAVITY * np.cos(angle))

    state = np.array([0.0, 2.5, 0.4, -1.0])
    before = energy(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swing_up, "DAMPING", 0.0)
        for _ in range(60):
            state = swing_up._solve(state, 0.0)
    assert abs(energy(state) - before) < 1e-3 * abs(before)
    assert abs(state[1] - 2.5) > 0.1, "it moves"


@pytest.mark.parametrize(
    "env_id",
    [*CLASSIC, *(pytest.param(n, marks=needs_mujoco) for n in PLANNED)],
)
def test_a_known_reward_is_the_environments_own(env_id: str) -> None:
    spec, rows = real_steps(env_id)
    function = reward_for(spec)
    assert function is not None
    said = function(rows["obs"][None], rows["action"][None], rows["next_obs"][None])[0]
    if env_id == "InvertedDoublePendulum-v5":
        calm = (rows["next_obs"][:, 5:8].abs() < 3).all(1)  # the tip lags by a step of integration
        assert (said - rows["reward"])[calm].abs().median() < 0.05
        return
    torch.testing.assert_close(said, rows["reward"], atol=2e-5, rtol=1e-4)


def test_a_pole_is_balanced_where_its_tip_is_above_the_middle() -> None:
    # Upright; leaning, once with the cart below the tip's place; upright but a pole's length away.
    lean = 0.2
    cart = -POLE_LENGTH * torch.tensor(lean).sin()
    rows = torch.tensor([[0.0, 0.0], [0.0, lean], [float(cart), lean], [POLE_LENGTH, 0.0]])
    obs = torch.cat((rows, torch.zeros(4, 2)), 1)
    found = balanced_pole(obs, torch.zeros(4, 1), obs)
    assert found[0] == 1
    below = POLE_LENGTH * (1 - torch.tensor(lean).cos())
    torch.testing.assert_close(found[2], torch.exp(-((below / 0.3) ** 2)))
    assert found[0] > found[2] > found[1] > found[3]


def test_tasks_without_a_rule_have_none() -> None:
    spec = probe_env("Acrobot-v1", {})
    assert termination_for(spec) is None
    assert reward_for(spec) is None
    stays = termination_for(spec, name="never")
    assert stays is not None
    assert not stays(torch.ones(1, 4, 6), torch.ones(1, 4, 3), torch.ones(1, 4, 6)).any()


def test_a_reward_that_a_wrapper_changes_is_not_known() -> None:
    with pytest.raises(EnvError, match=r"wrappers\.reward_scale changes it"):
        reward_for(probe_env("Pendulum-v1", {}), {"wrappers": {"reward_scale": 0.1}})


def test_actions_reach_the_function_in_the_environments_units() -> None:
    spec = probe_env("Pendulum-v1", {})
    function = reward_for(spec)
    assert function is not None
    upright = torch.tensor([[[1.0, 0.0, 0.0]]])
    said = function(upright, torch.tensor([[[1.0]]]), upright)  # a torque of 2
    torch.testing.assert_close(said, torch.tensor([[-0.004]]))


@pytest.fixture
def own() -> Iterator[types.ModuleType]:
    """A module of the user's."""
    module = types.ModuleType("own_task_functions")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def fell(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    return next_obs[:, 0] < 0


def test_an_own_marked_function_is_used(own: types.ModuleType) -> None:
    own.fell = termination_function(fell)  # type: ignore[attr-defined]
    own.paid = reward_function(lambda obs, action, next_obs: obs[:, 0])  # type: ignore[attr-defined]
    spec = probe_env("Pendulum-v1", {})
    ends = termination_for(spec, name="own_task_functions:fell")
    pays = reward_for(spec, name="own_task_functions:paid")
    assert ends is not None
    assert pays is not None
    obs = torch.tensor([[[-1.0, 0, 0], [1.0, 0, 0]]])
    assert ends(obs, torch.zeros(1, 2, 1), obs).tolist() == [[True, False]]
    assert pays(obs, torch.zeros(1, 2, 1), obs).tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda o, a, n: n < 0, r"\[5, 3\] bool"),
        (lambda o, a, n: n[:, 0], r"\[5\] float32"),
        (lambda o, a, n: (n < 0).any(), r"\[\] bool"),
        (lambda o, a, n: False, "a bool"),
    ],
)
def test_a_function_of_the_wrong_shape_or_kind_is_refused(
    own: types.ModuleType, function: StateFunction, got: str
) -> None:
    own.bad = termination_function(function)  # type: ignore[attr-defined]
    message = rf"own_task_functions:bad must give \[B\] bool for a batch of B rows, got {got}"
    with pytest.raises(EnvError, match=message):
        termination_for(probe_env("Pendulum-v1", {}), name="own_task_functions:bad")


def test_a_function_that_fails_is_named(own: types.ModuleType) -> None:
    own.bad = termination_function(lambda o, a, n: n[:, 7] < 0)  # type: ignore[attr-defined]
    with pytest.raises(
        EnvError, match=r"own_task_functions:bad failed on a batch of 5 rows.*gives"
    ):
        termination_for(probe_env("Pendulum-v1", {}), name="own_task_functions:bad")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os:system", "os:system is not marked as one and was not called"),
        ("os:nothing_such", "is missing and was not called"),
        ("no_such_module_here:f", "'no_such_module_here' cannot be imported"),
        ("hopper", "is not the name of one; an own function is named as module:function"),
        ("a b:c", "is not the name of one"),
    ],
)
def test_only_functions_made_for_it_are_called(name: str, message: str) -> None:
    spec = probe_env("Pendulum-v1", {})
    with pytest.raises(EnvError, match=message):
        termination_for(spec, name=name)
    with pytest.raises(EnvError, match=message):
        reward_for(spec, name=name)


def test_a_reward_function_is_no_termination_function(own: types.ModuleType) -> None:
    own.paid = reward_function(lambda o, a, n: o[:, 0])  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match="not marked as one"):
        termination_for(probe_env("Pendulum-v1", {}), name="own_task_functions:paid")

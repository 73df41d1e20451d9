"""Box2D tasks that would keep their world over episodes go on bit for bit all the same."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rl_training.envs import SnapshotWrapper, make_env, snapshot

LIMIT = 120  # so that 400 steps hold the ends of several episodes


@pytest.fixture(autouse=True)
def box2d() -> Iterator[None]:
    with warnings.catch_warnings():
        message = r"builtin type \w+ has no __module__ attribute"
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
        pytest.importorskip("Box2D")
        yield


def step_or_reset(env: SnapshotWrapper, action: Any) -> tuple[bytes, float, bool, bool]:
    obs, reward, terminated, truncated, _ = env.step(action)
    seen = obs.tobytes()
    if terminated or truncated:
        seen += env.reset()[0].tobytes()
    return seen, float(reward), terminated, truncated


def first_difference(env_id: str, seed: int, used_steps: int = 250) -> tuple[int | None, int]:
    """Step at which a restored instance differs (0: at once), and the number of episode ends."""
    run, resumed = (SnapshotWrapper(make_env(env_id, {"max_episode_steps": LIMIT})) for _ in "ab")
    assert run.resume_level == "replay"
    rng = np.random.default_rng(seed)
    low, high = (getattr(run.action_space, name) for name in ("low", "high"))
    actions = rng.uniform(low, high, (used_steps + 400, *low.shape)).astype(np.float32)
    run.reset(seed=seed)
    for action in actions[:used_steps]:
        step_or_reset(run, action)
    if resumed.restore(run.snapshot()) is not None:
        return 0, 0
    ends = 0
    for index, action in enumerate(actions[used_steps:], 1):
        left, right = step_or_reset(run, action), step_or_reset(resumed, action)
        if left != right:
            return index, ends
        ends += left[2] or left[3]
    return None, ends


@pytest.mark.matrix
@pytest.mark.parametrize("env_id", ["BipedalWalker-v3", "BipedalWalkerHardcore-v3"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bipedal_walker_goes_on_bit_for_bit_over_episodes(env_id: str, seed: int) -> None:
    difference, ends = first_difference(env_id, seed)
    assert difference is None
    assert ends >= 3


def test_bipedal_walker_needs_a_new_world_for_each_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it at least one of the runs above differs, so that test can fail."""
    monkeypatch.setattr(snapshot, "_WORLD_OUTLIVES_EPISODE", set())
    differences = [first_difference("BipedalWalker-v3", seed)[0] for seed in range(3)]
    assert any(difference is not None for difference in differences)


@pytest.mark.matrix
def test_car_racing_goes_on_bit_for_bit_over_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    car_racing = importlib.import_module("gymnasium.envs.box2d.car_racing")

    def physics(env: Any, mode: str) -> Any:
        """All coordinates of the car in place of the picture: sharper, and much faster."""
        hull = env.car.hull
        values = [*hull.position, hull.angle, *hull.linearVelocity, hull.angularVelocity]
        for wheel in env.car.wheels:
            values += [*wheel.position, wheel.angle, wheel.omega]
        raw = np.frombuffer(np.array(values).tobytes(), np.uint8)
        image = np.zeros((96, 96, 3), np.uint8)
        image.reshape(-1)[: raw.size] = raw
        return image

    monkeypatch.setattr(car_racing.CarRacing, "_render", physics)
    for seed in range(3):
        difference, ends = first_difference("CarRacing-v3", seed)
        assert difference is None
        assert ends >= 3


def test_a_subclass_keeps_its_own_world() -> None:
    walker = importlib.import_module("gymnasium.envs.box2d.bipedal_walker")

    class Own(walker.BipedalWalker):  # type: ignore[name-defined,misc]  # imported at run time
        pass

    for kind, kept in ((Own, True), (walker.BipedalWalker, False)):
        env = SnapshotWrapper(kind())
        env.reset(seed=0)
        world = env.env.unwrapped.world  # type: ignore[attr-defined]  # of Box2D tasks only
        env.reset()
        assert (env.env.unwrapped.world is world) == kept  # type: ignore[attr-defined]  # as above

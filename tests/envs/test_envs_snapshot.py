"""Snapshots: a restored environment goes on bit for bit, or says that it does not."""

from __future__ import annotations

import json
import random
import warnings
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from helpers.envs import CounterEnv
from helpers.vector_env import VectorEnv
from rl_training.envs import (
    SeedVectorEnv,
    SnapshotWrapper,
    Step,
    make_env,
    mujoco_state,
    snapshot,
)
from rl_training.envs.backends.kinds import Mode
from rl_training.envs.plain import NotPlain, decode, encode
from rl_training.errors import CheckpointError, EnvError

MODULE = CounterEnv.__module__
EXACT = [
    ("CartPole-v1", 2, "sync"),
    ("CartPole-v1", 5, "auto"),
    ("CartPole-v1", 2, "async"),
    ("Pendulum-v1", 2, "sync"),
    ("Pendulum-v1", 2, "async"),
    ("Acrobot-v1", 2, "sync"),
    ("MountainCarContinuous-v0", 2, "sync"),
    ("FrozenLake-v1", 2, "sync"),
    ("Taxi-v4", 2, "sync"),
    ("HalfCheetah-v5", 2, "sync"),
    ("HalfCheetah-v5", 2, "async"),
    ("Hopper-v5", 2, "sync"),
    ("Ant-v5", 2, "sync"),
    ("Ant-v5", 2, "async"),
    ("Humanoid-v5", 1, "sync"),
    ("InvertedPendulum-v5", 2, "sync"),
    (f"{MODULE}:OwnStateEnv", 2, "sync"),
    (f"{MODULE}:OwnStateEnv", 2, "async"),
]
REPLAYED = [
    ("LunarLander-v3", 2, "sync"),
    ("LunarLander-v3", 2, "async"),
    (f"{MODULE}:NoiseEnv", 2, "sync"),
    (f"{MODULE}:CounterEnv", 2, "sync"),
    (f"{MODULE}:ImageEnv", 2, "async"),
]


def require(env_id: str) -> None:
    if env_id.endswith("-v5"):
        pytest.importorskip("mujoco")
    if env_id.startswith("LunarLander"):
        with warnings.catch_warnings():
            message = r"builtin type \w+ has no __module__ attribute"
            warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
            pytest.importorskip("Box2D")


def through_json(state: Any) -> Any:
    """What a checkpoint does: JSON for the structure, arrays beside it; nothing else may occur."""
    arrays: list[Any] = []

    def lower(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            assert value.dtype.kind in "biuf", value.dtype
            arrays.append(value.copy())
            return {"array": len(arrays) - 1}
        if type(value) is dict:
            assert all(type(key) is str for key in value)
            return {key: lower(item) for key, item in value.items()}
        if type(value) is list:
            return [lower(item) for item in value]
        assert value is None or type(value) in (bool, int, float, str), type(value)
        return value

    def lift(value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {"array"}:
                return arrays[value["array"]]
            return {key: lift(item) for key, item in value.items()}
        return [lift(item) for item in value] if isinstance(value, list) else value

    return lift(json.loads(json.dumps(lower(state), allow_nan=False)))


def actions_for(env: VectorEnv, num_steps: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    if env.spec.num_actions is not None:
        return rng.integers(0, env.spec.num_actions, (num_steps, env.num_envs))
    shape = (num_steps, env.num_envs, *env.spec.action_shape)
    return rng.uniform(-1, 1, shape).astype(np.float32)


def assert_same(left: Step, right: Step) -> None:
    for name in ("obs", "reward", "terminated", "truncated", "final_obs"):
        assert getattr(left, name).tobytes() == getattr(right, name).tobytes(), name


def check_continuation(env_id: str, num_envs: int, mode: Mode, level: str) -> None:
    require(env_id)
    run = VectorEnv(env_id, {}, num_envs, seed=1, mode=mode)
    assert run.resume_level == level
    run.reset()
    current = run.reset()  # so that the state does not follow from the seed alone
    for action in actions_for(run, random.Random(env_id).randint(20, 90), seed=0):
        current = run.step(action).obs
    state = through_json(run.snapshot())

    resumed = VectorEnv(env_id, {}, num_envs, seed=2, mode=mode)
    report = resumed.restore(state)
    assert (report.level, report.restarted, report.messages) == (level, [], [])
    assert report.obs.tobytes() == current.tobytes()
    assert resumed.num_steps == run.num_steps
    for action in actions_for(run, 300, seed=1):
        assert_same(run.step(action), resumed.step(action))
    run.close()
    resumed.close()


@pytest.mark.parametrize(("env_id", "num_envs", "mode"), EXACT)
def test_exact_environments_go_on_bit_for_bit(env_id: str, num_envs: int, mode: Mode) -> None:
    check_continuation(env_id, num_envs, mode, "exact")


@pytest.mark.parametrize(("env_id", "num_envs", "mode"), REPLAYED)
def test_replayed_environments_go_on_bit_for_bit(env_id: str, num_envs: int, mode: Mode) -> None:
    check_continuation(env_id, num_envs, mode, "replay")


def test_every_mujoco_task_goes_on_bit_for_bit_from_every_early_step() -> None:
    pytest.importorskip("mujoco")
    for env_id in ("Ant-v5", "Pusher-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5"):
        env, other = (SnapshotWrapper(make_env(env_id)) for _ in range(2))
        env.reset(seed=3)
        env.action_space.seed(0)
        for _ in range(12):
            assert other.restore(through_json(env.snapshot())) is None
            action = env.action_space.sample()
            left, right = env.step(action), other.step(action)
            assert left[0].tobytes() == right[0].tobytes()
            assert left[1:4] == right[1:4]


def test_mujoco_restore_needs_the_lagging_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the derived fields the first reward differs, so the test above can fail."""
    pytest.importorskip("mujoco")
    env, other = (SnapshotWrapper(make_env("Ant-v5")) for _ in range(2))
    env.reset(seed=3)
    action = np.full(8, 0.7, dtype=np.float32)
    for _ in range(20):
        env.step(action)
    state = env.snapshot()
    monkeypatch.setattr(mujoco_state, "_DERIVED", ())
    other.restore(state)
    assert env.step(action)[1] != other.step(action)[1]


def test_taking_a_snapshot_does_not_disturb() -> None:
    for env_id in ("Pendulum-v1", f"{MODULE}:NoiseEnv", f"{MODULE}:OwnStateEnv"):
        watched, plain = (VectorEnv(env_id, {}, 1, seed=0) for _ in range(2))
        watched.reset()
        plain.reset()
        for action in actions_for(plain, 90, seed=0):
            watched.snapshot()
            assert_same(watched.step(action), plain.step(action))


def test_a_snapshot_is_not_changed_by_later_steps() -> None:
    for env_id in ("Pendulum-v1", "CartPole-v1", f"{MODULE}:NoiseEnv"):
        env = VectorEnv(env_id, {}, 4, seed=0)
        env.reset()
        for action in actions_for(env, 5, seed=0):
            env.step(action)
        state = env.snapshot()
        before = repr(state)
        for action in actions_for(env, 50, seed=1):
            env.step(action)
        assert repr(state) == before


def test_a_used_environment_can_be_taken_back() -> None:
    env = VectorEnv("CartPole-v1", {}, 2, seed=0, mode="sync")
    env.reset()
    actions = actions_for(env, 120, seed=0)
    for action in actions[:20]:
        env.step(action)
    state = env.snapshot()
    first = [env.step(action) for action in actions[20:]]
    env.restore(state)
    for step, action in zip(first, actions[20:], strict=True):
        assert_same(step, env.step(action))


def test_sync_and_async_snapshots_are_interchangeable() -> None:
    run = VectorEnv("Pendulum-v1", {}, 2, seed=0, mode="async")
    run.reset()
    actions = actions_for(run, 250, seed=0)
    for action in actions[:10]:
        run.step(action)
    resumed = VectorEnv("Pendulum-v1", {}, 2, seed=9, mode="sync")
    resumed.restore(run.snapshot())
    for action in actions[10:]:
        assert_same(run.step(action), resumed.step(action))
    run.close()


def test_the_time_limit_counter_is_kept() -> None:
    run = VectorEnv("Pendulum-v1", {"max_episode_steps": 10}, 1, seed=0)
    run.reset()
    zero = np.zeros((1, 1), dtype=np.float32)
    for _ in range(7):
        run.step(zero)
    resumed = VectorEnv("Pendulum-v1", {"max_episode_steps": 10}, 1, seed=0)
    resumed.restore(through_json(run.snapshot()))
    assert [bool(resumed.step(zero).truncated[0]) for _ in range(3)] == [False, False, True]


def test_frame_stacks_are_kept() -> None:
    kwargs = {"wrappers": {"pixels": {"frame_stack": 3}}}
    env_id = f"{MODULE}:ImageEnv"
    run, resumed = (VectorEnv(env_id, kwargs, 1, seed=0) for _ in range(2))
    run.reset()
    run.step(np.zeros(1, dtype=np.int64))
    resumed.restore(through_json(run.snapshot()))
    assert resumed.step(np.zeros(1, dtype=np.int64)).final_obs[0, :, 0, 0].tolist() == [0, 10, 20]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_nondeterministic_environment_is_reported_as_restarted(mode: Mode) -> None:
    run = VectorEnv(f"{MODULE}:UnseededEnv", {}, 2, seed=6, mode=mode)
    run.reset()
    for action in actions_for(run, 15, seed=0):
        run.step(action)
    resumed = VectorEnv(f"{MODULE}:UnseededEnv", {}, 2, seed=6, mode=mode)
    report = resumed.restore(through_json(run.snapshot()))
    assert report.level == "restart"
    assert report.restarted == [0, 1]
    assert "index 1, seed 6" in report.messages[1]
    assert "not deterministic" in report.messages[1]
    # The observations are those of new episodes, and the environments are in them.
    assert np.abs(report.obs).max() < 6
    assert resumed.step(actions_for(run, 1, seed=0)[0]).obs.shape == (2, 3)
    run.close()
    resumed.close()


def test_a_replay_longer_than_the_log_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_REPLAY_ACTIONS", 10)
    run = VectorEnv(f"{MODULE}:NoiseEnv", {}, 1, seed=0)
    run.reset()
    actions = actions_for(run, 50, seed=0)
    for action in actions[:10]:
        run.step(action)
    assert run.snapshot()["level"] == "replay"
    run.step(actions[10])
    state = run.snapshot()
    assert state["level"] == run.resume_level == "restart"
    report = VectorEnv(f"{MODULE}:NoiseEnv", {}, 1, seed=0).restore(state)
    assert (report.level, report.restarted) == ("restart", [0])
    for action in actions[11:]:
        run.step(action)
    assert run.snapshot()["level"] == "replay", "a new episode starts a new log"


def test_only_the_replay_family_records_actions() -> None:
    env = SnapshotWrapper(make_env("Pendulum-v1"))
    assert (env.family, env._log, env.resume_level) == ("attributes", None, "exact")
    env = SnapshotWrapper(make_env(f"{MODULE}:NoiseEnv"))
    assert (env.family, env.resume_level) == ("replay", "replay")
    assert env._log is not None


def test_a_wrapper_with_hidden_state_is_not_called_exact() -> None:
    class Hiding(gym.Wrapper[Any, Any, Any, Any]):
        def __init__(self, env: gym.Env[Any, Any]) -> None:
            super().__init__(env)
            self.secret = iter(range(10))

    assert SnapshotWrapper(Hiding(make_env("Pendulum-v1"))).resume_level == "replay"


def test_own_state_that_is_not_plain_is_refused() -> None:
    env = VectorEnv(f"{MODULE}:BadOwnStateEnv", {}, 1, seed=0)
    env.reset()
    with pytest.raises(EnvError, match=r"BadOwnStateEnv.get_state\(\) must return a dict"):
        env.snapshot()


@pytest.mark.parametrize(
    ("env_id", "num_envs", "kwargs", "message"),
    [
        ("Acrobot-v1", 2, {}, "env_id is 'CartPole-v1', but this run has 'Acrobot-v1'"),
        ("CartPole-v1", 3, {}, "num_envs is 2, but this run has 3"),
    ],
)
def test_a_snapshot_of_something_else_is_refused(
    env_id: str, num_envs: int, kwargs: dict[str, Any], message: str
) -> None:
    run = VectorEnv("CartPole-v1", {}, 2, seed=0)
    run.reset()
    with pytest.raises(CheckpointError, match=message):
        VectorEnv(env_id, kwargs, num_envs, seed=0).restore(run.snapshot())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_snapshot_with_other_wrappers_is_refused(mode: Any) -> None:
    run = VectorEnv(f"{MODULE}:OwnStateEnv", {}, 2, seed=0)
    run.reset()
    limited = VectorEnv(f"{MODULE}:OwnStateEnv", {"max_episode_steps": 5}, 2, seed=0, mode=mode)
    with pytest.raises(CheckpointError, match="wrappers are"):
        limited.restore(run.snapshot())
    limited.close()


def test_a_snapshot_from_before_rewards_were_transformed_outside_can_be_restored() -> None:
    kwargs = {"wrappers": {"reward_scale": 2.0}}
    run, resumed = (VectorEnv("Pendulum-v1", kwargs, 1, seed=seed) for seed in (0, 1))
    run.reset()
    action = np.zeros((1, 1), np.float32)
    run.step(action)
    state = through_json(run.snapshot())
    for env in state["envs"]:
        own = {f"{int(key[0]) + 1}{key[1:]}": value for key, value in env["wrappers"].items()}
        env["wrappers"] = {"0:RewardTransform": {"_scale": 2.0}, **own}
    assert resumed.restore(state).restarted == []
    assert_same(run.step(action), resumed.step(action))


def test_seeds_side_by_side_are_restored_together() -> None:
    run, resumed = (SeedVectorEnv.make("Pendulum-v1", {}, 2, [3, 4]) for _ in range(2))
    run.reset()
    rng = np.random.default_rng(0)
    for _ in range(9):
        step = run.step(rng.uniform(-1, 1, (2, 2, 1)).astype(np.float32))
    state = run.snapshot()
    assert list(state) == ["per_seed"]
    report = resumed.restore(through_json(state))
    assert (report.level, report.restarted) == ("exact", [])
    assert np.array_equal(report.obs, step.obs)
    action = rng.uniform(-1, 1, (2, 2, 1)).astype(np.float32)
    assert_same(run.step(action), resumed.step(action))
    with pytest.raises(CheckpointError, match="it holds 2 seeds, but this run has 1"):
        SeedVectorEnv.make("Pendulum-v1", {}, 2, [3]).restore(state)


def test_restarted_indices_count_through_the_seeds() -> None:
    run, resumed = (SeedVectorEnv.make(f"{MODULE}:UnseededEnv", {}, 2, [0, 1]) for _ in range(2))
    run.reset()
    run.step(np.zeros((2, 2, 2), dtype=np.float32))
    assert resumed.restore(run.snapshot()).restarted == [0, 1, 2, 3]


def test_plain_state_round_trips_with_types() -> None:
    generator = np.random.Generator(np.random.MT19937(3))
    value = {
        "tuple": (1, 2.5, None, True),
        "deque": deque([np.arange(3)], maxlen=4),
        "keys": {1: "a", (2, 3): "b"},
        "big": 2**200,
        "inf": float("inf"),
        "scalar": np.float32(0.1),
        "text": np.array([[b"S", b"F"]]),
    }
    back = decode(through_json(encode(value)))
    assert back["tuple"] == value["tuple"]
    assert back["deque"].maxlen == 4
    assert back["deque"][0].tolist() == [0, 1, 2]
    assert back["keys"] == value["keys"]
    assert (back["big"], back["inf"]) == (2**200, float("inf"))
    assert type(back["scalar"]) is np.float32
    assert back["text"].dtype == "S1"
    assert back["text"].tolist() == [[b"S", b"F"]]
    copy = decode(through_json(encode(generator)))
    assert copy.normal(size=5).tolist() == generator.normal(size=5).tolist()
    with pytest.raises(NotPlain):
        encode({"a": object()})

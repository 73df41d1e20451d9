"""MuJoCo tasks stepped all at once: the bits of Gymnasium's classes, resets included."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("mujoco.batch")

from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

from helpers.steps import random_actions, same_steps
from helpers.tiny import run_cli, tiny_config, write_tiny
from rl_training.envs import SeedVectorEnv, env_seed, make_env
from rl_training.envs.backends import kinds, mujoco_batch, mujoco_simulations
from rl_training.envs.backends.classic import MaskedCartPole
from rl_training.envs.backends.kinds import Mode, SyncEnvs
from rl_training.envs.backends.mujoco_batch import MujocoBatch
from rl_training.envs.backends.mujoco_simulations import SimulationError
from rl_training.envs.spec import Array
from rl_training.errors import CheckpointError, ConfigError, EnvError
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training

pytestmark = pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")

NAMES = (
    "Ant",
    "HalfCheetah",
    "Hopper",
    "Humanoid",
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
)
# Gymnasium refuses Pusher-v4 with MuJoCo 3.
TASKS = [f"{name}-v{version}" for name in NAMES for version in (4, 5)]
TASKS.remove("Pusher-v4")
VARIATIONS: list[tuple[str, dict[str, Any]]] = [
    ("HalfCheetah-v5", {"frame_skip": 2, "forward_reward_weight": 3, "ctrl_cost_weight": 0.3}),
    ("HalfCheetah-v4", {"exclude_current_positions_from_observation": False}),
    ("HalfCheetah-v5", {"reset_noise_scale": 0.4, "max_episode_steps": 7}),
    ("Hopper-v5", {"terminate_when_unhealthy": False, "healthy_reward": 2.5}),
    ("Hopper-v4", {"terminate_when_unhealthy": False, "healthy_z_range": [1.2, 1.3]}),
    ("Hopper-v5", {"healthy_state_range": [-1.0, 1.0], "healthy_angle_range": [-0.1, 0.05]}),
    ("Walker2d-v5", {"xml_file": "walker2d.xml", "healthy_z_range": [1.1, 1.4]}),
    ("Walker2d-v4", {"exclude_current_positions_from_observation": False}),
    ("Swimmer-v5", {"exclude_current_positions_from_observation": False, "frame_skip": 1}),
    ("Ant-v4", {"use_contact_forces": True, "contact_force_range": [-0.4, 0.3]}),
    ("Ant-v5", {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.01}),
    ("Ant-v5", {"main_body": "front_left_leg", "healthy_z_range": [0.5, 0.8]}),
    ("Ant-v5", {"exclude_current_positions_from_observation": False}),
    ("Humanoid-v5", {"include_cinert_in_observation": False, "contact_cost_range": [0.0, 1e-3]}),
    ("Humanoid-v5", {"include_cvel_in_observation": False, "contact_cost_weight": 1e-3}),
    ("Humanoid-v5", {"include_cfrc_ext_in_observation": False}),
    ("Humanoid-v5", {"include_qfrc_actuator_in_observation": False, "reset_noise_scale": 0.05}),
    ("Humanoid-v4", {"exclude_current_positions_from_observation": False}),
    ("HumanoidStandup-v5", {"uph_cost_weight": 2, "impact_cost_range": [0.0, 0.5]}),
    ("Reacher-v5", {"reward_dist_weight": 2.5, "reward_control_weight": 0.3}),
    ("Pusher-v5", {"reward_near_weight": 1.5, "reward_control_weight": 0.7}),
    ("InvertedPendulum-v5", {"reset_noise_scale": 0.1}),
    ("InvertedDoublePendulum-v5", {"healthy_reward": 3, "reset_noise_scale": 0.3}),
]


def native(env_id: str, kwargs: dict[str, Any], n: int, seeds: tuple[int, ...]) -> SeedVectorEnv:
    envs = SeedVectorEnv.make(env_id, kwargs, n, seeds, "native")
    assert isinstance(envs.backend, MujocoBatch)
    return envs


class FloatRewards:
    """Notes the float64 rewards, which the environments give as float32."""

    def __init__(self, envs: SeedVectorEnv) -> None:
        assert isinstance(envs.backend, MujocoBatch)
        self._task = envs.backend._task
        self._outcome = self._task.outcome
        self.last: Array = np.zeros(0)
        self._task.outcome = self.outcome  # type: ignore[method-assign]  # to listen

    def outcome(self, before: Array, actions: Array) -> tuple[Array, Array]:
        reward, terminated = self._outcome(before, actions)
        self.last = reward.copy()
        return reward, terminated

    def observations(self) -> Array:
        return self._task.observe(slice(None), np.float64)


def compare_with_gymnasium(env_id: str, kwargs: dict[str, Any], num_steps: int, n: int = 2) -> int:
    """Step n environments of two seeds both ways; returns the number of resets."""
    seeds = (3, 5)
    envs = native(env_id, kwargs, n, seeds)
    single = [make_env(env_id, kwargs) for _ in range(2 * n)]
    numbers = FloatRewards(envs)
    lane_seeds = [env_seed(seed, i) for seed in seeds for i in range(n)]
    envs.reset()
    first = [env.reset(seed=seed)[0] for env, seed in zip(single, lane_seeds, strict=True)]
    assert np.array_equal(numbers.observations(), np.stack(first))
    rng = np.random.default_rng(0)
    num_resets = 0
    for _ in range(num_steps):
        # Small actions as well: some tasks then live longer.
        actions = rng.uniform(-1, 1, (2, n, *envs.spec.action_shape)) * rng.choice([0.1, 1.0])
        step = envs.step(actions.astype(np.float32))
        taken = envs.spec.scale_action(actions.astype(np.float32)).reshape(2 * n, -1)
        current = numbers.observations()
        for lane, (env, action) in enumerate(zip(single, taken, strict=True)):
            obs, reward, terminated, truncated, _ = env.step(action)
            at = divmod(lane, n)
            assert float(reward) == float(numbers.last[lane])
            assert step.reward[at] == np.float32(reward)
            assert (step.terminated[at], step.truncated[at]) == (terminated, truncated)
            assert np.array_equal(step.final_obs[at], obs.astype(np.float32))
            if terminated or truncated:
                num_resets += 1
                obs, _ = env.reset()
            assert np.array_equal(current[lane], obs)
            assert np.array_equal(step.obs[at], obs.astype(np.float32))
    return num_resets


@pytest.mark.parametrize("env_id", TASKS)
def test_a_task_is_bit_equal_to_gymnasiums_class(env_id: str) -> None:
    num_resets = compare_with_gymnasium(env_id, {"max_episode_steps": 35}, 80)
    assert num_resets >= 8, "both kinds of ends"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("env_id", TASKS)
def test_a_task_is_bit_equal_over_100_000_steps(env_id: str) -> None:
    assert compare_with_gymnasium(env_id, {}, 25_000) >= 50


@pytest.mark.parametrize(("env_id", "kwargs"), VARIATIONS)
def test_keywords_of_the_class_are_followed(env_id: str, kwargs: dict[str, Any]) -> None:
    compare_with_gymnasium(env_id, {"max_episode_steps": 15} | kwargs, 25, n=1)


def test_a_model_of_ones_own_is_simulated(tmp_path: Path) -> None:
    original = Path(gym.__file__).parent / "envs" / "mujoco" / "assets" / "hopper.xml"
    heavier = tmp_path / "heavy_hopper.xml"
    heavier.write_text(original.read_text().replace('friction="2.0"', 'friction="0.3"'))
    assert heavier.read_text() != original.read_text()
    compare_with_gymnasium("Hopper-v5", {"xml_file": str(heavier)}, 60, n=1)


def test_the_number_of_threads_changes_nothing() -> None:
    many = [SeedVectorEnv.make("Ant-v5", {}, 3, (0, 1), threads=threads) for threads in (1, 2, 5)]
    assert [envs.backend.threads for envs in many if isinstance(envs.backend, MujocoBatch)] == [
        1,
        2,
        5,
    ]
    first = [envs.reset() for envs in many]
    assert all(np.array_equal(first[0], other) for other in first)
    for actions in random_actions(many[0].spec, (20, 2, 3)):
        steps = [envs.step(actions) for envs in many]
        assert all(same_steps(steps[0], other) for other in steps)


def test_threads_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    envs = SeedVectorEnv.make("Humanoid-v5", {}, 8)
    assert "8 environments run in vector_mode native: all at once on 3 threads" in str(envs.note)
    small = SeedVectorEnv.make("InvertedPendulum-v5", {}, 2, threads=2)
    assert "on 2 threads" in str(small.note), "as asked"
    alone = SeedVectorEnv.make("InvertedPendulum-v5", {}, 1)
    assert "1 environment runs in vector_mode native: all at once on one thread" in str(alone.note)


def test_seeds_do_not_influence_each_other() -> None:
    together = native("Hopper-v5", {}, 2, (7, 1, 4))
    alone = [native("Hopper-v5", {}, 2, (seed,)) for seed in (7, 1, 4)]
    start = together.reset()
    assert np.array_equal(start, np.concatenate([envs.reset() for envs in alone]))
    for actions in random_actions(together.spec, (60, 3, 2)):
        step = together.step(actions)
        for index, envs in enumerate(alone):
            one = envs.step(actions[index : index + 1])
            assert np.array_equal(step.obs[index], one.obs[0])
            assert np.array_equal(step.reward[index], one.reward[0])
    again = together.reset()
    assert np.array_equal(again, np.concatenate([envs.reset() for envs in alone])), "generators"
    assert not np.array_equal(again, start)
    assert np.array_equal(together.reset([7, 1, 4]), start), "seeded again"


def test_time_limits_truncate_and_do_not_terminate() -> None:
    envs = native("HalfCheetah-v5", {"max_episode_steps": 3}, 2, (0,))
    envs.reset()
    for t in range(1, 10):
        step = envs.step(np.zeros((1, 2, 6), np.float32))
        assert step.truncated.tolist() == [[t % 3 == 0] * 2]
        assert not step.terminated.any()
        assert np.array_equal(step.final_obs, step.obs) == (t % 3 != 0)


def test_what_is_given_belongs_to_the_receiver() -> None:
    envs = native("Hopper-v5", {}, 3, (0,))
    obs = envs.reset()
    kept = obs.copy()
    steps, copies = [], []
    for actions in random_actions(envs.spec, (60, 1, 3)):
        steps.append(envs.step(actions))
        copies.append([array.copy() for array in steps[-1]])
    assert np.array_equal(obs, kept)
    for step, copy in zip(steps, copies, strict=True):
        assert all(np.array_equal(left, right) for left, right in zip(step, copy, strict=True))


def test_arrays_outlive_the_simulations() -> None:
    envs = native("InvertedPendulum-v5", {}, 2, (0,))
    envs.reset()
    assert isinstance(envs.backend, MujocoBatch)
    qpos = envs.backend._task.qpos
    kept = qpos.copy()
    envs.close()
    envs.close()
    del envs
    gc.collect()
    assert np.array_equal(qpos, kept)


# Snapshots


@pytest.mark.parametrize(("first", "second"), [("native", "sync"), ("sync", "native")])
@pytest.mark.parametrize(
    "env_id", ["Ant-v5", "HalfCheetah-v5", "Humanoid-v4", "Pusher-v5", "Reacher-v4", "Hopper-v4"]
)
def test_a_snapshot_goes_on_bit_for_bit_in_either_mode(
    env_id: str, first: Mode, second: Mode
) -> None:
    kwargs = {"max_episode_steps": 22}
    envs = SeedVectorEnv.make(env_id, kwargs, 2, (0, 9), first)
    envs.reset()
    actions = random_actions(envs.spec, (60, 2, 2))
    for action in actions[:30]:
        envs.step(action)
    state = envs.snapshot()
    expected = [envs.step(action) for action in actions[30:]]
    modes: list[Mode] = [first, second]
    for mode in modes:
        other = SeedVectorEnv.make(env_id, kwargs, 2, (0, 9), mode)
        report = other.restore(state)
        assert report.level == "exact"
        assert np.array_equal(report.obs, other.backend.observations())
        assert not compare_states(other.snapshot(), state), "nothing was lost"
        steps = [other.step(action) for action in actions[30:]]
        assert all(same_steps(left, right) for left, right in zip(steps, expected, strict=True))
        assert other.num_steps(0) == 60


@pytest.mark.parametrize("env_id", ["Ant-v4", "Humanoid-v5", "Pusher-v5", "Reacher-v5"])
@pytest.mark.parametrize("num_steps", [0, 1, 17])
def test_snapshots_are_those_of_environments_run_one_by_one(env_id: str, num_steps: int) -> None:
    kwargs = {"max_episode_steps": 10}
    pair = [SeedVectorEnv.make(env_id, kwargs, 2, (2,), mode) for mode in ("native", "sync")]
    for envs in pair:
        envs.reset()
    for action in random_actions(pair[0].spec, (num_steps, 1, 2)):
        for envs in pair:
            envs.step(action)
    assert not compare_states(pair[0].snapshot(), pair[1].snapshot())


def test_a_snapshot_without_a_time_limit_is_exact() -> None:
    name = f"{HopperEnv.__module__}:HopperEnv"
    pair = [SeedVectorEnv.make(name, {}, 2, (2,), mode) for mode in ("auto", "sync")]
    assert isinstance(pair[0].backend, MujocoBatch)
    for envs in pair:
        envs.reset()
    actions = random_actions(pair[0].spec, (6, 1, 2))
    for action in actions[:3]:
        steps = [envs.step(action) for envs in pair]
    state = pair[1].snapshot()
    assert not compare_states(pair[0].snapshot(), state)
    pair[0].restore(state)
    for action in actions[3:]:
        steps = [envs.step(action) for envs in pair]
        assert same_steps(*steps)
        assert not steps[0].truncated.any()


def test_a_snapshot_of_another_task_is_refused() -> None:
    walker = native("Walker2d-v5", {}, 1, (0,))
    walker.reset()
    state = walker.snapshot()
    with pytest.raises(CheckpointError, match=r"env_id is 'Walker2d-v5'.*'Hopper-v5'"):
        native("Hopper-v5", {}, 1, (0,)).restore(state)


# Which way is taken


class Faster(HopperEnv):
    """A class of one's own."""


class NoReward(gym.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, 0.0, terminated, truncated, info


@pytest.mark.parametrize("mode", ["auto", "native"])
@pytest.mark.parametrize("wrappers", [None, {}, {"reward_scale": 0.5, "clip_reward": True}])
def test_auto_and_native_take_it(mode: Mode, wrappers: dict[str, Any] | None) -> None:
    kwargs = {} if wrappers is None else {"wrappers": wrappers}
    envs = SeedVectorEnv.make("InvertedPendulum-v5", kwargs, 1, (0,), mode)
    assert isinstance(envs.backend, MujocoBatch)
    envs.reset()
    step = envs.step(np.zeros((1, 1, 1), np.float32))
    assert step.task_reward.tolist() == [[1.0]]
    assert step.reward.tolist() == [[0.5 if wrappers else 1.0]]


def test_other_modes_are_as_they_were() -> None:
    assert isinstance(SeedVectorEnv.make("HalfCheetah-v5", mode="sync").backend, SyncEnvs)
    assert isinstance(SeedVectorEnv.make("Pendulum-v1", mode="auto").backend, SyncEnvs)
    for count in (1, 5):
        envs = SeedVectorEnv.make("CartPole-v1", {}, count, mode="native")
        assert isinstance(envs.backend, MaskedCartPole)
        assert "native: all at once as arrays" in str(envs.note)


@pytest.fixture
def wrapped_id() -> str:
    name = "rl_training_tests/WrappedCheetah-v0"
    if name not in gym.registry:
        gym.register(
            name,
            entry_point="gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv",
            max_episode_steps=9,
            additional_wrappers=(NoReward.wrapper_spec(),),
        )
    return name


def refusal(env_id: str, kwargs: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        SeedVectorEnv.make(env_id, kwargs, 2, (0,), "native")
    return str(caught.value)


def test_native_says_why_it_cannot_be_had(wrapped_id: str) -> None:
    advice = "; use vector_mode auto, which takes what there is, or sync, async or ray"
    only = "only CartPole, Atari games and Gymnasium's own MuJoCo classes have a native version"
    own = f"{Faster.__module__}:Faster"
    assert refusal(own, {}) == (
        f"vector_mode native cannot run {own}: {only}, and its class is {own}{advice}"
    )
    assert f"{only}, and its class is gymnasium.envs.classic_control.pendulum" in refusal(
        "Pendulum-v1", {}
    )
    assert "of its env_kwargs, only max_episode_steps is possible there" in refusal(
        "CartPole-v1", {"sutton_barto_reward": True}
    )
    assert refusal(wrapped_id, {}).endswith(f"it is wrapped in NoReward{advice}")
    envs = SeedVectorEnv.make(wrapped_id, {}, 2)
    assert isinstance(envs.backend, SyncEnvs), "auto takes what there is"
    assert "sync: one after another, because it is wrapped in NoReward" in str(envs.note)
    envs.close()


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"render_mode": "rgb_array"}, "env_kwargs.render_mode is 'rgb_array'"),
        ({"wrappers": {"pixels": {}}}, "env_kwargs.wrappers.pixels asks for images"),
    ],
)
def test_images_are_not_native(kwargs: dict[str, Any], reason: str) -> None:
    assert mujoco_batch.why_not_native(kwargs) == reason


def test_a_mujoco_without_batches_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mujoco_simulations._SIGNATURES, "mjb_notThere", (None, []))
    mujoco_simulations._library.cache_clear()
    mujoco_simulations.why_unavailable.cache_clear()
    try:
        message = refusal("Hopper-v5", {})
        assert "has no mujoco.batch, which 3.17 and newer have; run: pip install" in message
        assert isinstance(SeedVectorEnv.make("Hopper-v5").backend, SyncEnvs)
    finally:
        mujoco_simulations._library.cache_clear()
        mujoco_simulations.why_unavailable.cache_clear()


def test_an_unknown_keyword_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"env_kwargs.frameskip .* is not an argument"):
        SeedVectorEnv.make("HalfCheetah-v4", {"frameskip": 3}, 2, (0,), "native")


def test_a_failed_simulation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = native("Hopper-v5", {}, 2, (4, 8))
    envs.reset()

    def fail(num_substeps: int) -> None:
        raise SimulationError(3, f"no memory in {num_substeps}")

    assert isinstance(envs.backend, MujocoBatch)
    monkeypatch.setattr(envs.backend._simulations, "step", fail)
    with pytest.raises(EnvError, match=r"Hopper-v5 \(index 1, seed 8\) failed .*no memory in 4"):
        envs.step(np.zeros((2, 2, 3), np.float32))


# Whole runs


class Messages(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, state: Any, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("first", ["one by one", "at once"])
def test_a_run_goes_on_where_its_mode_has_changed(
    tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run under `auto` may have begun before there was a native version, or end without one."""
    changes: dict[str, Any] = {"env_id": "HalfCheetah-v5", "num_envs": 2, "env_threads": 1}
    messages = Messages()
    whole = train(tiny_config("sac", tmp_path, run_name="whole", **changes), callbacks=[messages])
    way = "2 environments run in vector_mode native: all at once on one thread of mujoco.batch"
    assert way in messages.texts
    with monkeypatch.context() as patch:
        if first == "one by one":
            patch.setattr(kinds, "why_not_native", lambda *_: "there was none then")
        cut = train(tiny_config("sac", tmp_path, run_name="cut", **changes), stop_at=40)
    messages = Messages()
    with monkeypatch.context() as patch:
        if first == "at once":
            patch.setattr(kinds, "why_not_native", lambda *_: "another machine")
        resumed = resume_training(cut.run_dir, callbacks=[messages])
    assert any("vector_mode sync" in text for text in messages.texts) == (first == "at once")
    states = [load_checkpoint(result.checkpoint_path).states for result in (whole, resumed)]
    assert not compare_states(*states)


def test_evaluation_is_native() -> None:
    evaluator = Evaluator("HalfCheetah-v5", {}, (0, 1), threads=1)
    envs = evaluator._environments(3)
    assert isinstance(envs.backend, MujocoBatch)
    assert envs.backend.observations().shape[:2] == (2, 3), "all seeds in one batch"
    evaluator.close()


def test_the_command_line_trains_evaluates_and_refuses(tmp_path: Path) -> None:
    config = write_tiny(tmp_path, "ppo", env_id="Hopper-v5", num_envs=2, vector_mode="native")
    run = run_cli("train", "--config", config)
    assert run.code == 0, run.err
    assert "vector_mode native" in run.out + run.err
    assert run_cli("eval", "--checkpoint", run.values["run_dir"], "--episodes", 2).code == 0
    refused = run_cli("train", "--config", config, "--set", "env_id=Pendulum-v1").sentence()
    assert refused.startswith("vector_mode native cannot run Pendulum-v1: only CartPole")

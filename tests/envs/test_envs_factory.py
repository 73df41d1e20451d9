"""The factory, the contract check and `EnvSpec`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.envs import CounterEnv, SpacesEnv
from rl_training.envs import EnvSpec, make_env, probe_env
from rl_training.errors import ConfigError, EnvError, MissingExtraError, SpecMismatch

MODULE = CounterEnv.__module__


def test_an_unknown_id_suggests_near_ones() -> None:
    with pytest.raises(
        EnvError, match=r"'cartpole-v1' is not registered.*did you mean CartPole-v1"
    ):
        make_env("cartpole-v1")
    with pytest.raises(EnvError, match=r"did you mean .*HalfCheetah-v5"):
        make_env("HalfCheeta-v5")


def test_a_wrong_module_or_attribute_is_named() -> None:
    with pytest.raises(EnvError, match=r"module 'no_such_module' cannot be imported"):
        make_env("no_such_module:Env")
    with pytest.raises(EnvError, match=r"no attribute 'CounterEnw'.*did you mean CounterEnv"):
        make_env(f"{MODULE}:CounterEnw")


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(
    ("env_id", "what"),
    [
        ("os:mkdir", "a builtin_function_or_method"),
        ("os:system", "a builtin_function_or_method"),
        ("subprocess:Popen", "the class Popen"),
        (f"{MODULE}:make_counter", "a function"),
        (f"{MODULE}:make_nothing", "a function"),
        (f"{MODULE}:MODULE_LEVEL", "a str"),
    ],
)
def test_what_is_not_a_class_of_environments_is_not_called(
    env_id: str, what: str, pixels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.MODULE_LEVEL", "text", raising=False)
    target = tmp_path / "made"
    arguments: dict[str, dict[str, Any]] = {
        "os:mkdir": {"path": str(target)},
        "os:system": {"command": f"touch {target}"},
        "subprocess:Popen": {"args": ["touch", str(target)]},
    }
    kwargs = arguments.get(env_id, {}) | ({"wrappers": {"pixels": {}}} if pixels else {})
    with pytest.raises(EnvError, match=rf"{env_id} is {what}, not a subclass of gymnasium.Env"):
        make_env(env_id, kwargs)
    assert not target.exists()


@pytest.mark.parametrize("module", ["", ".helpers", "helpers..envs", "a/b", "../x", "os;x", "a b"])
def test_a_module_that_is_no_dotted_name_is_not_imported(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr("rl_training.envs.factory.importlib.import_module", imported.append)
    with pytest.raises(EnvError, match="is not the name of a module"):
        make_env(f"{module}:CounterEnv")
    assert imported == []


@pytest.mark.parametrize("name", ["CounterEnv", "TestCounter-v0"])
def test_own_classes_and_registered_ids_can_be_named_by_module(name: str) -> None:
    env = make_env(f"{MODULE}:{name}", {"length": 7})
    assert isinstance(env.unwrapped, CounterEnv)
    assert env.unwrapped.length == 7


@pytest.mark.parametrize("env_id", ["CartPole-v1", f"{MODULE}:CounterEnv"])
def test_max_episode_steps_truncates(env_id: str) -> None:
    env = make_env(env_id, {"max_episode_steps": 2})
    env.reset(seed=0)
    assert [env.step(1)[3] for _ in range(2)] == [False, True]
    assert EnvSpec.from_env(env, env_id).max_episode_steps == 2


def test_limits_and_thresholds_come_from_the_registry() -> None:
    spec = probe_env("CartPole-v1")
    assert (spec.max_episode_steps, spec.reward_threshold) == (500, 475.0)
    assert probe_env(f"{MODULE}:TestCounter-v0").max_episode_steps == 2


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("Pendulum-v1", {"gravity": 1}, r"env_kwargs.gravity .*not an argument of Pendulum-v1.* g"),
        ("Pendulum-v1", {"g": 9.81, "foo": 3}, r"env_kwargs.foo \(value 3\) is not an argument"),
        ("Pendulum-v1", {"g": 9.81, "id": "x"}, r"env_kwargs.id .*not an argument of Pendulum-v1"),
        (f"{MODULE}:CounterEnv", {"lenght": 3}, r"env_kwargs.lenght .*it takes length, terminated"),
        ("CartPole-v1", {"max_episode_steps": 0}, "max_episode_steps .* integer >= 1, got 0"),
        ("CartPole-v1", {"wrappers": 3}, r"env_kwargs.wrappers of CartPole-v1 .*mapping, got 3"),
        ("CartPole-v1", {"wrappers": "pixels"}, r"or a mapping, got 'pixels'; allowed keys are ch"),
        ("CartPole-v1", {"wrappers": {"pixel": {}}}, r"wrappers.pixel .*allowed keys are chain"),
        (
            "ALE/Pong-v5",
            {"wrappers": {"atari": {"frameskip": 2}}},
            r"atari\.frameskip .*did you mean frame_skip\?\); allowed keys are noop_max",
        ),
        ("CartPole-v1", {"wrappers": {"pixels": {"frame_stack": 0}}}, r"pixels.frame_stack"),
        ("CartPole-v1", {"wrappers": {"atari": {}}}, "atari .*games named ALE"),
    ],
)
def test_bad_env_kwargs_are_named(env_id: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_env(env_id, kwargs)


@pytest.mark.parametrize(
    ("env_id", "extra"), [("Hopper-v5", "mujoco"), ("LunarLander-v3", "box2d")]
)
def test_a_missing_extra_is_named(env_id: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise gym.error.DependencyNotInstalled("it is not installed")

    monkeypatch.setattr(gym, "make", missing)
    with pytest.raises(MissingExtraError, match=rf'pip install "rl-training\[{extra}\]"'):
        make_env(env_id)


def test_atari_without_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "rl-training\[atari\]"'):
        make_env("ALE/Pong-v5")


def test_mujoco_leaves_no_log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mujoco = pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    handler = mujoco.get_mju_user_warning()  # dm_control sets one when it is imported
    make_env("HalfCheetah-v5").close()
    assert list(tmp_path.iterdir()) == []
    assert mujoco.get_mju_user_warning() is handler


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reset_gives_obs_only", r"reset must return \(obs, info\)"),
        ("reset_raises", "reset raised RuntimeError: no reset today"),
        ("four_values", r"step must return .* got a tuple of length 4"),
        ("wrong_dtype", "shape .* and dtype float64, but its observation space says .* float32"),
        ("wrong_shape", r"has shape \(1,\)"),
        ("nan_obs", "the observation of step is not finite"),
        ("nan_reward", "reward of step must be one finite number, got nan"),
        ("reward_is_none", "reward of step must be one finite number, got None"),
        ("huge_reward", r"reward 1e\+39 is larger than float32 can hold"),
        ("flag_is_int", "terminated must be a bool, got 0"),
        ("raises", r"step\(\d\) raised RuntimeError: 100% broken"),
    ],
)
def test_a_broken_contract_is_found_at_creation(fault: str, message: str) -> None:
    with pytest.raises(EnvError, match=message) as caught:
        probe_env(f"{MODULE}:BrokenEnv", {"fault": fault})
    assert "BrokenEnv" in str(caught.value)


def test_a_wrapper_that_cannot_unpack_a_step_does_not_hide_what_is_wrong_with_it() -> None:
    with pytest.raises(EnvError, match=r"step must return .* got a tuple of length 4"):
        probe_env(f"{MODULE}:BrokenEnv", {"fault": "four_values", "max_episode_steps": 9})


BOX = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        (spaces.Tuple((BOX, BOX)), None),
        (spaces.MultiDiscrete([2, 2]), None),
        (spaces.MultiBinary(3), None),
        (spaces.Dict({"a": BOX}), None),
        (spaces.Discrete(3), None),
        (None, spaces.Text(3)),
        (None, spaces.Tuple((BOX, BOX))),
        (None, spaces.Dict({"a": BOX})),
        (None, spaces.Box(0, 3, (2,), np.int64)),
    ],
)
def test_spaces_that_no_learner_takes_are_refused(observation: Any, action: Any) -> None:
    kind = "observation" if observation is not None else "action"
    with pytest.raises(SpecMismatch, match=rf"environment mine: {kind} space .* cannot be used"):
        EnvSpec.from_env(SpacesEnv(observation, action), "mine")


def test_discrete_observations_become_one_hot() -> None:
    env = make_env("FrozenLake-v1", {"is_slippery": False})
    spec = probe_env("FrozenLake-v1", {"is_slippery": False})
    assert (spec.obs_shape, spec.obs_dtype) == ((16,), "float32")
    assert np.flatnonzero(env.reset(seed=0)[0]).tolist() == [0]
    assert np.flatnonzero(env.step(2)[0]).tolist() == [1]


def test_a_dict_of_boxes_is_flattened() -> None:
    assert probe_env(f"{MODULE}:DictEnv").obs_shape == (4,)
    assert make_env(f"{MODULE}:DictEnv").reset()[0].tolist() == [1, 0, 2, 1]


def test_a_spec_survives_json() -> None:
    for env_id in ("CartPole-v1", "Pendulum-v1", f"{MODULE}:NoiseEnv"):
        spec = probe_env(env_id)
        assert EnvSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValueError, match="extra"):
        EnvSpec.model_validate({**spec.model_dump(), "colour": "red"})


def test_dimensions_of_a_spec() -> None:
    cartpole, pendulum = probe_env("CartPole-v1"), probe_env("Pendulum-v1")
    assert (cartpole.obs_dim, cartpole.action_dim, cartpole.num_actions) == (4, 2, 2)
    assert (pendulum.obs_dim, pendulum.action_dim, pendulum.num_actions) == (3, 1, None)


def box_spec(low: Any, high: Any, dtype: Any = np.float32) -> EnvSpec:
    space = spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
    return EnvSpec.from_env(SpacesEnv(None, space), "mine")


def test_action_scaling_hits_the_bounds_exactly() -> None:
    rng = np.random.default_rng(0)
    low = rng.normal(size=200).astype(np.float32)
    high = (low + rng.exponential(size=200)).astype(np.float32)
    spec = box_spec(low, high)
    ones = np.ones(200, dtype=np.float32)
    assert np.array_equal(spec.scale_action(ones), high)
    assert np.array_equal(spec.scale_action(-ones), low)
    assert spec.scale_action(ones).dtype == np.float32
    inside = spec.scale_action(rng.uniform(-1, 1, (50, 200)).astype(np.float32))
    assert ((inside >= low) & (inside <= high)).all()
    assert np.array_equal(spec.scale_action(9 * ones), high), "clipped to the box"


@pytest.mark.parametrize(("low", "high"), [([-2.0], [2.0]), ([0.0], [5.0])])
def test_action_scaling_is_affine_and_undone_by_unscaling(
    low: list[float], high: list[float]
) -> None:
    spec = box_spec(low, high)
    unit = np.array([[-1.0], [-0.5], [0.0], [0.25]], dtype=np.float32)
    expected = low[0] + (unit + 1) / 2 * (high[0] - low[0])
    assert np.allclose(spec.scale_action(unit), expected, atol=1e-6)
    assert np.allclose(spec.unscale_action(spec.scale_action(unit)), unit, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "entry"),
    [
        ([-np.inf, -np.inf], [np.inf, np.inf], 0),
        ([-1.0, 0.0], [1.0, np.inf], 1),
        ([-1.0, -np.inf], [1.0, 2.0], 1),
        ([-3.4028235e38, 0.0], [3.4028235e38, 1.0], 0),
    ],
    ids=["open", "open above", "open below", "largest float"],
)
def test_actions_without_finite_bounds_are_refused(
    low: list[float], high: list[float], entry: int
) -> None:
    with pytest.raises(SpecMismatch, match=rf"no finite bounds at entry {entry} .*give it") as told:
        # Of two axes, whose text would fill several lines.
        box_spec([low, low], [high, high])
    assert "\n" not in str(told.value)


def test_actions_of_an_old_checkpoint_without_bounds_pass_unscaled() -> None:
    spec = box_spec([-1.0, 0.0], [1.0, 2.0]).model_copy(
        update={"action_low": None, "action_high": None}
    )
    action = np.array([3.0, -7.5], dtype=np.float32)
    assert spec.scale_action(action).tolist() == [3.0, -7.5]
    assert spec.unscale_action(action).tolist() == [3.0, -7.5]


def test_bounds_of_one_only_clip_whatever_the_number_format() -> None:
    spec = EnvSpec.from_env(SpacesEnv(None, spaces.Box(-1.0, 1.0, (6,), np.float32)), "mine")
    action = np.random.default_rng(0).normal(0.0, 1.0, (2, 5, 6)).astype(np.float32)
    expected = np.clip(action, -1.0, 1.0)
    assert (expected != action).any()
    for mapped in (spec.action_map, spec.action_map.for_batch((2, 5))):
        for given in (action, action.astype(np.float64)):
            np.testing.assert_array_equal(mapped.to_env(given), expected, strict=True)


def test_actions_of_several_axes_are_vectors_to_a_learner() -> None:
    low, high = np.arange(-6.0, 0.0).reshape(2, 3), np.full((2, 3), 4.0)
    spec = EnvSpec.from_env(SpacesEnv(None, spaces.Box(low, high, dtype=np.float64)), "mine")
    assert (spec.action_shape, spec.action_dim) == ((2, 3), 6)
    for lead in ((), (4,), (2, 5)):
        unit = np.random.default_rng(0).uniform(-1, 1, (*lead, 6)).astype(np.float32)
        shaped = spec.scale_action(unit)
        assert shaped.shape == (*lead, 2, 3)
        np.testing.assert_array_equal(
            spec.action_map.for_batch(lead).to_env(unit), shaped, strict=True
        )
        expected = low + (unit.reshape(*lead, 2, 3) + 1) / 2 * (high - low)
        np.testing.assert_allclose(shaped, expected, atol=1e-5)
        np.testing.assert_allclose(spec.unscale_action(shaped), unit, atol=1e-6)


def test_discrete_actions_are_shifted() -> None:
    spec = EnvSpec.from_env(SpacesEnv(None, spaces.Discrete(3, start=-1)), "mine")
    assert spec.scale_action(np.array([0, 1, 2], dtype=np.int32)).tolist() == [-1, 0, 1]
    assert spec.scale_action(np.array([0], dtype=np.int32)).dtype == np.int64
    assert spec.unscale_action(np.array([-1, 1])).tolist() == [0, 2]


def test_pixels_are_resized_by_area_and_stacked_newest_last() -> None:
    options = {"resize_shape": [4, 2], "frame_stack": 2, "channel_first": False}
    env = make_env(f"{MODULE}:ImageEnv", {"wrappers": {"pixels": options}})
    assert env.observation_space.shape == (4, 2, 2)
    env.reset()
    obs = env.step(1)[0]
    assert obs.dtype == np.uint8
    assert (obs[..., 0] == 0).all()
    assert (obs[..., 1] == 10).all()
    options["channel_first"] = True
    first = make_env(f"{MODULE}:ImageEnv", {"wrappers": {"pixels": options}})
    assert first.reset()[0].shape == (2, 4, 2)


def test_pixels_of_a_task_without_images_are_rendered() -> None:
    pytest.importorskip("pygame")
    kwargs = {"wrappers": {"pixels": {"resize_shape": [32, 48], "frame_stack": 3}}}
    spec = probe_env("CartPole-v1", kwargs)
    assert (spec.obs_shape, spec.obs_dtype) == ((9, 32, 48), "uint8")
    obs = make_env("CartPole-v1", kwargs).reset(seed=0)[0]
    assert obs.min() < 100
    assert obs.max() == 255
    with pytest.raises(EnvError, match="cannot be rendered"):
        make_env(f"{MODULE}:NoiseEnv", {"wrappers": {"pixels": {}}, "length": 3})


def test_rewards_are_scaled_then_clipped() -> None:
    def rewards(**options: object) -> list[float]:
        env = make_env(f"{MODULE}:CounterEnv", {"wrappers": options})
        env.reset()
        return [float(env.step(0)[1]) for _ in range(3)]

    assert rewards() == [1.0, 2.0, 3.0]
    assert rewards(reward_scale=0.5) == [0.5, 1.0, 1.5]
    assert rewards(reward_scale=0.5, clip_reward=True) == [0.5, 1.0, 1.0]
    assert rewards(clip_reward=[1.5, 2.5]) == [1.5, 2.0, 2.5]

"""Wrappers around a task, by name and from Python: made, trained with, resumed, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from helpers.tiny import learner_digest, run_cli, tiny_config, write_tiny
from helpers.warm import run_warm
from rl_training import DQN, SAC
from rl_training.envs.factory import make_env, probe_env
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.tasks.rewards import reward_for
from rl_training.envs.tasks.terminations import termination_for
from rl_training.errors import ConfigError, EnvError, RLTrainingError
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.train import train

TASK = "Pendulum-v1"


class Doubled(gym.ObservationWrapper[Any, Any, Any]):
    """Observations times a factor."""

    def __init__(self, env: gym.Env[Any, Any], factor: float = 2.0) -> None:
        super().__init__(env)
        self.factor = factor
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        low, high = ((side * factor).astype(np.float32) for side in (space.low, space.high))
        self.observation_space = gym.spaces.Box(low, high, dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return (observation * self.factor).astype(np.float32)


OWN = f"{__name__}:Doubled"


def layers(env: gym.Env[Any, Any]) -> list[str]:
    """Names of wrappers from the outside in, down to those of Gymnasium's own making."""
    names = []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    return names


@pytest.mark.parametrize(
    "wrappers",
    [
        [{"name": "TimeAwareObservation", "flatten": True}, OWN],
        {"chain": [{"name": "TimeAwareObservation", "flatten": True}, OWN], "reward_scale": 0.5},
    ],
)
def test_wrappers_are_put_around_in_their_order(wrappers: Any) -> None:
    env = make_env(TASK, {"wrappers": wrappers})
    names = [name for name in layers(env) if name != "RewardTransform"]
    assert names[:2] == ["Doubled", "TimeAwareObservation"]
    assert env.observation_space.shape == (4,)
    obs, _ = env.reset(seed=3)
    plain, _ = gym.make(TASK).reset(seed=3)
    np.testing.assert_allclose(obs[:3], 2 * plain)
    assert "RewardTransform" in layers(env) or isinstance(wrappers, list)


def test_arguments_are_handed_on() -> None:
    obs, _ = make_env(TASK, {"wrappers": [{"name": OWN, "factor": 5.0}]}).reset(seed=3)
    np.testing.assert_allclose(obs, 5 * gym.make(TASK).reset(seed=3)[0])


def test_python_hands_over_classes_functions_and_arguments() -> None:
    local = lambda env: Doubled(env, 3.0)  # noqa: E731 - without a name of its own
    given: list[Any] = [{"name": gym.wrappers.ClipReward, "max_reward": 0.0}, Doubled, local]
    agent = SAC(TASK, wrappers=[*given, {"name": Doubled, "factor": 4.0}])
    chain = agent.config.env_kwargs["wrappers"]
    clip = {"name": "ClipReward", "max_reward": 0.0}
    assert chain == [clip, OWN, "python:lambda", {"name": OWN, "factor": 4.0}]
    obs, _ = make_env(TASK, agent.config.env_kwargs).reset(seed=3)
    np.testing.assert_allclose(obs, 24 * gym.make(TASK).reset(seed=3)[0])
    assert agent.predict(obs).shape == (1,)


def test_a_preset_keeps_its_other_keywords() -> None:
    agent = DQN("CartPole-v1", env_kwargs={"max_episode_steps": 9}, wrappers=["ClipReward"])
    assert agent.config.env_kwargs == {"max_episode_steps": 9, "wrappers": ["ClipReward"]}


@pytest.mark.matrix
def test_a_file_the_command_line_and_python_lead_to_the_same_run(tmp_path: Path) -> None:
    chain: list[Any] = [{"name": "TimeAwareObservation", "normalize_time": False}, OWN]
    kwargs = {"max_episode_steps": 20, "wrappers": chain}
    by_file = train(load_config(write_tiny(tmp_path, env_kwargs=kwargs)))
    first = "{name: TimeAwareObservation, normalize_time: false}"
    text = f"env_kwargs.wrappers=[{first}, '{OWN}']"
    plain = write_tiny(tmp_path, name="plain.yaml")
    outcome = run_cli("train", "--config", plain, "--output-dir", tmp_path / "cli", "-s", text)
    assert outcome.code == 0, outcome.err
    agent = SAC(tiny_config("sac", tmp_path / "python"), wrappers=chain)
    runs = [by_file.run_dir, Path(outcome.values["run_dir"]), agent.learn(progress=False).run_dir]
    assert len({learner_digest(Path(run)) for run in runs}) == 1
    loaded = SAC.load(runs[-1])
    assert loaded.evaluate(episodes=1).metrics["eval_episodes"] == 1


@pytest.mark.parametrize(
    "chain",
    [
        [OWN, {"name": "TimeAwareObservation", "flatten": True}],
        [{"name": "FrameStackObservation", "stack_size": 2}, "FlattenObservation"],
        [{"name": "StickyAction", "repeat_action_probability": 0.3}],
        [{"name": "DelayObservation", "delay": 2}],
    ],
)
def test_a_run_is_cut_and_goes_on_to_the_bit(chain: list[Any], tmp_path: Path) -> None:
    kwargs = {"max_episode_steps": 20, "wrappers": chain}
    config = tiny_config("sac", tmp_path, env_kwargs=kwargs, run_name=None)
    report = verify_resume(config, 45)
    assert report.identical, report


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5"])
def test_a_native_version_is_not_used_and_the_run_says_so(env_id: str) -> None:
    if env_id.startswith("Half"):
        pytest.importorskip("mujoco")
    kwargs = {"wrappers": ["RecordEpisodeStatistics"]}
    envs = SeedVectorEnv.make(env_id, kwargs, 8, (0,))
    reason = "env_kwargs.wrappers puts wrappers around single environments"
    assert envs.note is not None
    assert envs.note.endswith(f"sync: one after another, because {reason}")
    envs.close()
    with pytest.raises(ConfigError, match=r"vector_mode native cannot run .* puts wrappers around"):
        SeedVectorEnv.make(env_id, kwargs, 8, (0,), "native")


def test_known_rules_of_a_task_are_not_used_for_a_wrapped_one() -> None:
    spec = probe_env("InvertedPendulum-v5", {}) if _has_mujoco() else probe_env(TASK, {})
    kwargs = {"wrappers": [OWN]}
    assert termination_for(spec, kwargs) is None
    with pytest.raises(EnvError, match=r"wrappers\.chain changes it"):
        reward_for(spec, kwargs)


def _has_mujoco() -> bool:
    try:
        import mujoco  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        (["FlatenObservation"], r"wrappers\[0\] of Pendulum-v1: 'FlatenObservation' is not a wr"),
        (["FlatenObservation"], r"of Gymnasium \(did you mean FlattenObservation\?\)"),
        (["NormalizeReward"], "the setting normalize_rewards keeps them"),
        ([{"name": "TimeAwareObservation", "speed": 3}], "TimeAwareObservation does not take"),
        ([{"flatten": True}], r"wrappers\[0\] of Pendulum-v1 must be a name"),
        ([3], "must be a name, such as FlattenObservation"),
        (["RecordVideo"], "RecordVideo cannot be used: `rl-training record` makes videos"),
        (["os:system"], r"os:system is not a subclass of gymnasium\.Wrapper and was not called"),
        (["os:no_such"], "os:no_such is missing and was not called"),
        (["no_such_module:X"], "module 'no_such_module' cannot be imported"),
        (["python:gone"], "was handed over in Python, and this process does not have it"),
        ("FlattenObservation", "must be a list of wrappers or a mapping, got 'FlattenObservation'"),
        ({"chains": []}, r"wrappers\.chains of Pendulum-v1.*allowed keys are chain"),
    ],
)
def test_a_mistake_is_one_sentence(wrappers: Any, message: str) -> None:
    with pytest.raises(RLTrainingError, match=message) as caught:
        make_env(TASK, {"wrappers": wrappers})
    assert "\n" not in str(caught.value)


@pytest.mark.matrix
def test_a_function_in_another_process_is_asked_for(tmp_path: Path) -> None:
    agent = SAC(tiny_config("sac", tmp_path), wrappers=[lambda env: Doubled(env)])
    run = agent.learn(progress=False).run_dir
    refused = run_warm("-m", "rl_training", "eval", run)
    assert refused.code == 2
    assert "load the agent in Python with wrappers=[...]" in refused.err


def test_a_configuration_of_python_may_hold_classes() -> None:
    config = TrainConfig(
        algo="sac", env_id=TASK, env_kwargs={"wrappers": {"chain": [Doubled], "reward_scale": 2.0}}
    )
    assert config.env_kwargs["wrappers"] == {"chain": [OWN], "reward_scale": 2.0}
    assert OWN in config.to_yaml()

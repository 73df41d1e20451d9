"""What people do wrong in their first hour; each mistake is answered by one sentence.

`python tests/cli/test_newcomers.py` prints every mistake with its answer.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_training
from helpers.tiny import run_cli, tiny_config
from rl_training import DQN, IQL, PPO, SAC, Callback, TrainConfig
from rl_training.errors import RLTrainingError
from rl_training.runtime.train import train

SAC_PENDULUM = ("train", "--algo", "sac", "--env", "Pendulum-v1")
PPO_CARTPOLE = ("train", "--algo", "ppo", "--env", "CartPole-v1")
PRESET = ("train", "--config", "sac/pendulum")


class Old(gym.Env[Any, Any]):
    """An environment with a mistake, chosen by its name."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs = np.zeros(2, np.float32)
        if self.mistake == "old reset":
            return obs
        return (np.zeros(3, np.float32) if self.mistake == "shape" else obs), {}

    def step(self, action: Any) -> Any:
        obs = np.zeros(2, np.float32)
        if self.mistake == "old step":
            return obs, 0.0, False, {}
        if self.mistake == "dtype":
            return np.zeros(2), 0.0, False, False, {}
        reward = float("nan") if self.mistake == "nan" else 0.0
        done: Any = 1 if self.mistake == "flag" else True
        return obs, reward, done, False, {}


def broken(mistake: str) -> Callable[[], object]:
    """Train on an environment with a mistake."""
    return lambda: PPO(partial(Old, mistake)).learn(8, progress=False)


@dataclass(frozen=True)
class Mistake:
    """Something a newcomer does, and what the answer must say."""

    what: str
    says: str
    """Regular expression that the answer holds: the value, and what to do instead."""
    words: tuple[object, ...] = ()
    """The command, without the program's name; {run} and others of `places` are filled in."""
    call: Callable[[], object] | None = None
    """Or what is called in Python."""


def cli(what: str, says: str, *words: object) -> Mistake:
    return Mistake(what, says, words=words)


def python(what: str, says: str, call: Callable[[], object]) -> Mistake:
    return Mistake(what, says, call=call)


MISTAKES = [
    # Commands and their options
    cli("a command is misspelled", r"trian", "trian"),
    cli("`train` alone", r"--config sac/pendulum", "train"),
    cli("a preset is misspelled", r"did you mean .*sac/pendulum", "train", "-c", "sac/pendulm"),
    cli("a preset without its task", r"those of sac: sac/", "train", "-c", "sac"),
    cli(
        "a method is misspelled",
        r"did you mean sac",
        "train",
        "--algo",
        "sacc",
        "--env",
        "Pendulum-v1",
    ),
    cli(
        "a method in capitals",
        r"did you mean sac",
        "train",
        "--algo",
        "SAC",
        "--env",
        "Pendulum-v1",
    ),
    cli(
        "a method that is not here",
        r"preset ppo/a2c",
        "train",
        "--algo",
        "a2c",
        "--env",
        "CartPole-v1",
    ),
    cli("no environment", r"--env", "train", "--algo", "sac"),
    cli("no method", r"--algo", "train", "--env", "CartPole-v1"),
    cli(
        "an environment without its version",
        r"Pendulum-v1",
        "train",
        "--algo",
        "sac",
        "--env",
        "Pendulum",
    ),
    cli(
        "an environment is misspelled",
        r"CartPole-v1",
        "train",
        "--algo",
        "ppo",
        "--env",
        "Cartpole-v1",
    ),
    cli("a method and the preset of another", r"leave out", *PRESET, "--algo", "ppo"),
    cli("an underscore in an option", r"--total-timesteps", *PRESET, "--total_timesteps", "100"),
    cli("an option that is not there", r"--epochs", *PRESET, "--epochs", "3"),
    cli("zero steps", r"total_timesteps must be", *PRESET, "--total-timesteps", "0"),
    cli("steps in words", r"whole number such as 100000", *PRESET, "--total-timesteps", "many"),
    cli("half a step", r"whole number", *PRESET, "--total-timesteps", "0.5"),
    cli("a negative seed", r"seed", *PRESET, "--seed", "-1"),
    cli("seeds in words", r"1,2,3 or 0..7", *PRESET, "--seeds", "a,b"),
    cli("a seed and seeds", r"not both", *PRESET, "--seed", "1", "--seeds", "1,2"),
    cli("no environments at all", r"num_envs", *PRESET, "--num-envs", "0"),
    cli("a device that is not one", r"auto, cpu, cuda", *PRESET, "--device", "gpu"),
    cli("a way to collect that is not one", r"async", *PRESET, "--collect", "threads"),
    cli("a grid of words", r"learning_rate=1e-4,3e-4", *PRESET, "--grid", "learning_rate=fast"),
    # Settings
    cli("a setting is misspelled", r"learning_rate", *SAC_PENDULUM, "-s", "learning_rat=1e-3"),
    cli("Stable-Baselines3's clip_range", r"clip_coef", *PPO_CARTPOLE, "-s", "clip_range=0.2"),
    cli("Stable-Baselines3's n_envs", r"num_envs", *PPO_CARTPOLE, "-s", "n_envs=4"),
    cli(
        "Stable-Baselines3's buffer_size",
        r"buffer_capacity",
        *SAC_PENDULUM,
        "-s",
        "buffer_size=1000",
    ),
    cli("a setting of another method", r"describe METHOD", *SAC_PENDULUM, "-s", "clip_coef=0.2"),
    cli("a setting without a value", r"key=value", *SAC_PENDULUM, "-s", "learning_rate"),
    cli("a learning rate in words", r"learning_rate", *SAC_PENDULUM, "-s", "learning_rate=fast"),
    cli(
        "a negative learning rate",
        r"learning_rate must be",
        *SAC_PENDULUM,
        "-s",
        "learning_rate=-1",
    ),
    cli("a discount above 1", r"gamma must be", *SAC_PENDULUM, "-s", "gamma=1.5"),
    cli("one width instead of a list", r"hidden_sizes", *SAC_PENDULUM, "-s", "hidden_sizes=256"),
    cli(
        "a keyword that the task does not take",
        r"gravity_",
        *SAC_PENDULUM,
        "-s",
        "env_kwargs={gravity_: 9.8}",
    ),
    # Methods and tasks that do not go together
    cli("SAC on discrete actions", r"discrete", "train", "--algo", "sac", "--env", "CartPole-v1"),
    cli(
        "DQN on continuous actions", r"continuous", "train", "--algo", "dqn", "--env", "Pendulum-v1"
    ),
    cli("an own class that is not registered", r"module:Class", *PPO_CARTPOLE[:-1], "MyEnv"),
    cli("an own module that is not found", r"PYTHONPATH", *PPO_CARTPOLE[:-1], "my_tasks:MyEnv"),
    cli("a module without that class", r"no attribute", *PPO_CARTPOLE[:-1], "json:MyEnv"),
    cli("a function in place of a class", r"gymnasium.Env", *PPO_CARTPOLE[:-1], "json:loads"),
    cli(
        "a file in place of a module",
        r"my_tasks:MyEnv, with its folder",
        *PPO_CARTPOLE[:-1],
        "my_tasks.py:MyEnv",
    ),
    # Files
    cli(
        "a YAML file that is not there", r"neither a file nor a preset", "train", "-c", "mine.yaml"
    ),
    cli("a YAML file with a slip", r"broken.yaml", "train", "-c", "{tmp}/broken.yaml"),
    cli("a YAML file that is empty", r"empty.yaml", "train", "-c", "{tmp}/empty.yaml"),
    cli(
        "a setting at the wrong place in YAML",
        r"put it under algo_kwargs",
        "train",
        "-c",
        "{tmp}/place.yaml",
    ),
    cli("the same name for a second run", r"run_name", "train", "-c", "{run}/config.yaml"),
    cli(
        "data that is not there",
        r"missing.npz",
        "train",
        "-c",
        "iql/pendulum",
        "-s",
        "dataset_path=missing.npz",
    ),
    cli("data without actions", r"actions is missing", "data", "inspect", "{tmp}/bad.npz"),
    cli(
        "data of another task",
        r"shape|observation",
        "train",
        "-c",
        "iql/pendulum",
        "-s",
        "dataset_path={tmp}/other.npz",
    ),
    cli(
        "`data collect` without an agent or a task",
        r"--checkpoint, or --env",
        "data",
        "collect",
        "{tmp}/out.npz",
    ),
    # Trained agents
    cli("`resume` alone", r"resume needs a run", "resume"),
    cli("`resume` of a folder that is not there", r"nowhere", "resume", "nowhere"),
    cli("`resume` of a saved agent", r"run folder", "resume", "{tmp}/agent.safetensors"),
    cli("`eval` of a folder that is not there", r"nowhere", "eval", "nowhere"),
    cli("`eval` of a folder that is no run", r"give a run folder", "eval", "{tmp}"),
    cli("`eval` of a file that is no agent", r"config.yaml", "eval", "{run}/config.yaml"),
    cli("`eval` of no episodes", r"must be >= 1", "eval", "{run}", "--episodes", "0"),
    cli("`predict` without an observation", r"--obs", "predict", "{run}"),
    cli("an observation of another shape", r"\(3,\)", "predict", "{run}", "--obs", "[1, 2]"),
    cli("an observation that is not JSON", r"not JSON", "predict", "{run}", "--obs", "1 0 0"),
    cli(
        "a format that `export` does not know",
        r"onnx or torch",
        "export",
        "{run}",
        "--format",
        "tflite",
    ),
    cli("a video format that is not one", r"mp4", "record", "{run}", "-o", "{tmp}/video.avi"),
    cli("`push` without a repository", r"--repo user/name", "push", "{run}"),
    cli(
        "a name on the hub without its user",
        r"hf://pendulum is not .*hf://user/name",
        "eval",
        "hf://pendulum",
    ),
    cli("`leaderboard` of a folder without runs", r"holds no run", "leaderboard", "{tmp}/nothing"),
    cli("`report` of a folder that is not there", r"nowhere", "report", "nowhere"),
    cli("`list` of something else", r"algos, presets and envs", "list", "algorithms"),
    cli("`describe` with a typing error", r"did you mean ppo", "describe", "poo"),
    cli("`config` without an action", r"config", "config", "sac/pendulum"),
    # Python
    python("no environment in Python", r"PPO\('CartPole-v1'\)", lambda: PPO()),
    python(
        "a keyword of Stable-Baselines3", r"clip_coef", lambda: PPO("CartPole-v1", clip_range=0.2)
    ),
    python(
        "a policy class as in Stable-Baselines3",
        r"PPO\('CartPole-v1'\)",
        lambda: PPO("MlpPolicy", "CartPole-v1"),
    ),
    python("a number as environment", r"env must be", lambda: SAC(5)),  # type: ignore[arg-type]
    python(
        "a learning rate in words in Python",
        r"learning_rate",
        lambda: SAC("Pendulum-v1", learning_rate="fast"),
    ),
    python(
        "SAC on discrete actions in Python",
        r"discrete",
        lambda: SAC("CartPole-v1").learn(8, progress=False),
    ),
    python(
        "the configuration of another method",
        r"'ppo'",
        lambda: SAC(TrainConfig(algo="ppo", env_id="CartPole-v1")),
    ),
    python(
        "a callback's class",
        r"give an instance",
        lambda: DQN("CartPole-v1").learn(8, callbacks=Callback),  # type: ignore[arg-type]
    ),
    python(
        "an observation of another shape in Python",
        r"needs \(3,\)",
        lambda: SAC("Pendulum-v1").predict([0.0]),
    ),
    python("`resume` before `learn`", r"no run to resume", lambda: SAC("Pendulum-v1").resume()),
    python("the file of another method", r"not dqn", lambda: DQN.load(os.environ["NEWCOMER_RUN"])),
    python("`load` of a folder that is not there", r"nowhere", lambda: PPO.load("nowhere")),
    python(
        "data without some columns",
        r"actions is missing",
        lambda: IQL("Pendulum-v1").fit({"observations": np.zeros((4, 3))}),
    ),
    python(
        "`fit` of a method that needs a task",
        r"learns from an environment",
        lambda: PPO("CartPole-v1").fit("data.npz"),
    ),
    python("`reset` of old Gym", r"reset must return \(obs, info\)", broken("old reset")),
    python("`step` of old Gym", r"terminated, truncated", broken("old step")),
    python(
        "an observation of another shape than its space", r"observation space says", broken("shape")
    ),
    python("float64 where the space says float32", r"float64", broken("dtype")),
    python("a reward that is NaN", r"reward", broken("nan")),
    python("a flag that is a number", r"must be a bool", broken("flag")),
    python("a method that is not in the package", r"A2C", lambda: getattr(rl_training, "A2C")),  # noqa: B009
]


def prepare(folder: Path) -> dict[str, str]:
    """Make what the mistakes are made with; returns the places."""
    run = train(tiny_config("sac", folder / "runs")).run_dir
    SAC.load(run).save(folder / "agent.safetensors")
    (folder / "nothing").mkdir()
    (folder / "broken.yaml").write_text("algo: sac\n  env_id: Pendulum-v1\n")
    (folder / "empty.yaml").write_text("")
    (folder / "place.yaml").write_text("algo: sac\nenv_id: Pendulum-v1\nbatch_size: 8\n")
    np.savez(folder / "bad.npz", observations=np.zeros((4, 3), np.float32))
    columns = {
        "observations": np.zeros((50, 7), np.float32),
        "actions": np.zeros((50, 2), np.float32),
        "rewards": np.zeros(50, np.float32),
        "terminations": np.arange(50) % 10 == 9,
        "truncations": np.zeros(50, bool),
    }
    np.savez(folder / "other.npz", **columns)
    return {"run": str(run), "tmp": str(folder)}


NOTES = ("note: importing", "note: one thread, because")


def answer(mistake: Mistake, places: dict[str, str]) -> str:
    """Make a mistake; returns the one sentence that answers it."""
    if mistake.call is None:
        words = [str(word) for word in mistake.words]
        for name, place in places.items():
            words = [word.replace(f"{{{name}}}", place) for word in words]
        done = run_cli(*words)
        # What is said before (a module is imported, cores are busy) is no part of the answer.
        lines = [line for line in done.err.splitlines() if not line.startswith(NOTES)]
        return replace(done, err="\n".join(lines)).sentence()
    os.environ["NEWCOMER_RUN"] = places["run"]
    try:
        mistake.call()
    except (RLTrainingError, AttributeError) as error:
        return str(error)
    raise AssertionError(f"{mistake.what}: no error")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return prepare(tmp_path_factory.mktemp("newcomers"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what.replace(" ", "_"))
def test_a_mistake_is_answered_by_one_sentence(
    mistake: Mistake, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = answer(mistake, places)
    assert re.search(mistake.says, said), said
    assert "\n" not in said
    assert len(said) < 700, said
    assert not list(tmp_path.glob("runs/*")), "a mistake leaves nothing behind"


def test_there_are_many_different_ones() -> None:
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES) >= 50


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    said = run_cli(*PRESET, "--device", "cuda", "--output-dir", tmp_path).sentence()
    assert "cuda" in said


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        made = prepare(Path(temporary))
        print("| mistake | answer |\n| --- | --- |")
        for one in MISTAKES:
            text = answer(one, made).replace(temporary, "TMP").replace("|", "\\|")
            print(f"| {one.what} | {text} |")

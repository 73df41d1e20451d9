"""`train --algo --env`, runs as arguments, made-up data, and errors in the user's own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from helpers.tiny import run_cli, write_tiny
from helpers.warm import run_warm
from rl_training.errors import RLTrainingError, full_traceback, last_own_frame
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.made_up import made_up_data
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.train import train

SMALL = ("-s", "run_name=run", "-s", "tensorboard=false", "-s", "device=cpu", "-q")


# A method and a task, without a preset


def test_a_method_and_a_task_are_enough(tmp_path: Path) -> None:
    settings = ("-s", "num_steps=16", "-s", "minibatch_size=8", "-s", "hidden_sizes=[8]")
    words = ("--total-timesteps", "3.2e1", "--output-dir", tmp_path, "--eval-episodes", "1")
    done = run_cli("train", "--algo", "ppo", "--env", "CartPole-v1", *words, *settings, *SMALL)
    assert done.code == 0, done.err
    assert done.values["global_step"] == "32"
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (stored["algo"], stored["env_id"]) == ("ppo", "CartPole-v1")


def test_without_a_preset_everything_has_its_default() -> None:
    done = run_cli("train", "--algo", "sac", "--env", "Pendulum-v1", "--dry-run")
    assert yaml.safe_load(done.out) == TrainConfig(algo="sac", env_id="Pendulum-v1").resolved()


def test_a_task_takes_the_place_of_the_presets() -> None:
    words = ("train", "-c", "ppo/cartpole", "--env", "Acrobot-v1", "--dry-run")
    shown = yaml.safe_load(run_cli(*words).out)
    assert (shown["algo"], shown["env_id"], shown["num_envs"]) == ("ppo", "Acrobot-v1", 8)
    same = yaml.safe_load(run_cli(*words, "--algo", "ppo").out)
    assert same == shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "train needs --config with a preset or a YAML file, or --algo and --env: such as "),
        (["--algo", "ppo"], "train --algo ppo lacks --env, the task; `rl-training list` shows"),
        (["--env", "CartPole-v1"], "train --env CartPole-v1 lacks --algo, the method; "),
        (["--algo", "ppo", "-c", "sac/pendulum"], "--algo ppo does not go with --config sac/pendu"),
        (["--algo", "pppo", "--env", "CartPole-v1"], "algo 'pppo' is not an algorithm (did you m"),
        (["--algo", "ppo", "--env", "CartPol-v1"], "env_id 'CartPol-v1' is not a registered env"),
    ],
)
def test_a_run_that_is_not_named_is_one_sentence(words: list[str], expected: str) -> None:
    assert run_cli("train", *words).sentence().startswith(expected)


# The run as an argument


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs")
    assert run_cli("train", "-c", write_tiny(folder), "-q").code == 0
    return folder / "runs" / "run"


@pytest.mark.matrix
def test_a_run_is_given_as_an_argument_or_by_name(run: Path, tmp_path: Path) -> None:
    words = ("--episodes", "2", "--seed", "1")
    assert run_cli("eval", run, *words).out == run_cli("eval", "--checkpoint", run, *words).out
    obs = ("--obs", "[1, 0, 0]")
    assert run_cli("predict", run, *obs).out == run_cli("predict", "--checkpoint", run, *obs).out
    assert run_cli("resume", run, "-q").values["global_step"] == "64"
    target = tmp_path / "policy.pt2"
    made = run_cli("export", run, "--format", "torch", "-o", target)
    assert made.values["exported"] == str(target)


@pytest.mark.parametrize(
    "command", ["resume", "eval", "record", "watch", "export", "predict", "ope"]
)
def test_a_run_given_twice_or_not_at_all_is_one_sentence(command: str, run: Path) -> None:
    more = ("--dataset", "data.npz") if command == "ope" else ()
    both = run_cli(command, run, "--checkpoint", run, *more).sentence()
    assert both == f"{command} is given {run} and --checkpoint {run}; give the run once"
    assert run_cli(command, *more).sentence().startswith(f"{command} needs a run: rl-training ")


# Made-up data


def test_made_up_data_is_told_before_and_after_training(tmp_path: Path) -> None:
    done = run_cli("train", "-c", write_tiny(tmp_path, "cql"))
    lines = done.err.splitlines()
    said = (
        "warning: the data is made up (dataset_kind: random) and says nothing about Pendulum-v1; "
    )
    said += "expect no better return than a random policy's, about -1230. For real data:"
    assert lines[0] == said
    assert lines[1] == "  rl-training data collect data.npz --checkpoint RUN --steps 1e5"
    assert lines[2].strip() == "rl-training train ... -s dataset_path=data.npz"
    assert lines[-1].startswith(said)
    assert "rl-training data collect" in lines[-1]
    assert done.values["data"] == "made up (dataset_kind: random)"
    resumed = run_cli("resume", tmp_path / "runs" / "run", "--total-timesteps", "72")
    assert resumed.values["data"] == "made up (dataset_kind: random)"
    assert resumed.err.splitlines()[0] == said


def test_real_data_and_methods_without_data_are_not_warned_of(tmp_path: Path) -> None:
    assert "warning:" not in run_cli("train", "-c", write_tiny(tmp_path)).err
    for preset in ("sac/pendulum", "ppo/cartpole"):
        assert made_up_data(load_config(preset)) is None
    for key in ("dataset_path=a.npz", "dataset_id=a/b-v0", "dataset_mix=[{path: a.npz}]"):
        assert made_up_data(load_config("cql/pendulum", [key])) is None
    assert made_up_data(load_config("gail/cartpole", ["expert_dataset_path=a.npz"])) is None


def test_each_kind_of_method_says_what_made_up_data_can_give() -> None:
    gail = made_up_data(load_config("gail/cartpole"))
    assert gail is not None
    assert "expert_dataset_kind: random" in gail.summary
    assert "about 22.2" in gail.summary
    assert gail.commands[1].endswith("-s expert_dataset_path=data.npz")
    rlpd = made_up_data(load_config("rlpd/pendulum"))
    assert rlpd is not None
    assert "only the environment's own steps teach the policy" in rlpd.summary
    mixed = load_config("cql/pendulum", ["dataset_mix=[{path: a.npz}, {kind: random}]"])
    assert made_up_data(mixed) is not None


# The user's own code

BROKEN = """
import gymnasium
import numpy as np


class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), self.reward(), False, self.steps % 8 == 0, {}

    def reward(self):
        return 1 / (40 - self.steps)
"""


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.matrix)])
def test_an_environments_own_line_is_named_and_its_traceback_kept(
    mode: str, tmp_path: Path
) -> None:
    (tmp_path / "own_task.py").write_text(BROKEN)
    tiny = write_tiny(tmp_path, "dqn", env_kwargs={}, num_envs=2, total_timesteps=128)
    options = ("--env", "own_task:Broken", "--collect", mode)
    words = ("-m", "rl_training", "train", "-c", tiny, *options)
    done = run_warm(*words, cwd=tmp_path)
    assert done.code == 2
    assert "Traceback" not in done.err
    sentence = done.err.splitlines()[-1]
    assert sentence.endswith(
        "(in your code: own_task.py:20, in reward; --debug shows the traceback)"
    )
    (file,) = (tmp_path / "runs" / "run" / "diagnostics").iterdir()
    described = json.loads(file.read_text())
    assert described["own_code"] == "own_task.py:20, in reward"
    assert "ZeroDivisionError: division by zero" in described["traceback"]
    assert 'own_task.py", line 20, in reward' in described["traceback"]

    debugged = run_warm(*words, "-s", "run_name=other", "--debug", cwd=tmp_path)
    assert debugged.code == 2
    assert 'own_task.py", line 20, in reward' in debugged.err
    assert "ZeroDivisionError: division by zero\n" in debugged.err
    assert debugged.err.splitlines()[-1].endswith("(in your code: own_task.py:20, in reward)")


class Failing(Callback):
    """A callback with a mistake."""

    def on_step(self, state: TrainerState) -> None:
        if state.step >= 20:
            raise KeyError("typo")


def test_a_callbacks_own_error_stays_and_is_described(tmp_path: Path) -> None:
    config = load_config(write_tiny(tmp_path))
    with pytest.raises(KeyError, match="typo") as caught:
        train(config, callbacks=[Failing()])
    (file,) = (tmp_path / "runs" / "run" / "diagnostics").iterdir()
    assert getattr(caught.value, "__notes__", []) == [
        f"the state of the run is described in {file}"
    ]
    described = json.loads(file.read_text())
    assert described["error"] == "KeyError"
    assert described["own_code"].endswith(", in on_step")
    assert "in on_step" in described["traceback"]


def test_a_plug_in_with_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "own_method.py").write_text("SPEC = 1 / 0\n")
    words = ("-m", "rl_training", "train", "--algo", "own_method:SPEC", "--env", "CartPole-v1")
    done = run_warm(*words, cwd=tmp_path)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "ZeroDivisionError" in done.err
    assert "(in your code: own_method.py:1, in <module>; --debug shows" in done.err


def test_only_the_users_code_counts_as_own() -> None:
    with pytest.raises(RLTrainingError) as ours:
        load_config("sac/pendulm")
    # The test's own line called us; a command would begin inside the package.
    assert str(last_own_frame(ours.value)).endswith("in test_only_the_users_code_counts_as_own")
    try:
        json.loads("{")
    except json.JSONDecodeError as error:
        inner = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        assert last_own_frame(inner) is None


def test_a_cause_that_was_raised_from_itself_is_not_lost() -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            second = RLTrainingError("second")
            try:
                raise second from error
            except RLTrainingError as again:
                raise again from again

    with pytest.raises(RLTrainingError) as caught:
        fail()
    text = full_traceback(caught.value)
    assert text.index("KeyError: 'first'") < text.index("RLTrainingError: second")

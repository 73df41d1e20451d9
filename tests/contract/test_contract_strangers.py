"""The contract of files from strangers, for every registered algorithm."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import pytest
import yaml

from helpers.config_values import ROOM_FOR
from helpers.hostile import forge
from helpers.tiny import run_cli, tiny_config, write_tiny
from helpers.warm import run_warm
from rl_training.errors import RLTrainingError
from rl_training.experiment.checkpointing import open_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.train import train
from rl_training.runtime.workflows import agent_from, load_agent

MODULE = "named_by_a_stranger"
NAME = f"{MODULE}:thing"
every_algorithm = pytest.mark.parametrize("algo", algorithm_names(), scope="module")


@pytest.fixture(scope="module")
def run_dir(algo: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a few steps."""
    folder = tmp_path_factory.mktemp(algo)
    return train(tiny_config(algo, folder, total_timesteps=32, eval_episodes=0)).run_dir


class Watched(importlib.abc.MetaPathFinder):
    """Notes every attempt to import the stranger's module."""

    def __init__(self) -> None:
        self.attempts: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname.partition(".")[0] == MODULE:
            self.attempts.append(fullname)


@pytest.fixture
def watched() -> Iterator[Watched]:
    finder = Watched()
    sys.meta_path.insert(0, finder)
    yield finder
    sys.meta_path.remove(finder)


def takes_text(annotation: object) -> bool:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return str in parts


def forgeries(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a place and a configuration with a name in it, for every place that takes a text."""
    for name, field in TrainConfig.model_fields.items():
        if takes_text(field.annotation):
            yield name, config | {name: NAME}
    fields = get_algorithm_spec(config["algo"]).config_class.model_fields
    for name, field in fields.items():
        if takes_text(field.annotation):
            changed = config["algo_kwargs"] | {name: NAME}
            yield f"algo_kwargs.{name}", config | {"algo_kwargs": changed}
    for key in ("wrappers", "encoder", "entry_point", "plugins", "additional_wrappers"):
        yield f"env_kwargs.{key}", config | {"env_kwargs": {key: NAME}}
    listed = {"wrappers": [NAME, {"_target_": NAME}]}
    yield "env_kwargs as lists", config | {"env_kwargs": listed, "trackers": [NAME], "tags": [NAME]}


def write_forgery(run: Path, config: dict[str, Any]) -> None:
    """Put another configuration into a run, its checkpoints and its task."""
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def change(fields: dict[str, Any]) -> None:
        fields["header"]["config"] = config
        fields["header"]["env_spec"]["env_id"] = NAME
        fields["header"]["plugins"] = fields["header"]["encoder"] = NAME

    for checkpoint in (run / "checkpoints").iterdir():
        forge(checkpoint, change)


@pytest.mark.expensive
@every_algorithm
def test_reading_commands_import_nothing_that_a_file_names(
    run_dir: Path, tmp_path: Path, watched: Watched
) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    obs = [0.0] * (4 if config["env_id"] == "CartPole-v1" else 3)
    np.savez(tmp_path / "data.npz", observations=np.zeros((4, len(obs))))
    shutil.copytree(run_dir, run := tmp_path / "run")
    places = []
    for place, changed in forgeries(config):
        write_forgery(run, changed)
        places.append(place)
        with contextlib.suppress(RLTrainingError):
            load_agent(run, device="cpu").predict(obs)
        assert watched.attempts == [], place
        # The command line adds nothing to most places, and takes long.
        if place != "env_id" and not place.endswith("_function"):
            continue
        for command in (
            ("predict", "--checkpoint", run, "--obs", str(obs)),
            ("export", "--checkpoint", run, "--format", "nothing", "--output", run / "x"),
            ("ope", "--checkpoint", run, "--dataset", tmp_path / "data.npz"),
            ("leaderboard", run),
            ("report", run, "--output", tmp_path / "page.html"),
        ):
            done = run_cli(*command)
            assert done.code == 0 or done.sentence(), (place, command)
            assert watched.attempts == [], (place, command)
    assert {"env_id", "env_kwargs.wrappers"} <= set(places)
    if config["algo"] == "pets":
        assert {"algo_kwargs.reward_function", "algo_kwargs.termination_function"} <= set(places)
    with pytest.raises(ImportError):  # the watch itself works
        importlib.import_module(MODULE)
    assert watched.attempts == [MODULE]


def test_listing_imports_nothing_that_a_file_names(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(f"algo: {MODULE}\nenv_id: {NAME}\n")
    monkeypatch.chdir(tmp_path)
    for what in ("algos", "presets", "envs"):
        assert run_cli("list", what).code == 0
    assert watched.attempts == []


TASK = """
import logging
logging.getLogger("task").warning("running")

import numpy as np
from gymnasium.envs.classic_control import PendulumEnv
from rl_training.envs.tasks.functions import reward_function, termination_function

class Task(PendulumEnv):
    def render(self):
        return np.zeros((4, 4, 3), np.uint8)

@reward_function
def pays(obs, action, next_obs):
    return obs[:, 0]

@termination_function
def ends(obs, action, next_obs):
    return obs[:, 0] > 2
"""
FUNCTIONS = {"reward_function": "own_functions:pays", "termination_function": "own_functions:ends"}


def test_running_commands_say_which_module_before_they_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("own_task", "own_functions"):
        (tmp_path / f"{name}.py").write_text(TASK, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    changes: dict[str, Any] = {"env_id": "own_task:Task", "eval_episodes": 0, "total_timesteps": 40}
    config = write_tiny(tmp_path, "pets", algo_kwargs=FUNCTIONS, **changes)
    run = tmp_path / "runs" / "run"
    commands = {
        "train": ("train", "--config", config),
        "resume": ("resume", "--checkpoint", run, "--total-timesteps", 48),
        "eval": ("eval", "--checkpoint", run, "--episodes", 1),
        "record": ("record", "--checkpoint", run, "--max-steps", 2, "-o", tmp_path / "x.gif"),
        "collect": ("data", "collect", "--checkpoint", run, "--steps", 3, tmp_path / "x.npz"),
    }
    for name, command in commands.items():
        for module in ("own_task", "own_functions"):
            sys.modules.pop(module, None)
        caplog.clear()
        done = run_cli(*command)
        assert done.code == 0, (name, done.err)
        said = [text for text in caplog.messages if "import" in text or text == "running"]
        notes = [re.findall(r"^note: importing module (\w+), named by", text) for text in said[::2]]
        assert sorted(notes) == [["own_functions"], ["own_task"]], (name, said)
        assert said[1::2] == ["running"] * 2, (name, said)
    for module in ("own_task", "own_functions"):
        sys.modules.pop(module, None)
    told = run_cli("predict", "--checkpoint", run, "--obs", "[0.0, 0.0, 0.0]").sentence()
    assert "own_functions" in told
    assert "eval" in told
    importlib.import_module("own_functions")  # the user's own decision
    assert run_cli("predict", "--checkpoint", run, "--obs", "[0.0, 0.0, 0.0]").code == 0


@pytest.mark.matrix
def test_the_note_about_an_import_is_seen_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "shown_task.py").write_text("import sys\nsys.stderr.write('running\\n')\n")
    options = ("--set", "env_id=shown_task:Nothing", "--output-dir", tmp_path)
    words = ("-m", "rl_training", "train", "--config", "dqn/cartpole", *options)
    done = run_warm(*words, cwd=tmp_path)
    note, running, error = done.err.strip().splitlines()
    assert note.startswith("note: importing module shown_task, named by environment shown_task:")
    assert running == "running"
    assert error.startswith("error: ")
    assert done.code == 2


HUGE: dict[str, tuple[object, ...]] = {
    "int": (10**11, 10**6),
    "tuple": ([8000, 8000], [10**9], [1] * 10**5, [0] * 10**4),
}
TASKS: tuple[dict[str, Any], ...] = (
    {"obs_shape": [10**9]},
    {"obs_shape": [3, 10**4, 10**4], "obs_dtype": "uint8"},
    {"num_actions": 10**9, "action_kind": "discrete", "action_shape": []},
    {"action_shape": [10**9]},
    {"action_shape": [10**5], "action_low": [-1.0] * 10**5, "action_high": [1.0] * 10**5},
    {"action_low": [0.0] * 10**5},
    {"obs_dtype": "V1000000000", "action_dtype": "V1000000000"},
)


@pytest.mark.expensive
@every_algorithm
def test_sizes_in_a_file_that_its_tensors_do_not_have_cost_nothing(
    algo: str, run_dir: Path
) -> None:
    """Forged settings are refused, or do not matter, before memory is taken or time spent."""
    good = open_checkpoint(run_dir, components={"learner"})
    config, env = good.header["config"], good.header["env_spec"]
    obs = [0.0] * env["obs_shape"][0]
    fields = get_algorithm_spec(algo).config_class.model_fields
    forged = [
        (f"{name} {str(value)[:20]}", config | {"algo_kwargs": config["algo_kwargs"] | change}, env)
        for name, field in fields.items()
        for kind, values in HUGE.items()
        if re.search(rf"\b{kind}\b", str(field.annotation))
        for value in values
        for room in ([{}, ROOM_FOR[name]] if name in ROOM_FOR else [{}])
        if (change := {name: value} | room).keys() <= fields.keys()
    ]
    forged += [(str(change)[:60], config, env | change) for change in TASKS]
    sentences: list[str] = []
    for what, settings, task in forged:
        begun, before = time.process_time(), peak_memory()
        header = good.header | {"config": settings, "env_spec": task, "step": good.step}
        try:
            agent_from(header, good.states["learner"], "cpu").predict(obs)
        except RLTrainingError as error:
            sentences.append(str(error))
        assert time.process_time() - begun < 3.0, what
        assert peak_memory() - before < 150 * 2**20, what
    assert len(sentences) > len(TASKS)
    assert max(map(len, sentences)) < 5000


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

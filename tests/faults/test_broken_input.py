"""Broken data, environments and configurations: each has an error of its own (R23, R24)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.datasets import tiny_columns, write_columns
from helpers.faults import Tried
from helpers.tiny import tiny_config
from rl_training.data.datasets.sources import load_transition_dataset
from rl_training.envs.factory import probe_env
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.errors import ConfigError, DataError, EnvError, RLTrainingError, SpecMismatch
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime import evaluator
from rl_training.runtime.train import train
from rl_training.testing.contract import small_config

NAN, INF = np.nan, np.inf
DATASETS: dict[str, dict[str, Any]] = {
    "no observations": {"observations": None},
    "no actions": {"actions": None},
    "no rewards": {"rewards": None},
    "no ends": {"terminations": None, "truncations": None},
    "a mistyped key": {"rewards": None, "reward": np.zeros(5)},
    "fewer actions": {"actions": np.zeros((4, 1))},
    "fewer flags": {"terminations": np.zeros(4, bool)},
    "successors of another shape": {"next_observations": np.zeros((5, 2))},
    "a table of rewards": {"rewards": np.zeros((5, 2))},
    "texts as actions": {"actions": np.array(list("abcde"))},
    "objects as actions": {"actions": np.array([{}] * 5)},
    "complex rewards": {"rewards": np.zeros(5, np.complex64)},
    "dates as rewards": {"rewards": np.zeros(5, "M8[s]")},
    "one number as rewards": {"rewards": np.float32(1.0)},
    "flags that are numbers": {"terminations": np.arange(5)},
    "flags that are not numbers": {"truncations": np.array([0, NAN, 0, 0, 0])},
    "NaN in observations": {"observations": np.array([[0], [NAN], [0], [0], [0]])},
    "infinite actions": {"actions": np.array([[0], [0], [INF], [0], [0]])},
    "NaN in rewards": {"rewards": np.array([0, 0, 0, NAN, 0])},
    "rewards beyond float32": {"rewards": np.array([0, 1e300, 0, 0, 0])},
    "infinite successors": {"next_observations": np.array([[0], [0], [0], [0], [INF]])},
    "no rows": {name: column[:0] for name, column in tiny_columns().items()},
}


def test_every_broken_dataset_has_an_error_of_its_own(tried: Tried, tmp_path: Path) -> None:
    said: dict[str, str] = {}
    for number, (name, changes) in enumerate(DATASETS.items()):
        path = write_columns(tmp_path / f"{number}.npz", tiny_columns(), **changes)
        with pytest.raises(DataError) as caught:
            load_transition_dataset("npz", path=path)
        assert str(caught.value).startswith(f"{path}: "), name
        said[name] = str(caught.value).removeprefix(str(path))
    tried("broken datasets", "-", len(said), len(said) - len(set(said.values())))
    assert len(said) >= 20
    assert len(set(said.values())) == len(said)


ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        fault.replace("_", " "): ("BrokenEnv", {"fault": fault})
        for fault in (
            *("reset_gives_obs_only", "reset_raises", "four_values", "wrong_dtype"),
            *("wrong_shape", "nan_obs", "nan_reward", "reward_is_none", "flag_is_int", "raises"),
            "huge_reward",
            *("no_number_in_obs", "no_number_in_action", "empty_dict", "no_space", "close_raises"),
        )
    },
    "wrong shape in mid run": ("BrokenEnv", {"fault": "wrong_shape", "at": 12}),
    "NaN in mid run": ("BrokenEnv", {"fault": "nan_obs", "at": 12}),
    "NaN reward in mid run": ("BrokenEnv", {"fault": "nan_reward", "at": 12}),
    "a huge reward in mid run": ("BrokenEnv", {"fault": "huge_reward", "at": 12}),
    **{
        f"{fault.replace('_', ' ')} in mid run": ("BrokenEnv", {"fault": fault, "at": 12})
        for fault in ("flag_is_text", "flag_is_none", "flags_are_two", "flag_is_nan")
    },
    "an exception in mid run": ("BrokenEnv", {"fault": "raises", "at": 12}),
    "unknown argument": ("CounterEnv", {"lenght": 3}),
    "a function that is none": ("make_counter", {}),
    "other spaces every time": ("GrowingEnv", {}),
    "no such class": ("CountEnv", {}),
}


def use(name: str, kwargs: dict[str, Any]) -> None:
    """Probe a task, make two of it, and take some steps."""
    env_id = f"helpers.envs:{name}"
    spec = probe_env(env_id, kwargs)
    envs = SeedVectorEnv.make(env_id, kwargs, 2, spec=spec)
    try:
        envs.reset()
        for _ in range(20):
            envs.step(np.zeros((1, 2), np.int64))
    finally:
        envs.close()


def test_every_broken_environment_has_an_error_of_its_own(tried: Tried) -> None:
    said = {}
    for name, (env, kwargs) in ENVIRONMENTS.items():
        with pytest.raises((EnvError, ConfigError, SpecMismatch)) as caught:
            use(env, kwargs)
        assert "\n" not in str(caught.value), name
        assert env in str(caught.value), name
        said[name] = str(caught.value)
    tried("broken environments", "-", len(said), len(said) - len(set(said.values())))
    assert len(said) >= 15
    assert len(set(said.values())) == len(said)


def test_an_episode_that_never_ends_ends_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "LONGEST_EPISODE", 100)
    endless: dict[str, Any] = {"env_id": "helpers.envs:CounterEnv", "env_kwargs": {"length": 10**6}}
    with pytest.raises(EnvError, match=r"not ended after 100 steps; set env_kwargs\.max_episode"):
        train(tiny_config("dqn", tmp_path, **endless))
    assert list_checkpoints(tmp_path / "run")


@pytest.mark.parametrize("algo", algorithm_names())
def test_every_mistyped_key_is_answered_with_the_right_one(algo: str, tried: Tried) -> None:
    spec = get_algorithm_spec(algo)
    base = {"algo": algo, "env_id": "Pendulum-v1"}
    wrong = []
    names = [(name, False) for name in TrainConfig.model_fields if name not in base]
    names += [(name, True) for name in spec.config_class.model_fields]
    for name, inside in names:
        typo = f"{name[:2]}_{name[2:]}x"
        changes = {"algo_kwargs": {typo: 1}} if inside else {typo: 1}
        with pytest.raises(ConfigError) as caught:
            TrainConfig(**(base | changes))
        if f"did you mean {name}?" not in str(caught.value) or typo not in str(caught.value):
            wrong.append((name, str(caught.value)))
    tried("mistyped keys", algo, len(names), len(wrong))
    assert wrong == []


def refusal(algo: str, name: str) -> str:
    """What is said to a value that no field takes; nothing if it is taken."""
    try:
        small_config(algo, "runs", algo_kwargs={name: {"no such": ["thing"]}})
    except RLTrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("algo", algorithm_names())
def test_every_field_of_a_wrong_type_is_named_with_its_value(algo: str, tried: Tried) -> None:
    fields = get_algorithm_spec(algo).config_class.model_fields
    said = {name: refusal(algo, name) for name in fields}
    silent = [name for name, text in said.items() if name not in text or "\n" in text]
    tried("fields of a wrong type", algo, len(fields), len(silent))
    assert silent == []

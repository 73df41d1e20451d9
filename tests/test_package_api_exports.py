"""Every name that callers import is where the documentation says."""

from __future__ import annotations

import importlib

import pytest

import rl_training
import rl_training.api
import rl_training.api.algorithms
from rl_training.api.agent import Agent
from rl_training.errors import ConfigError
from rl_training.experiment.registry import algorithm_names, class_names, get_algorithm_spec

CLASSES = sorted(class_names())
PATHS = {
    "rl_training": ["TrainConfig", "__version__", "SAC", "PPO", "DQN", "SACAlgorithm"],
    "rl_training.api": ["Agent", "SAC", "PPO", "DQN"],
    "rl_training.api.algorithms": ["SAC", "PPO", "DQN"],
    "rl_training.algorithms.sac": ["SAC", "SACConfig", "sac_loss", "SPEC"],
    "rl_training.algorithms.ppo": ["PPO", "PPOConfig", "ppo_loss", "SPEC"],
    "rl_training.algorithms.dqn": ["DQN", "DQNConfig", "dqn_loss", "SPEC"],
    "rl_training.models": ["MLPSACModel"],
    "rl_training.data": ["ReplayBuffer", "PrioritizedReplayBuffer"],
    "rl_training.runtime.sac_trainer": ["train_sac"],
    "rl_training.runtime.ppo_trainer": ["train_ppo"],
    "rl_training.runtime.dqn_trainer": ["train_dqn"],
    "rl_training.runtime.workflows": [
        "evaluate_checkpoint",
        "resume_training",
        "predict_from_checkpoint",
    ],
    "rl_training.runtime": ["Callback", "TrainResult", "TrainingInterrupted", "EvalResult"],
    "rl_training.experiment.config": ["TrainConfig", "load_config"],
    "rl_training.experiment.registry": ["get_algorithm_spec"],
    "rl_training.experiment.manager": ["ExperimentManager"],
    "rl_training.resources": ["find_packaged_asset"],
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in PATHS.items() for name in names]
)
def test_a_promised_name_can_be_imported(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


def test_the_three_lanes_are_registered() -> None:
    assert {"sac", "ppo", "dqn"} <= set(algorithm_names())
    assert {"SAC", "PPO", "DQN"} <= set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_the_managed_class_is_one_and_the_same_everywhere(name: str) -> None:
    managed = getattr(rl_training, name)
    assert managed is getattr(rl_training.api, name)
    assert managed is getattr(rl_training.api.algorithms, name)
    assert issubclass(managed, Agent)
    assert managed.algo == class_names()[name]
    assert managed.__name__ == name
    assert get_algorithm_spec(managed.algo).paper in managed.__doc__


@pytest.mark.parametrize("name", CLASSES)
def test_the_learner_is_exported_as_algorithm(name: str) -> None:
    spec = get_algorithm_spec(class_names()[name])
    assert getattr(rl_training, f"{name}Algorithm") is spec.learner
    assert not issubclass(spec.learner, Agent)


def test_dir_lists_what_can_be_imported() -> None:
    for module in (rl_training, rl_training.api, rl_training.api.algorithms):
        listed = dir(module)
        assert set(CLASSES) <= set(listed)
        assert all(hasattr(module, name) for name in listed)
    assert {"SACAlgorithm", "TrainConfig", "__version__"} <= set(dir(rl_training))
    assert (
        {"TrainConfig", "__version__"} <= set(vars(rl_training)["__all__"]) <= set(dir(rl_training))
    )


@pytest.mark.parametrize("module", [rl_training, rl_training.api, rl_training.api.algorithms])
@pytest.mark.parametrize("name", ["NoSuchThing", "NoSuchAlgorithm", "Algorithm", "_private"])
def test_other_names_are_attribute_errors(module: object, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(module, name)


def test_an_unknown_algorithm_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'sacc' is not an algorithm \(did you mean sac\?\)"):
        get_algorithm_spec("sacc")
    with pytest.raises(ConfigError, match=r"\(allowed: .*sac.*\)"):
        get_algorithm_spec("no_such_method_at_all")

"""Settings of offline data, what is loaded by them, and reference scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.datasets import TOY, columns_of, tiny_columns, toy_data, write_columns
from rl_training.algorithms.config import AlgoConfig
from rl_training.data import DatasetSettings, load_configured
from rl_training.data.datasets.blocks import Part
from rl_training.data.datasets.expert_config import ExpertSettings
from rl_training.data.datasets.scores import normalized_score, reference_scores
from rl_training.data.datasets.writers import save_dataset
from rl_training.errors import ConfigError, DataError
from rl_training.validation import parse


class LearnerConfig(AlgoConfig, DatasetSettings):
    """How the configuration of an offline method is made."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset_kind": "npz"}, "dataset_path is required with dataset_kind npz"),
        ({"dataset_kind": "minari"}, "dataset_id is required with dataset_kind minari"),
        ({"dataset_path": "a.csv"}, "whose name does not tell its kind .* give dataset_kind too"),
        (
            {"dataset_path": "a.npz", "dataset_kind": "minari"},
            "dataset_kind minari does not use it; change dataset_kind",
        ),
        (
            {"dataset_kind": "npz", "dataset_path": "a", "dataset_id": "b-v0"},
            "dataset_id is 'b-v0'",
        ),
        ({"dataset_kind": "nzp"}, "dataset_kind must be one of .* got 'nzp'"),
        ({"dataset_size": 0}, "dataset_size must be >= 1, got 0"),
        ({"dataset_mix": [{"kind": "npz"}]}, r"dataset_mix\[0\]: path is required with kind npz"),
        ({"dataset_mix": [{"kind": "random", "wieght": 1.0}]}, r"\[0\].wieght .*mean weight"),
        ({"dataset_mix": [{"kind": "random", "weight": 0.0}]}, r"\[0\].weight must be > 0"),
        (
            {"dataset_mix": [{"kind": "random"}], "dataset_path": "a.npz"},
            "give either dataset_mix, or dataset_path or dataset_id, not both",
        ),
        ({"reward_scale": float("nan")}, "reward_scale must be a finite number"),
    ],
)
def test_a_mistake_in_the_settings_is_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnerConfig(**values)


def test_every_setting_is_documented() -> None:
    assert [k for k, f in DatasetSettings.model_fields.items() if not f.description] == []


def test_random_data_is_loaded_in_learner_units_with_its_warning() -> None:
    data = load_configured(LearnerConfig(dataset_size=300, dataset_seed=5), TOY)
    assert len(data) == 300
    assert data.learner_units
    assert np.abs(data.actions).max() <= 1.0
    assert np.array_equal(data.observations, toy_data(300, seed=5).observations)
    assert "made up at random" in data.notes[0]


@pytest.mark.parametrize("kind", ["npz", "npy", "hdf5"])
def test_files_of_every_kind_give_the_same_data(kind: str, tmp_path: Path) -> None:
    save_dataset(toy_data(), tmp_path / "data", kind)
    settings = parse(
        DatasetSettings, {"dataset_kind": kind, "dataset_path": str(tmp_path / "data")}
    )
    expected = toy_data().in_learner_units(TOY).digest()
    assert load_configured(settings, TOY).digest() == expected


def test_rewards_are_normalized_then_scaled_then_shifted() -> None:
    options: dict[str, Any] = {"dataset_size": 400, "reward_scale": 0.5, "reward_shift": 2.0}
    data = load_configured(LearnerConfig(**options, normalize_rewards=True), TOY)
    returns = toy_data().episode_returns()
    factor = 1000.0 / (returns.max() - returns.min())
    assert np.allclose(data.rewards, toy_data().rewards * factor * 0.5 + 2.0, rtol=1e-4)


def test_actions_outside_the_box_are_clipped_only_when_asked(tmp_path: Path) -> None:
    columns = columns_of(toy_data())
    columns["actions"][0] = [9.0, 0.0]
    path = str(write_columns(tmp_path / "a.npz", columns))
    with pytest.raises(DataError, match=r"row 0: action .*normalize_dataset_actions: true clips"):
        load_configured(DatasetSettings(dataset_kind="npz", dataset_path=path), TOY)
    settings = DatasetSettings(
        dataset_kind="npz", dataset_path=path, normalize_dataset_actions=True
    )
    data = load_configured(settings, TOY)
    assert data.actions[0, 0] == 1.0
    assert "were clipped" in data.notes[-1]


def test_a_mix_keeps_ranges_and_weights(tmp_path: Path) -> None:
    save_dataset(toy_data(100, seed=9), tmp_path / "a.npz", "npz")
    mix: Any = [
        {"kind": "npz", "path": str(tmp_path / "a.npz"), "weight": 3.0},
        {"kind": "random"},
        {"kind": "random"},
    ]
    data = load_configured(LearnerConfig(dataset_mix=mix, dataset_size=200), TOY)
    assert [(part.start, part.stop, part.weight) for part in data.parts] == [
        (0, 100, 3.0),
        (100, 300, 1.0),
        (300, 500, 1.0),
    ]
    rows = data.observations
    assert not np.array_equal(rows[100:300], rows[300:500]), "two random sources differ"


def test_without_a_mix_there_is_one_part() -> None:
    data = load_configured(LearnerConfig(dataset_size=100), TOY)
    assert data.parts == (Part(start=0, stop=100, weight=1.0, name="random dataset"),)


def test_data_of_another_task_is_refused(tmp_path: Path) -> None:
    path = str(write_columns(tmp_path / "a.npz", tiny_columns()))
    with pytest.raises(DataError, match=r"a.npz: observations have shape \(1,\), but Toy-v0"):
        load_configured(DatasetSettings(dataset_kind="npz", dataset_path=path), TOY)


# Reference scores


@pytest.mark.parametrize(
    ("name", "random", "expert"),
    [
        ("halfcheetah-medium-v2", -280.178953, 12135.0),
        ("hopper-medium-replay-v0", -20.272305, 3234.3),
        ("Walker2d-v5", 1.629008, 4592.3),
        ("mujoco/halfcheetah/expert-v0", -280.178953, 12135.0),
        ("mujoco/ant/simple-v0", -325.6, 3879.7),
        ("Ant-v4", -325.6, 3879.7),
        ("antmaze-umaze-diverse-v2", 0.0, 1.0),
        ("D4RL/antmaze/large-play-v1", 0.0, 1.0),
        ("AntMaze_UMaze-v4", 0.0, 1.0),
        ("D4RL/door/human-v2", -56.512833, 2880.5693087298737),
        ("AdroitHandPen-v1", 96.262799, 3076.8331017826877),
        ("maze2d-large-dense-v1", 30.569041, 303.4857382709002),
        ("maze2d-large-v1", 6.7, 273.99),
    ],
)
def test_names_of_all_three_kinds_find_their_scores(
    name: str, random: float, expert: float
) -> None:
    scores = reference_scores(name)
    assert scores is not None
    assert (scores.random, scores.expert) == (random, expert)
    assert normalized_score(name, random) == pytest.approx(0.0)
    assert normalized_score(name, expert) == pytest.approx(100.0)


def test_a_score_is_linear_in_the_return() -> None:
    middle = (-20.272305 + 3234.3) / 2
    assert normalized_score("hopper-expert-v2", middle) == pytest.approx(50.0)


@pytest.mark.parametrize("name", ["Pendulum-v1", "bullet-hopper-medium-v0", "antique-v0"])
def test_other_tasks_have_no_scores(name: str) -> None:
    assert reference_scores(name) is None
    with pytest.raises(DataError, match="there are no reference scores"):
        normalized_score(name, 0.0)


def test_a_mistyped_task_is_pointed_out() -> None:
    with pytest.raises(DataError, match="did you mean halfcheetah"):
        normalized_score("halfchetah-medium-v2", 0.0)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"path": "a.npz"}, "npz"),
        ({"path": "a.HDF5"}, "hdf5"),
        ({"path": "a.h5"}, "hdf5"),
        ({"path": "folder"}, "npy"),
        ({"path": "a.npz", "kind": "random"}, "npz"),
        ({"path": "strange.h5", "kind": "npz"}, "npz"),
        ({"id": "mujoco/hopper/expert-v0"}, "minari"),
        ({}, "random"),
    ],
)
def test_the_kind_is_told_from_what_names_the_data(values: dict[str, str], kind: str) -> None:
    given = {f"dataset_{name}": value for name, value in values.items()}
    assert parse(LearnerConfig, given).dataset_kind == kind
    expert = {f"expert_dataset_{name}": value for name, value in values.items()}
    assert parse(ExpertSettings, expert).expert_dataset_kind == kind
    if values:
        mixed = parse(LearnerConfig, {"dataset_mix": [values]})
        assert mixed.dataset_mix[0].kind == kind

"""Minari datasets: read and written with the real library, in a folder of their own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector.episode_buffer import EpisodeBuffer

from helpers.datasets import SWITCH, TOY, columns_of, rebuilt, toy_data
from helpers.envs import GridActionEnv
from rl_training.data import load_transition_dataset
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.minari import write_minari
from rl_training.envs import make_env
from rl_training.errors import DataError, MissingExtraError
from rl_training.spaces import observation_spec
from rl_training.tools.collect import CollectPlan, collect_dataset

pytestmark = [
    # Minari asks for authors and an environment, which these small files do not have.
    pytest.mark.filterwarnings("ignore:`.*` is set to None:UserWarning"),
    pytest.mark.filterwarnings("ignore:env_spec is None:UserWarning"),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def load(dataset_id: str, **options: Any) -> OfflineDataset:
    return load_transition_dataset("minari", dataset_id=dataset_id, download=False, **options)


def play(env: gym.Env[Any, Any], steps: int) -> list[tuple[Any, ...]]:
    """Random steps: observation, action, reward, successor, terminated, truncated."""
    rows = []
    obs, _ = env.reset(seed=1)
    env.action_space.seed(1)
    for _ in range(steps):
        action = env.action_space.sample()
        successor, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, reward, successor, terminated, truncated))
        obs = env.reset()[0] if terminated or truncated else successor
    return rows


def store(dataset_id: str, observations: Any, length: int, **changes: Any) -> None:
    """One episode written by Minari's own function."""
    episode: dict[str, Any] = {
        "observations": observations,
        "actions": np.zeros((length, 1), np.float32),
        "rewards": [1.0] * length,
        "terminations": [False] * (length - 1) + [True],
        "truncations": [False] * length,
    }
    spaces_ = {
        "observation_space": spaces.Box(-9, 9, (2,)),
        "action_space": spaces.Box(-1, 1, (1,)),
    }
    spaces_ |= {name: changes.pop(name) for name in list(changes) if name in spaces_}
    buffer = [EpisodeBuffer(**(episode | changes))]
    minari.create_dataset_from_buffers(dataset_id=dataset_id, buffer=buffer, **spaces_)


@pytest.fixture
def collector_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari's collector takes one function from jax, a large package: stand in if it is absent."""
    if importlib.util.find_spec("jax") is not None:
        return

    def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
        if isinstance(tree, dict):
            return {key: tree_map(function, tree[key], *(o[key] for o in others)) for key in tree}
        return function(tree, *others)

    jax, tree_util = ModuleType("jax"), ModuleType("jax.tree_util")
    monkeypatch.setattr(tree_util, "tree_map", tree_map, raising=False)
    monkeypatch.setattr(jax, "tree_util", tree_util, raising=False)
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.tree_util", tree_util)


@pytest.mark.usefixtures("collector_works")
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
def test_what_the_collector_of_minari_stores_is_read_step_by_step(env_id: str) -> None:
    env = minari.DataCollector(gym.make(env_id, max_episode_steps=40))
    rows = play(env, 100)
    folders = [env._tmp_dir]
    env.create_dataset(dataset_id="own/played-v0")
    env.close()
    for folder in (*folders, env._tmp_dir):
        folder.cleanup()  # It leaves this to the interpreter, which warns about it.
    data = load("own/played-v0")
    assert len(data) == 100
    for place, (name, column) in enumerate(data.columns()):
        expected = np.array([row[place] for row in rows]).reshape(column.shape)
        if name == "truncations":
            expected[-1] |= not data.terminations[-1]  # The collector cuts the last episode too.
        assert np.allclose(column, expected), name
    assert data.env_id == env_id


@pytest.mark.parametrize("task", [TOY, SWITCH], ids=["continuous", "discrete"])
def test_what_is_written_is_read_back_and_minari_reads_it_too(task: Any) -> None:
    data = toy_data(300, task=task)
    write_minari(data, "own/toy-v0")
    again = load("own/toy-v0")
    for name, column in again.columns():
        assert np.array_equal(column, getattr(data, name)), name
    stored = minari.load_dataset("own/toy-v0")
    assert (stored.total_steps, stored.total_episodes) == (300, data.num_episodes)
    episode = stored[0]
    assert len(episode.observations) == len(episode.rewards) + 1


def test_the_task_can_be_made_again_from_what_is_written() -> None:
    env = make_env("FrozenLake-v1", {"max_episode_steps": 7})
    task = TOY.model_copy(update={"obs_shape": (16,)})
    write_minari(toy_data(50, task=task), "own/lake-v0", env=env)
    env.close()
    again = minari.load_dataset("own/lake-v0").recover_environment()
    assert again.spec is not None
    assert (again.spec.id, again.spec.max_episode_steps) == ("FrozenLake-v1", 7)
    again.close()


def test_images_are_stored_without_loss() -> None:
    task = TOY.model_copy(update={"obs_shape": (8, 8, 3), "obs_dtype": "uint8"})
    data = toy_data(40, task=task)
    write_minari(data, "own/images-v0")
    assert np.array_equal(load("own/images-v0").observations, data.observations)


def test_dict_observations_are_laid_side_by_side() -> None:
    space = spaces.Dict({"b": spaces.Box(-9, 9, (2,)), "a": spaces.Box(-9, 9, (1,))})
    values = {"a": np.full((4, 1), 1.0, np.float32), "b": np.full((4, 2), 2.0, np.float32)}
    store("own/dict-v0", values, 3, observation_space=space)
    assert load("own/dict-v0").observations[0].tolist() == [1.0, 2.0, 2.0]


def test_discrete_observations_become_one_hot() -> None:
    store("own/cells-v0", np.array([2, 1, 3]), 2, observation_space=spaces.Discrete(3, start=1))
    data = load("own/cells-v0")
    assert data.observations.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert data.next_observations[-1].tolist() == [0.0, 0.0, 1.0]


def test_episodes_without_an_end_are_marked_truncated() -> None:
    store("own/open-v0", np.zeros((4, 2), np.float32), 3, terminations=[False] * 3)
    data = load("own/open-v0")
    assert data.truncations.tolist() == [False, False, True]
    assert data.notes == ("1 episodes have no end and were marked truncated",)


def test_nan_in_a_minari_dataset_is_refused() -> None:
    store("own/nan-v0", np.full((4, 2), np.nan, np.float32), 3)
    with pytest.raises(DataError, match="minari own/nan-v0: observations holds NaN"):
        load("own/nan-v0")
    assert len(load("own/nan-v0", allow_nan=True)) == 3


def test_spaces_no_learner_takes_are_named() -> None:
    space = spaces.Dict(a=spaces.Box(-9, 9, (2,)), b=spaces.Text(4))
    values = {"a": np.zeros((3, 2), np.float32), "b": ["x", "y", "z"]}
    store("own/text-v0", values, 2, observation_space=space)
    message = r"minari own/text-v0: part 'b' of its observation space is Text.* allowed are Box"
    with pytest.raises(DataError, match=message):
        load("own/text-v0")


def test_observations_of_several_parts_are_the_rows_of_the_task() -> None:
    """Nested, with an image, a byte before floats, and a mask that allows nothing at the end."""
    number = spaces.Box(-9, 9, (2,), np.float64)
    space = spaces.Dict(
        a=spaces.Tuple((spaces.Box(0, 255, (1,), np.uint8), number)),
        camera=spaces.Box(0, 255, (6, 6, 2), np.uint8),
        door=spaces.Discrete(3, start=1),
        action_mask=spaces.MultiBinary(2),
    )
    generator = np.random.default_rng(0)
    values: dict[str, Any] = {
        "a": (np.array([[1], [2], [3]], np.uint8), generator.normal(size=(3, 2))),
        "camera": generator.integers(0, 256, (3, 6, 6, 2)).astype(np.uint8),
        "door": np.array([1, 3, 2]),
        "action_mask": np.array([[1, 0], [0, 1], [0, 0]], np.int8),
    }
    both: dict[str, Any] = {"observation_space": space, "action_space": spaces.Discrete(2)}
    store("own/parts-v0", values, 2, actions=np.array([0, 1]), **both)
    data, parts = load("own/parts-v0"), observation_spec(space, "mine", (2,))
    rows = parts.pack(values, 1, ended=True)
    np.testing.assert_array_equal(data.observations, rows[:2], strict=True)
    np.testing.assert_array_equal(data.next_observations, rows[1:], strict=True)
    assert parts.allowed(rows).tolist() == [[True, False], [False, True], [True, True]]


def test_a_part_that_is_not_finite_is_named() -> None:
    space = spaces.Dict(a=spaces.Box(-9, 9, (2,)))
    store("own/nan-v0", {"a": np.full((3, 2), np.nan, np.float32)}, 2, observation_space=space)
    with pytest.raises(DataError, match="minari own/nan-v0: a holds nan, which is not a finite"):
        load("own/nan-v0")


def test_a_broken_chain_cannot_be_written() -> None:
    columns = columns_of(toy_data(60))
    columns["next_observations"][4] += 1
    with pytest.raises(DataError, match="the successor of row 4 is not the observation of row 5"):
        write_minari(rebuilt(columns), "own/broken-v0")


def test_actions_of_two_axes_are_written_as_the_task_takes_them_and_read_back() -> None:
    data = collect_dataset(CollectPlan(env_id="helpers.envs:GridActionEnv", steps=20))
    write_minari(data, "own/grid-v0", env=GridActionEnv())
    (first, *_) = minari.load_dataset("own/grid-v0").iterate_episodes()
    assert first.actions.shape == (10, 2, 3)
    np.testing.assert_array_equal(load("own/grid-v0").actions, data.actions)


def test_an_id_is_not_taken_twice() -> None:
    write_minari(toy_data(30), "own/toy-v0")
    with pytest.raises(DataError, match="minari own/toy-v0: it exists already"):
        write_minari(toy_data(30), "own/toy-v0")


@pytest.mark.parametrize("wrong", ["hopper", "mujoco/hopper/expert", "../x-v0", "a b-v0"])
def test_ids_of_another_form_are_refused(wrong: str) -> None:
    with pytest.raises(DataError, match="must look like mujoco/hopper/expert-v0"):
        load(wrong)


def test_a_dataset_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match="minari own/none-v0: it is not in the local folder"):
        load("own/none-v0")


def test_a_download_without_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(dataset_id: str) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("minari.storage.hosting.download_dataset", no_network)
    with pytest.raises(DataError, match=r"could not be downloaded \(ConnectionError.*network"):
        load_transition_dataset("minari", dataset_id="mujoco/hopper/expert-v0")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(MissingExtraError, match=r"rl-training\[offline\]"):
        load("own/toy-v0")

"""Ends of episodes that a file does not mark: found, marked truncated, and learned from as such."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from helpers.datasets import TOY, columns_of, rebuilt, toy_data, write_columns
from helpers.tiny import run_cli, tiny_config
from rl_training.api.algorithms import managed_class
from rl_training.data import load_transition_dataset
from rl_training.data.datasets.config import DatasetSettings, open_configured
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.expert_config import ExpertSettings, load_expert
from rl_training.data.datasets.random import random_dataset
from rl_training.data.datasets.view import DatasetView
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.mapped import MappedBuffer
from rl_training.envs.factory import probe_env
from rl_training.envs.spec import EnvSpec
from rl_training.errors import DataError
from rl_training.ope.estimate import evaluate_offline, prepared
from rl_training.runtime.workflows import load_agent

KINDS = ("npz", "npy", "hdf5")
NO_LIMIT = TOY.model_copy(update={"max_episode_steps": None})
SAID = "unmarked ends of episodes"


def written(folder: Path, kind: str, columns: dict[str, Any]) -> Path:
    """A file of one kind that holds nothing but these columns."""
    path = folder / f"data.{kind}"
    if kind == "npz":
        np.savez(path, **columns)
    elif kind == "hdf5":
        with h5py.File(path, "w") as file:
            for name, column in columns.items():
                file[name] = column
    else:
        path.mkdir()
        for name, column in columns.items():
            np.save(path / f"{name}.npy", column)
    return path


def unmarked(data: OfflineDataset) -> dict[str, Any]:
    """Columns in the layout of `d4rl.qlearning_dataset`: terminals, no timeouts."""
    columns = columns_of(data)
    columns["terminals"] = columns.pop("terminations")
    del columns["truncations"]
    return columns


def opened(path: Path, kind: str, task: EnvSpec = NO_LIMIT, **settings: Any) -> DatasetView:
    options: dict[str, Any] = {"dataset_kind": kind, "dataset_path": str(path)} | settings
    return open_configured(DatasetSettings(**options), task)


@pytest.mark.parametrize("kind", KINDS)
def test_unmarked_ends_are_learned_from_as_if_they_were_marked(kind: str, tmp_path: Path) -> None:
    truth = toy_data(600)
    path = written(tmp_path, kind, unmarked(truth))
    rows = opened(path, kind)
    data = rows.datasets[0]
    np.testing.assert_array_equal(data.truncations, truth.truncations)
    np.testing.assert_array_equal(data.terminations, truth.terminations)
    np.testing.assert_array_equal(data.next_observations, truth.next_observations)
    count = int(truth.truncations[:-1].sum())
    assert count > 3
    assert any(f"{count} {SAID} were found" in note for note in rows.notes)
    scale = truth.with_normalized_rewards().reward_scale
    assert opened(path, kind, normalize_rewards=True).reward_scale == pytest.approx(scale)
    index = torch.arange(len(truth))[None]
    marked = DatasetBuffer(truth.in_learner_units(TOY), n_step=4).gather(index)
    buffers = [DatasetBuffer, MappedBuffer] if kind == "npy" else [DatasetBuffer]
    for buffer in buffers:
        batch = buffer(rows, n_step=4).gather(index)
        for name in ("reward", "discount", "next_obs"):
            torch.testing.assert_close(getattr(batch, name), getattr(marked, name), rtol=0, atol=0)
    # The last step of a cut episode has a future, which begins with its own next observation.
    last = np.flatnonzero(truth.truncations)
    assert (batch.discount[0, last] > 0).all()
    np.testing.assert_array_equal(batch.next_obs[0, last], truth.next_observations[last])


def test_a_marked_file_keeps_its_digest_and_notes(tmp_path: Path) -> None:
    truth = toy_data(300)
    path = write_columns(tmp_path / "a.npz", columns_of(truth))
    data = load_transition_dataset("npz", path=path, env_spec=TOY)
    assert (data.digest(), data.notes, data.in_time_order) == (truth.digest(), (), True)


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_link_tells_episodes_end_at_the_limit_of_the_task(
    kind: str, tmp_path: Path
) -> None:
    truth = toy_data(600)
    columns = unmarked(truth)
    lost = int(truth.truncations[:-1].sum())
    # No next observations: rows at an end have no known successor and are dropped.
    del columns["next_observations"]
    (tmp_path / "without").mkdir()
    path = written(tmp_path / "without", kind, columns)
    data = opened(path, kind, TOY).datasets[0]
    assert (data.num_episodes, len(data)) == (truth.num_episodes, 600 - lost - 1)
    assert data.episode_lengths().max() == 49
    assert any(f"{lost} {SAID} were found at the task's limit of 50" in n for n in data.notes)
    assert opened(path, kind).datasets[0].num_episodes < truth.num_episodes, "no limit, no end"
    # Next observations that run on into the next episode: those rows are dropped, too.
    columns["next_observations"] = np.roll(columns["observations"], -1, axis=0)
    (tmp_path / "rolled").mkdir()
    rolled = opened(written(tmp_path / "rolled", kind, columns), kind, TOY).datasets[0]
    assert rolled.num_episodes == truth.num_episodes
    if kind != "npy":  # mapped columns are never copied to leave rows out
        ends = rolled.episode_stops[rolled.truncations[rolled.episode_stops - 1]][:-1] - 1
        following = rolled.observations[ends + 1]
        assert (rolled.next_observations[ends] != following).any(1).all()


@pytest.mark.parametrize("said_by", ["truncations", "episode_ids"])
def test_a_file_that_says_where_it_was_cut_is_believed(said_by: str, tmp_path: Path) -> None:
    truth = toy_data(300)
    columns = columns_of(truth)
    if said_by == "episode_ids":
        del columns["truncations"]
        columns["episode_ids"] = np.repeat(np.arange(truth.num_episodes), truth.episode_lengths())
    path = write_columns(tmp_path / "a.npz", columns)
    shorter = TOY.model_copy(update={"max_episode_steps": 10})
    data = load_transition_dataset("npz", path=path, env_spec=shorter)
    np.testing.assert_array_equal(data.truncations, truth.truncations)
    assert not any(SAID in note for note in data.notes)


def test_rounding_does_not_end_an_episode_but_an_image_that_differs_does(tmp_path: Path) -> None:
    truth = toy_data(300)
    rough = truth.next_observations * np.float32(1 + 2e-7)
    path = write_columns(tmp_path / "a.npz", columns_of(truth), next_observations=rough)
    assert load_transition_dataset("npz", path=path).notes == ()
    images = np.repeat(np.arange(8, dtype=np.uint8), 4).reshape(8, 2, 2)
    following = np.minimum(images + 1, 7)
    following[3, 0, 0] = 255
    flat = {
        "actions": np.zeros(8, np.int64),
        "rewards": np.ones(8),
        "dones": np.eye(8, dtype=bool)[7],
    }
    pixels = write_columns(
        tmp_path / "b.npz", flat, observations=images, next_observations=following
    )
    assert load_transition_dataset("npz", path=pixels).episode_stops.tolist() == [4, 8]


def test_rows_out_of_order_are_single_steps_and_have_no_episodes(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(400)
    columns = {name: column[order] for name, column in columns_of(toy_data(400)).items()}
    path = write_columns(tmp_path / "a.npz", columns)
    rows = opened(path, "npz", TOY)
    assert any("shuffled or thinned out" in note for note in rows.notes)
    index = torch.from_numpy(np.flatnonzero(rows.datasets[0].ends))[None]
    assert index.shape[1] > 390  # a few rows stay neighbours by chance
    one, many = (DatasetBuffer(rows, n_step=n).gather(index) for n in (1, 5))
    torch.testing.assert_close(many.reward, one.reward)
    expert: dict[str, Any] = {"expert_dataset_kind": "npz", "expert_dataset_path": str(path)}
    openers: dict[str, Callable[[], object]] = {
        "normalize_rewards": lambda: opened(path, "npz", normalize_rewards=True),
        "dataset_trajectories": lambda: opened(path, "npz", dataset_trajectories=2),
        "expert_subsample": lambda: load_expert(ExpertSettings(**expert, expert_subsample=2), TOY),
        "expert_trajectories": lambda: load_expert(
            ExpertSettings(**expert, expert_trajectories=2), TOY
        ),
    }
    for setting, open_it in openers.items():
        with pytest.raises(DataError, match=f"{setting} needs whole episodes") as raised:
            open_it()
        assert "\n" not in str(raised.value)


def test_trajectories_of_demonstrations_are_counted_by_the_ends_that_were_found(
    tmp_path: Path,
) -> None:
    truth = toy_data(400)
    path = write_columns(tmp_path / "a.npz", unmarked(truth))
    settings = ExpertSettings(
        expert_dataset_kind="npz", expert_dataset_path=str(path), expert_trajectories=3
    )
    expert = load_expert(settings, TOY)
    assert len(expert) == truth.episode_stops[2]
    mixed = opened(path, "npz", dataset_trajectories=3)
    assert len(mixed) == truth.episode_stops[2]


def test_offline_evaluation_starts_at_the_ends_that_were_found(tmp_path: Path) -> None:
    truth = random_dataset(probe_env("Pendulum-v1"), 300, 0)
    config = tiny_config("sac", tmp_path)
    agent = load_agent(
        managed_class(config.algo)(config).save(tmp_path / "a.safetensors"), device="cpu"
    )
    path = write_columns(tmp_path / "a.npz", unmarked(truth))
    unmarked_object = rebuilt(columns_of(truth), truncations=np.zeros(300, bool))
    for source in (path, str(path), unmarked_object):
        said: list[str] = []
        data = prepared(source, agent, said.append)
        np.testing.assert_array_equal(data.episode_starts, truth.episode_starts)
        assert any(SAID in sentence for sentence in said)
    order = np.random.default_rng(0).permutation(300)
    shuffled = rebuilt({name: column[order] for name, column in columns_of(truth).items()})
    with pytest.raises(DataError, match="not in time order"):
        evaluate_offline(agent, shuffled)


def test_data_check_still_reports_what_training_mends_and_convert_writes_it_down(
    tmp_path: Path,
) -> None:
    truth = toy_data(400)
    path = write_columns(tmp_path / "a.npz", unmarked(truth))
    outcome = run_cli("data", "check", path, "--json")
    assert outcome.code == 1
    findings = json.loads(outcome.out)["findings"]
    (chain,) = [finding for finding in findings if finding["check"] == "broken_chain"]
    assert chain["count"] == int(truth.truncations[:-1].sum())
    assert run_cli("data", "convert", path, tmp_path / "b.npz").code == 0
    assert run_cli("data", "check", tmp_path / "b.npz").code == 0

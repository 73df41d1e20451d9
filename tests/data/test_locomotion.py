"""Locomotion sets: which policy is medium, what the rows are, and scores from the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny import run_cli, tiny_config
from rl_training.data.datasets.check import check_dataset
from rl_training.data.datasets.scores import ReferenceScores
from rl_training.data.datasets.sources import file_scores
from rl_training.envs.factory import probe_env
from rl_training.errors import DataError
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent
from rl_training.tools.recipes import locomotion
from rl_training.tools.recipes.locomotion import (
    Policies,
    Request,
    find_level,
    gather,
    make_locomotion,
    medium_step,
    name_of,
    replayed,
)

pytest.importorskip("mujoco")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SAC on Hopper of 96 steps in two environments, with all its checkpoints."""
    config = tiny_config(
        "sac",
        tmp_path_factory.mktemp("run"),
        env_id="Hopper-v5",
        env_kwargs={},
        total_timesteps=96,
        checkpoint_interval=16,
        keep_checkpoints=100,
        num_envs=2,
        algo_kwargs={"eval_interval": 16},
    )
    return train(config).run_dir


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few environments, and reference returns that need no 100 episodes."""
    monkeypatch.setattr(locomotion, "LANES", 4)
    monkeypatch.setattr(locomotion, "_reference", lambda *_: ReferenceScores(10.0, 110.0))
    monkeypatch.chdir(tmp_path)


def policies(run: Path) -> Policies:
    config = TrainConfig(algo="sac", env_id="Hopper-v5")
    return Policies(run, config, list_checkpoints(run)[-1].path)


def make(level: str, run: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"run": run, "rows": 300} | changes
    return make_locomotion(Request(name=f"hopper-{level}", **settings))


# Names and sizes


def test_names_have_a_task_and_a_level() -> None:
    assert find_level("walker2d-medium-replay") == ("walker2d", "medium-replay")
    for wrong in ("hopper", "hopper-good", "humanoid-expert", "hopper-medium-v2"):
        with pytest.raises(DataError, match="each with random, medium, medium-replay"):
            find_level(wrong)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows": 10, "fraction": 0.1}, "either --rows or --fraction"),
        ({"rows": None, "fraction": 2.0}, "at most 1"),
        ({"rows": 1}, "--rows must be >= 2"),
    ],
)
def test_wrong_sizes_are_refused(changes: dict[str, Any], sentence: str, run: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        make("random", run, **changes)


def test_a_replay_has_its_own_size(run: Path) -> None:
    with pytest.raises(DataError, match="takes neither --rows nor --fraction"):
        make("medium-replay", run)


# The medium policy


def test_medium_is_a_third_of_the_way_in_performance(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns = {16: 0.0, 32: 25.0, 48: 90.0, 64: 45.0, 80: 100.0, 96: 110.0}
    monkeypatch.setattr(locomotion, "evaluations", lambda _: returns)
    # 43.3 is a third of the way from 10 to 110.
    assert medium_step(policies(run), ReferenceScores(10.0, 110.0)) == 64


def test_without_a_medium_checkpoint_there_is_no_medium_data(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locomotion, "evaluations", lambda _: {80: 100.0, 96: 110.0})
    with pytest.raises(DataError, match=r"nearest, at step 80, has 90%.*keep_checkpoints"):
        medium_step(policies(run), ReferenceScores(10.0, 110.0))
    monkeypatch.setattr(locomotion, "evaluations", lambda _: {81: 40.0})
    with pytest.raises(DataError, match="no checkpoint at a step at which it was evaluated"):
        medium_step(policies(run), ReferenceScores(10.0, 110.0))


# Rows


def test_gathered_rows_follow_each_other_and_are_the_same_again(run: Path) -> None:
    agent = load_agent(run, device="cpu")
    first, again = (gather("Hopper-v5", agent, 300, 3) for _ in range(2))
    assert first.digest() == again.digest() != gather("Hopper-v5", agent, 300, 4).digest()
    assert len(first) in (300, 301)
    spec = probe_env("Hopper-v5")
    assert [f for f in check_dataset(first, spec) if f.level != "note"] == []


def test_no_episode_is_cut_after_its_first_row() -> None:
    ends = np.array([0, 0, 1, 1, 0, 0, 0, 1], bool)  # two environments of four steps
    # Row 3 is an episode of one step at the end of its environment, so it may have been cut.
    assert locomotion._kept_rows(ends, 4, 3).tolist() == [0, 1, 2]
    assert locomotion._kept_rows(ends, 4, 4).tolist() == [0, 1, 2, 4, 5]
    assert locomotion._kept_rows(ends, 4, 5).tolist() == [0, 1, 2, 4, 5]


def test_a_replay_is_what_the_run_saw(run: Path) -> None:
    entry = next(e for e in list_checkpoints(run) if e.step == 64)
    config = TrainConfig(algo="sac", env_id="Hopper-v5", num_envs=2)
    data = replayed(entry.path, probe_env("Hopper-v5"), config)
    assert len(data) == 64
    later = replayed(list_checkpoints(run)[-1].path, probe_env("Hopper-v5"), config)
    assert len(later) == 96
    # Each environment's part of the earlier one is the beginning of its part of the later one.
    for start, other in ((0, 0), (32, 48)):
        np.testing.assert_array_equal(
            data.observations[start : start + 32], later.observations[other : other + 32]
        )
    assert [f for f in check_dataset(data) if f.check in ("broken_chain", "not_finite")] == []
    assert data.truncations[[31, 63]].all() or data.terminations[[31, 63]].any()
    assert np.abs(data.actions).max() <= 1.0


def test_a_replay_of_scaled_rewards_is_refused(run: Path) -> None:
    config = TrainConfig(algo="sac", env_id="Hopper-v5", algo_kwargs={"reward_scale": 2.0})
    with pytest.raises(DataError, match="learned from scaled rewards"):
        replayed(list_checkpoints(run)[-1].path, probe_env("Hopper-v5"), config)


def test_each_level_says_how_it_was_made(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locomotion, "evaluations", lambda _: {64: 45.0, 96: 110.0})
    made = {level: make(level, run)[1] for level in ("random", "medium", "expert")}
    made["medium-replay"] = make("medium-replay", run, rows=None)[1]
    both = made["medium-expert"] = make("medium-expert", run, rows=600)[1]
    for level, data in made.items():
        facts = data.provenance
        assert facts["recipe"] == f"locomotion/hopper-{level}"
        assert facts["scores"] == {"random": 10.0, "expert": 110.0}
        assert facts["behaviour_score"] == pytest.approx(facts["behaviour_return"] - 10.0)
        assert facts["digest"] == data.digest()
        assert facts.get("medium_step") == (64 if "medium" in level else None)
    assert len({data.digest() for data in made.values()}) == 5
    half = len(made["medium"])
    np.testing.assert_array_equal(both.observations[:half], made["medium"].observations)
    np.testing.assert_array_equal(both.actions[half:], made["expert"].actions)


def test_a_set_says_of_which_group_a_seed_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = tmp_path / "hopper" / "seed_1"
    member.mkdir(parents=True)
    assert name_of(member) == "seed_1"
    (member.parent / "config.yaml").touch()
    assert name_of(member) == "hopper/seed_1"
    monkeypatch.chdir(member)
    assert name_of(Path()) == "hopper/seed_1"


def test_normalised_scores_are_those_of_the_run(run: Path) -> None:
    path, data = make("expert", run)
    config = TrainConfig(algo="bc", env_id="Hopper-v5", algo_kwargs={"dataset_path": str(path)})
    assert config.scores == ReferenceScores(10.0, 110.0)
    shown = run_cli("data", "inspect", path)
    assert "D4RL" not in shown.out
    assert f"{data.episode_returns().mean() - 10.0:.1f} (mean return)" in shown.out
    for name in ("data.npz", "data.hdf5"):
        if name.endswith("hdf5"):
            pytest.importorskip("h5py")
        assert run_cli("data", "convert", path, name).code == 0
        assert file_scores(Path(name)) == config.scores


@pytest.mark.parametrize(
    "scores", [None, {}, {"random": 1.0}, {"random": 2.0, "expert": 1.0}, {"random": "a"}, [1, 2]]
)
def test_other_scores_are_not_believed(scores: Any, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps({"provenance": {"scores": scores}}))
    assert file_scores(folder) is None
    assert file_scores(tmp_path / "nowhere") is None
    (tmp_path / "no.npz").write_bytes(b"PK")
    assert file_scores(tmp_path / "no.npz") is None


# Runs that do not fit


def test_a_run_of_something_else_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a run of sac on Hopper-v5; this set is made from one"):
        make_locomotion(Request(name="ant-random", run=run, rows=10))
    with pytest.raises(DataError, match="has no checkpoints"):
        make("random", tmp_path)


def test_what_is_there_is_not_replaced(run: Path) -> None:
    make("random", run)
    with pytest.raises(DataError, match="exists already"):
        make("random", run)
    make("random", run, force=True)


def test_a_policy_no_better_than_random_is_no_expert(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(locomotion, "LANES", 1)
    monkeypatch.setattr(locomotion, "REFERENCE_EPISODES", 1)
    best = type("Result", (), {"metrics": {"eval_return_mean": -1e6}})
    monkeypatch.setattr(locomotion, "evaluate_agent", lambda *_, **__: best)
    with pytest.raises(DataError, match="no more than random actions"):
        locomotion._reference("Hopper-v5", load_agent(run, device="cpu"))


@pytest.mark.matrix
def test_without_a_run_one_is_trained_and_taken_up_again() -> None:
    words = ("data", "make", "locomotion/hopper-random", "--rows", 100, "--train-steps", 80)
    done = run_cli(*words)
    assert done.code == 0, done.err
    folder = Path("datasets/locomotion/runs/hopper-sac-seed0")
    assert len(list_checkpoints(folder)) >= 10
    assert "exists already" in run_cli(*words).sentence()
    again = run_cli(*words, "--force")  # the run is not trained again
    assert again.values["digest"] == done.values["digest"]
    assert "eval_return_mean" not in again.err

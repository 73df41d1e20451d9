"""Demonstrations: how many, which rows, and controls that demonstrate nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rl_training.cli.commands import app
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.demonstrations import first_episodes, thinned, with_shuffled_actions
from rl_training.data.datasets.expert_config import ExpertSettings, load_expert
from rl_training.data.datasets.random import random_dataset
from rl_training.data.datasets.writers import save_dataset
from rl_training.envs.factory import probe_env
from rl_training.errors import CheckpointError, ConfigError, DataError, RLTrainingError
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.logging import read_metrics
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent, resume_training
from rl_training.testing.contract import small_config
from rl_training.tools.gail_control import ControlReport, ControlRow, run_controls


def made_up(size: int = 400, seed: int = 0) -> OfflineDataset:
    return random_dataset(probe_env("CartPole-v1", {}), size, seed)


def expert_file(folder: Path, seed: int = 0) -> Path:
    path = folder / "expert.npz"
    save_dataset(made_up(seed=seed), path, "npz", force=True)
    return path


def from_file(path: Path, **settings: Any) -> dict[str, Any]:
    return {"expert_dataset_kind": "npz", "expert_dataset_path": str(path)} | settings


def test_the_first_episodes_are_taken_whole() -> None:
    dataset = made_up()
    few = first_episodes(dataset, 3, "expert_trajectories")
    assert few.num_episodes == 3
    assert np.array_equal(few.observations, dataset.observations[: dataset.episode_stops[2]])
    with pytest.raises(DataError, match="expert_trajectories asks for 999 episodes, but it holds"):
        first_episodes(dataset, 999, "expert_trajectories")


def test_thinning_keeps_every_kth_row_of_each_episode() -> None:
    dataset = made_up()
    thin = thinned(dataset, 4, seed=0)
    assert thin.num_episodes == dataset.num_episodes
    for index, length in enumerate(dataset.episode_lengths()):
        start, stop = thin.episode_starts[index], thin.episode_stops[index]
        rows = dataset.observations[dataset.episode_starts[index] :][:length]
        places = [
            int(np.flatnonzero((rows == row).all(1))[0]) for row in thin.observations[start:stop]
        ]
        assert places[0] < 4
        assert set(np.diff(places)) <= {4}
        assert places[-1] + 4 >= length


def test_shuffled_actions_leave_states_and_counts_but_no_relation() -> None:
    dataset = made_up(4000)
    # Actions that follow from the state, so that any relation left would show.
    fixed = replace(dataset, actions=(dataset.observations[:, 0] > 0).astype(np.int64))
    shuffled = with_shuffled_actions(fixed, seed=0)
    assert np.array_equal(shuffled.observations, fixed.observations)
    assert np.array_equal(np.bincount(shuffled.actions), np.bincount(fixed.actions))
    agreement = (shuffled.actions == fixed.actions).mean()
    share = fixed.actions.mean()
    assert agreement == pytest.approx(share**2 + (1 - share) ** 2, abs=0.03)
    assert "a control, not a demonstration" in shuffled.notes[-1]


def test_settings_choose_trajectories_rows_and_shuffling(tmp_path: Path) -> None:
    task = probe_env("CartPole-v1", {})
    path = str(expert_file(tmp_path))
    settings = ExpertSettings(
        expert_dataset_kind="npz",
        expert_dataset_path=path,
        expert_trajectories=4,
        expert_subsample=2,
        expert_shuffle_actions=True,
    )
    dataset = load_expert(settings, task)
    assert dataset.num_episodes == 4
    assert dataset.learner_units
    assert len(dataset.notes) == 2


def test_a_kind_without_its_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="expert_dataset_path is required with expert_dataset_ki"):
        ExpertSettings(expert_dataset_kind="npz")


def test_made_up_experts_are_marked_in_log_and_checkpoint(tmp_path: Path) -> None:
    result = train(small_config("gail", tmp_path, total_timesteps=32, eval_episodes=0))
    notes = [row["text"] for row in read_metrics(result.run_dir, "note")]
    assert "nothing can be learned from it" in notes[0]
    assert load_checkpoint(result.checkpoint_path).header["notes"] == notes


def test_a_run_is_not_resumed_with_other_demonstrations(tmp_path: Path) -> None:
    path = expert_file(tmp_path)
    config = small_config("gail", tmp_path, algo_kwargs=from_file(path))
    cut = train(config, stop_at=64)
    expert_file(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match="the dataset is not the one this run was trained on"):
        resume_training(cut.run_dir)
    expert_file(tmp_path)
    assert resume_training(cut.run_dir).metrics["global_step"] >= 160


def test_an_agent_acts_without_its_demonstrations(tmp_path: Path) -> None:
    path = expert_file(tmp_path)
    result = train(
        small_config(
            "gail", tmp_path, algo_kwargs=from_file(path), total_timesteps=32, eval_episodes=0
        )
    )
    path.unlink()
    assert load_agent(result.checkpoint_path).predict(np.zeros(4)) in (0, 1)


# Controls


def test_controls_run_three_times_and_are_told_apart(tmp_path: Path) -> None:
    path = expert_file(tmp_path)
    config = small_config(
        "gail", tmp_path, algo_kwargs=from_file(path), total_timesteps=32, seeds=[0, 1]
    )
    report = run_controls(config)
    assert [row.experts for row in report.rows] == ["real", "shuffled", "random"]
    assert all(len(row.returns) == 2 for row in report.rows)
    notes = [
        load_checkpoint(load_path).header["notes"]
        for row in report.rows
        for load_path in sorted((row.run_dir / "seed_0" / "checkpoints").iterdir())[:1]
    ]
    assert [any("control" in note for note in found) for found in notes] == [False, True, False]
    assert 5 < report.random_return < 60


def test_the_gap_is_a_share_of_the_way_from_random_to_expert() -> None:
    def row(experts: str, *returns: float) -> ControlRow:
        return ControlRow(experts=experts, run_dir=Path(), returns=returns)

    report = ControlReport(
        rows=(row("real", 400.0, 500.0), row("shuffled", 250.0), row("random", 50.0)),
        expert_return=520.0,
        random_return=20.0,
    )
    assert [report.share(found) for found in report.rows] == [0.0, 0.4, 0.8]
    assert report.imitates(0.4)
    assert not report.imitates(0.5)


SHORT = ["--set", "total_timesteps=256", "--set", "eval_episodes=1", "--set", "tensorboard=false"]


def test_the_command_prints_json_and_its_exit_code_tells(tmp_path: Path) -> None:
    options = ["gail-control", "--config", "gail/cartpole", "--json", "-q", *SHORT]
    options += ["--set", f"output_dir={tmp_path}", "--set", "algo_kwargs.expert_dataset_kind=npz"]
    options += ["--set", f"algo_kwargs.expert_dataset_path={expert_file(tmp_path)}"]
    options += ["--set", "algo_kwargs.num_steps=32", "--set", "device=cpu"]
    done = CliRunner().invoke(app, [*options, "--least-gap", "1e9"])
    assert done.exit_code == 1
    facts = json.loads(done.stdout)
    assert [run["experts"] for run in facts["runs"]] == ["real", "shuffled", "random"]
    assert facts["imitates"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "ppo/cartpole"], "needs a configuration of algo gail, got 'ppo'"),
        (["--config", "gail/cartpole"], "needs real demonstrations"),
    ],
)
def test_the_command_refuses_what_has_no_experts(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["gail-control", *options, *SHORT])
    assert isinstance(done.exception, RLTrainingError)
    assert message in str(done.exception)

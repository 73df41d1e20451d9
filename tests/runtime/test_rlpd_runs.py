"""Runs with prior data: pretraining that survives a cut, rewards on one scale, what is logged."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.datasets import toy_data
from helpers.traces import request_of, traced
from rl_training.algorithms.base import replay_step
from rl_training.algorithms.sources import replay_settings, rows_per_update
from rl_training.data.datasets.writers import save_dataset
from rl_training.data.replay.mixed import WithPrior
from rl_training.envs.factory import probe_env
from rl_training.errors import ConfigError
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime import replay as replays
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.compile.programs import frequent_phases, replay_sources
from rl_training.runtime.compile.worker import build as build_request
from rl_training.runtime.replay import make_replay
from rl_training.runtime.results import TrainingInterrupted, TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import build, flat_state, small_config

PRETRAINING = {"offline_pretrain_updates": 150}


def train_lines(result: TrainResult) -> list[dict[str, Any]]:
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line.get("kind", "train") == "train"]


def states_of(result: TrainResult) -> dict[str, Any]:
    loaded = load_checkpoint(result.checkpoint_path)
    rows = [dict(part) for _, part in loaded.read_segments("replay")]
    return {**loaded.states, "rows": rows}


class StopAfter(Callback):
    """Sends the process a signal after a number of passes, once."""

    def __init__(self, passes: int) -> None:
        self.left = passes

    def on_step(self, state: TrainerState) -> None:
        self.left -= 1
        if self.left == 0:
            assert state.step == 0, "the cut lies inside pretraining"
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.matrix
@pytest.mark.parametrize("passes", [1, 3, 5])
def test_a_run_cut_inside_pretraining_ends_in_the_same_bits(passes: int, tmp_path: Path) -> None:
    config = small_config("rlpd", tmp_path, total_timesteps=60, algo_kwargs=PRETRAINING)
    whole = train(config.replace(run_name="whole"), callbacks=[StopAfter(-1)])
    with pytest.raises(TrainingInterrupted) as cut:
        train(config.replace(run_name="cut"), callbacks=[StopAfter(passes)])
    saved = load_checkpoint(cut.value.checkpoint)
    done = saved.states["learner"]["num_updates"]["value"]
    assert done == min(32 * passes, 150)
    resumed = resume_training(cut.value.run_dir)
    assert compare_states(states_of(whole), states_of(resumed)) == []
    assert [line["step"] for line in train_lines(whole)] == [0, 40]
    for ours, theirs in zip(train_lines(resumed), train_lines(whole), strict=True):
        assert ours["critic_loss"] == theirs["critic_loss"]


@pytest.mark.matrix
def test_a_run_cut_after_pretraining_does_not_repeat_it(tmp_path: Path) -> None:
    config = small_config("rlpd", tmp_path, algo_kwargs=PRETRAINING, total_timesteps=100)
    report = verify_resume(config, 45)
    assert report.identical, report.lines()


def test_pretraining_saves_every_so_many_updates(tmp_path: Path) -> None:
    saves: list[int] = []

    class Watch(Callback):
        def on_checkpoint(self, state: TrainerState, paths: Any) -> None:
            state_of = load_checkpoint(paths[0]).states["learner"]
            saves.append(state_of["num_updates"]["value"])

    config = small_config(
        "rlpd", tmp_path, algo_kwargs=PRETRAINING, total_timesteps=1, eval_episodes=0
    )
    train(config, callbacks=[Watch()])
    assert saves == [64, 128, 150, 150]  # the first blocks past 50, 100 and 150, and the end


def test_the_log_and_the_result_tell_of_prior_data(tmp_path: Path) -> None:
    settings = {"offline_pretrain_updates": 10, "offline_batch_ratio": 0.25}
    result = train(small_config("rlpd", tmp_path, total_timesteps=80, algo_kwargs=settings))
    found = [
        [line[f"{n}"] for n in ("pretrain_updates_done", "offline_batch_size", "online_batch_size")]
        for line in train_lines(result)
    ]
    assert found == [[10, 8, 0], [10, 2, 6], [10, 2, 6]]
    assert result.metrics["pretrain_updates_done"] == 10
    assert result.metrics["offline_batch_size"] == 2
    assert result.metrics["online_batch_size"] == 6
    assert result.metrics["gradient_steps"] == 10 + 2 * 60


def test_sac_says_nothing_of_prior_data(tmp_path: Path) -> None:
    result = train(small_config("sac", tmp_path, total_timesteps=30))
    assert "pretrain_updates_done" not in result.metrics


def test_rewards_of_the_task_are_stored_on_the_scale_of_the_data(tmp_path: Path) -> None:
    settings = {"reward_scale": 0.1, "reward_shift": 2.0, "learning_starts": 60}
    plain = train(
        small_config("rlpd", tmp_path, total_timesteps=50, algo_kwargs={"learning_starts": 60})
    )
    scaled = train(small_config("rlpd", tmp_path, total_timesteps=50, algo_kwargs=settings))
    raw, ours = (
        np.concatenate([part["reward"].numpy() for part in states_of(result)["rows"]], 1)
        for result in (plain, scaled)
    )
    assert np.std(raw) > 0.1
    np.testing.assert_allclose(ours, 0.1 * raw + 2.0, rtol=1e-6)
    # What people read stays in the task's own units.
    assert plain.metrics["eval_return_mean"] == scaled.metrics["eval_return_mean"]


def test_without_prior_rows_a_narrow_run_is_sacs(tmp_path: Path) -> None:
    shared = {"num_critics": 1, "target_entropy": -1.0}
    narrow = {
        "offline_batch_ratio": 0.0,
        "num_target_critics": 1,
        "gradient_updates_per_step": 1,
        "use_layer_norm": False,
    }
    ours = train(small_config("rlpd", tmp_path, algo_kwargs=shared | narrow))
    sacs = train(small_config("sac", tmp_path, algo_kwargs=shared))
    mine = flat_state(load_checkpoint(ours.checkpoint_path).states["learner"])
    for name, value in flat_state(load_checkpoint(sacs.checkpoint_path).states["learner"]).items():
        assert torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(value)), name


@pytest.mark.matrix
def test_observations_are_standardised_by_the_prior_data_and_the_run_resumes(
    tmp_path: Path,
) -> None:
    config = small_config("rlpd", tmp_path, algo_kwargs={"normalize_observations": True})
    report = verify_resume(config, 70)
    assert report.identical, report.lines()
    saved = load_checkpoint(train(config.replace(total_timesteps=25)).checkpoint_path)
    assert saved.states["learner"]["obs_norm"]["count"] == 200  # the rows of the dataset


def test_every_gradient_step_of_a_round_draws_its_own_mixed_batch() -> None:
    learner, env = build("rlpd", (3, 5), gradient_updates_per_step=4)
    config: Any = learner.config
    replay = make_replay(config, env, 1, learner)
    assert isinstance(replay, WithPrior)
    replay.rows["obs"].fill_(1000.0)
    replay.set_inserted(50)
    drawn: list[list[int]] = []
    step = learner.step

    def watched(batch: Any) -> Any:
        drawn.append((batch.obs[..., 0] == 1000.0).sum(1).tolist())
        return step(batch)

    learner.step = watched  # type: ignore[method-assign]
    for _ in range(8):
        replay_step(learner, replay, rows_per_update(learner))
        learner.num_updates.value += 1
    assert drawn == [[4, 4]] * 8


@pytest.mark.parametrize(("rounds", "compiled"), [(1, [0]), (2, [0, 1]), (20, [0, 1]), (50, [1])])
def test_both_kinds_of_updates_are_compiled_at_the_papers_ratio(
    rounds: int, compiled: list[int]
) -> None:
    learner, _ = build("rlpd", gradient_updates_per_step=rounds, offline_pretrain_updates=7)
    assert frequent_phases(learner) == compiled


def data_folder(folder: Path) -> dict[str, Any]:
    """Settings of data that could stay on disk."""
    spec = probe_env("Pendulum-v1", {})
    save_dataset(toy_data(120, 0, spec), folder / "data", "npy")
    return {"dataset_kind": "npy", "dataset_path": str(folder / "data")}


def test_prior_data_on_disk_is_refused_with_a_way_out(tmp_path: Path) -> None:
    settings = data_folder(tmp_path) | {"dataset_storage": "mapped"}
    with pytest.raises(ConfigError, match=r"mapped is for offline training.* use device"):
        small_config("rlpd", tmp_path, algo_kwargs=settings)


def test_auto_copies_prior_data_to_the_device_or_says_that_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, env = build("rlpd", **data_folder(tmp_path))
    config: Any = learner.config
    needed = 120 * 4 * (3 + 3 + 1 + 3)
    monkeypatch.setattr(replays, "_free_bytes", lambda _: 100 * needed)
    replay = make_replay(config, env, 1, learner)
    assert isinstance(replay, WithPrior)
    assert replay.prior.rows["obs"].shape == (1, 120, 3)
    monkeypatch.setattr(replays, "_free_bytes", lambda _: needed - 1)
    with pytest.raises(ConfigError, match=r"the dataset .*data needs 0\.0 GiB"):
        make_replay(config, env, 1, learner)


@pytest.mark.matrix
@pytest.mark.parametrize("algo", ["rlpd", "iql"])
def test_the_compiling_process_traces_the_same_programs_without_the_prior_data(
    algo: str, tmp_path: Path
) -> None:
    settings = data_folder(tmp_path) | {"normalize_rewards": True, "n_step": 2}
    if algo == "iql":
        settings["online"] = {"buffer_capacity": 300}
    config = small_config(algo, tmp_path, seeds=[3, 5], algo_kwargs=settings)
    learner, env = build(algo, (3, 5), **config.algo_kwargs)
    kept = replay_settings(learner.config)
    assert kept is not None
    replay = make_replay(kept, env, 1, learner)
    replay.set_inserted(replay.capacity)
    ours = replay_sources(learner, replay, list(get_algorithm_spec(algo).metrics))
    (tmp_path / "data").rename(tmp_path / "gone")
    other, _, _, theirs = build_request(request_of(config, env, replay, tuple(ours)))
    assert ours.keys() == {"act", "update-0", *(["update-1"] if algo == "rlpd" else [])}
    for name, source in ours.items():
        assert traced(learner, source, env) == traced(other, theirs[name], env)

"""What one does with a run: evaluate, predict, resume, extend, go back, mend, share a folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers.tiny import STEPS, learner_digest, tiny_config
from rl_training import TrainConfig
from rl_training.algorithms.spec import Loop
from rl_training.errors import CheckpointError, ConfigError, DataError, RLTrainingError
from rl_training.experiment.checkpointing import (
    list_checkpoints,
    load_checkpoint,
    open_checkpoint,
    save_single_file,
)
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.experiment.runs import run_lock
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.results import TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import (
    evaluate_checkpoint,
    evaluate_group,
    load_agent,
    predict_from_checkpoint,
    resume_training,
)

OBS = [1.0, 0.0, 0.0]
NEEDED = {"global_step", "eval_return_mean", "eval_return_std", "eval_episodes"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run of SAC with checkpoints at 16, 32, 48 and 64."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_config("sac", folder, checkpoint_interval=16, keep_checkpoints=4)
    return train(config)


@pytest.fixture
def copy(finished: TrainResult, tmp_path: Path) -> Path:
    """A copy of that run, to be spoilt."""
    return Path(shutil.copytree(finished.run_dir, tmp_path / "copy"))


class Notes(Callback):
    """Keeps what a person should know."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, state: TrainerState, text: str) -> None:
        self.texts.append(text)


def steps_of(run: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(run)]


def damage(checkpoint: Path) -> None:
    """Flip one bit of the learner's tensors."""
    file = next(checkpoint.glob("*learner*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    os.chmod(file, 0o644)
    file.write_bytes(data)


def test_run_checkpoint_and_best_are_evaluated_and_predicted_with(finished: TrainResult) -> None:
    newest = evaluate_checkpoint(finished.run_dir, num_episodes=2, seed=3)
    assert newest.step == STEPS
    assert newest == evaluate_checkpoint(finished.checkpoint_path, 2, seed=3)
    older = finished.run_dir / "checkpoints" / "step_32"
    assert evaluate_checkpoint(older, 1).step == 32
    assert evaluate_checkpoint(finished.run_dir, 1, best=True).step == STEPS
    action = predict_from_checkpoint(finished.run_dir, OBS)
    np.testing.assert_array_equal(action, load_agent(finished.checkpoint_path).predict(OBS))
    assert not np.array_equal(action, predict_from_checkpoint(older, OBS))


def test_a_group_evaluates_each_member_alone(group: TrainResult) -> None:
    with pytest.raises(CheckpointError, match=r"holds several seeds; give one of them: .*seed_1"):
        evaluate_checkpoint(group.run_dir)
    for member in group.per_seed:
        assert evaluate_checkpoint(member.run_dir, 1).step == 48
    first, second = (predict_from_checkpoint(m.run_dir, OBS) for m in group.per_seed)
    assert not np.array_equal(first, second)


def test_a_group_meets_the_same_episodes_all_at_once(group: TrainResult, tmp_path: Path) -> None:
    together = evaluate_group(group.run_dir, 34, seed=3)  # more than one chunk of environments
    assert list(together) == [member.run_dir.name for member in group.per_seed]
    for member in group.per_seed:
        alone = evaluate_checkpoint(member.run_dir, 34, seed=3)
        found = together[member.run_dir.name]
        assert (found.step, len(found.returns)) == (48, 34)
        np.testing.assert_allclose(found.returns, alone.returns, rtol=1e-4)
    assert len({result.returns for result in together.values()}) == len(together)
    with pytest.raises(CheckpointError, match="is not the folder of a group"):
        evaluate_group(group.per_seed[0].run_dir, 1)
    with pytest.raises(DataError, match="num_episodes must be >= 1, got 0"):
        evaluate_group(group.run_dir, 0)


@pytest.mark.parametrize("which", ["nowhere", "empty"])
def test_a_folder_without_checkpoints_is_named(which: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for use in (evaluate_checkpoint, resume_training, load_agent):
        with pytest.raises(CheckpointError, match=which):
            use(tmp_path / which)


def test_a_saved_file_cannot_be_resumed(finished: TrainResult, tmp_path: Path) -> None:
    loaded = open_checkpoint(finished.run_dir, components={"learner"})
    file = save_single_file(tmp_path / "agent", header=loaded.header, states=loaded.states)
    with pytest.raises(CheckpointError, match="is a file; training is resumed from a run folder"):
        resume_training(file)


# Resuming


@pytest.mark.expensive
def test_a_resumed_run_is_the_uninterrupted_run(config: TrainConfig) -> None:
    report = verify_resume(config, 33)
    assert report.identical, report.lines()
    assert {"learner", "clock", "recorder", "stop_rule"} <= set(report.components)
    online = get_algorithm_spec(config.algo).loop is not Loop.OFFLINE
    assert ("collector" in report.components) is online
    assert report.resume_level == "exact"


@pytest.mark.parametrize("at", [0, STEPS])
def test_the_cut_must_lie_inside_the_run(sac_config: TrainConfig, at: int) -> None:
    with pytest.raises(ConfigError, match=f"--at must be between 1 and 63, got {at}"):
        verify_resume(sac_config, at)


def test_resuming_a_finished_run_changes_nothing(copy: Path) -> None:
    before = learner_digest(copy), (copy / "metrics.jsonl").read_bytes(), steps_of(copy)
    result = resume_training(copy)
    after = learner_digest(copy), (copy / "metrics.jsonl").read_bytes(), steps_of(copy)
    assert before == after
    assert result.metrics["global_step"] == STEPS


def test_resuming_a_finished_run_reports_the_same_figures(
    finished: TrainResult, copy: Path
) -> None:
    result = resume_training(copy)
    assert result.metrics.keys() >= NEEDED
    assert result.metrics == finished.metrics


def test_a_run_can_be_extended(copy: Path) -> None:
    result = resume_training(copy, total_timesteps=96)
    assert result.metrics["global_step"] == 96
    assert result.metrics.keys() >= NEEDED
    assert load_checkpoint(result.checkpoint_path).header["config"]["total_timesteps"] == 96
    assert [row["step"] for row in read_metrics(copy, "train")] == [16, 32, 48, 64, 80, 96]
    with pytest.raises(ConfigError, match="total_timesteps must be >= 1, got 0"):
        resume_training(copy, total_timesteps=0)


def test_going_back_moves_newer_checkpoints_aside_and_arrives_at_the_same_end(
    finished: TrainResult, copy: Path
) -> None:
    notes = Notes()
    result = resume_training(copy / "checkpoints" / "step_32", callbacks=[notes])
    assert notes.texts[0].startswith("continuing from step 32; later checkpoints (48, 64) were")
    assert learner_digest(copy) == learner_digest(finished.run_dir)
    assert result.checkpoint_path == copy / "checkpoints" / f"step_{STEPS}"
    (aside,) = copy.glob("superseded-*")
    assert sorted(p.name for p in aside.iterdir()) == ["step_48", "step_64"]
    # Those moved aside stay whole.
    assert learner_digest(aside / "step_64") == learner_digest(copy)


def test_an_environment_that_cannot_be_put_back_is_spoken_of(tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path, env_id="helpers.envs:UnseededEnv", eval_episodes=0)
    cut = train(config, stop_at=30)
    assert open_checkpoint(cut.run_dir).header["resume_level"] != "exact"
    notes = Notes()
    assert resume_training(cut.run_dir, callbacks=[notes]).metrics["global_step"] == STEPS
    assert "new episode" in notes.texts[0]


def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_used(
    finished: TrainResult, copy: Path
) -> None:
    damage(copy / "checkpoints" / "step_64")
    notes: list[str] = []
    assert evaluate_checkpoint(copy, 1, warn=notes.append).step == 48
    assert len(notes) == 1
    assert "damaged checkpoint passed over" in notes[0]
    assert "step_64" in notes[0]
    with pytest.raises(CheckpointError, match="step_64"):
        evaluate_checkpoint(copy / "checkpoints" / "step_64")
    notes.clear()
    resume_training(copy, warn=notes.append)
    assert len(notes) == 1
    assert learner_digest(copy) == learner_digest(finished.run_dir)


def test_when_all_are_damaged_each_is_named(copy: Path) -> None:
    for step in steps_of(copy):
        damage(copy / "checkpoints" / f"step_{step}")
    with pytest.raises(CheckpointError, match=r"no good checkpoint.*step_64.*step_16"):
        resume_training(copy)


def test_a_checkpoint_needs_neither_its_run_nor_its_configuration(
    finished: TrainResult, tmp_path: Path
) -> None:
    run = tmp_path / "bare"
    shutil.copytree(finished.run_dir / "checkpoints", run / "checkpoints")
    np.testing.assert_array_equal(
        predict_from_checkpoint(run, OBS), predict_from_checkpoint(finished.run_dir, OBS)
    )


# Groups of seeds


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """Two seeds of SAC side by side, cut at 48 of 64."""
    folder = tmp_path_factory.mktemp("group")
    config = tiny_config("sac", folder, seeds=[3, 1], checkpoint_interval=16)
    return train(config, stop_at=48)


@pytest.fixture
def group_copy(group: TrainResult, tmp_path: Path) -> Path:
    return Path(shutil.copytree(group.run_dir, tmp_path / "group"))


def test_a_group_has_a_folder_per_seed(group: TrainResult) -> None:
    assert [m.run_dir for m in group.per_seed] == [
        group.run_dir / "seed_3",
        group.run_dir / "seed_1",
    ]
    for member, seed in zip(group.per_seed, (3, 1), strict=True):
        assert load_checkpoint(member.checkpoint_path).header["config"]["seed"] == seed
        assert [row["step"] for row in read_metrics(member.run_dir, "train")] == [16, 32, 48]


def test_a_resumed_group_is_the_uninterrupted_group(group_copy: Path, tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path / "whole", seeds=[3, 1], checkpoint_interval=16)
    whole, resumed = train(config), resume_training(group_copy)
    assert resumed.run_dir == group_copy
    assert [m.run_dir.name for m in resumed.per_seed] == ["seed_3", "seed_1"]
    for left, right in zip(whole.per_seed, resumed.per_seed, strict=True):
        assert learner_digest(left.checkpoint_path) == learner_digest(right.checkpoint_path)
        assert left.metrics == right.metrics


def test_one_member_can_be_resumed_alone(group_copy: Path) -> None:
    result = resume_training(group_copy / "seed_1")
    assert result.run_dir == group_copy / "seed_1"
    assert result.metrics["global_step"] == STEPS
    assert result.per_seed == ()
    assert steps_of(group_copy / "seed_3") == [16, 32, 48]


def test_a_group_goes_back_to_the_newest_step_all_have(group_copy: Path) -> None:
    damage(group_copy / "seed_1" / "checkpoints" / "step_48")
    notes: list[str] = []
    result = resume_training(group_copy, warn=notes.append)
    assert result.metrics["global_step"] == STEPS
    assert len(notes) == 1
    assert "seed_1/checkpoints/step_48" in notes[0]
    shutil.rmtree(group_copy / "seed_1" / "checkpoints")
    (group_copy / "seed_1" / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no step that every seed has whole"):
        resume_training(group_copy)


# Two processes


def test_a_run_in_use_is_not_touched(copy: Path) -> None:
    before = steps_of(copy), (copy / "metrics.jsonl").read_bytes()
    with (
        run_lock(copy),
        pytest.raises(RLTrainingError, match="copy is in use by another process"),
    ):
        resume_training(copy, total_timesteps=96)
    assert before == (steps_of(copy), (copy / "metrics.jsonl").read_bytes())
    assert evaluate_checkpoint(copy, 1).step == STEPS


def test_a_group_in_use_holds_its_members_but_members_do_not_hold_each_other(
    group_copy: Path,
) -> None:
    with run_lock(group_copy), pytest.raises(RLTrainingError, match="seed_1 is in use"):
        resume_training(group_copy / "seed_1")
    with run_lock(group_copy / "seed_3"):
        assert resume_training(group_copy / "seed_1").metrics["global_step"] == STEPS
        with pytest.raises(RLTrainingError, match="seed_3 is in use"):
            resume_training(group_copy)


# What is kept


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    config = tiny_config(
        "ppo",
        tmp_path,
        total_timesteps=160,
        checkpoint_interval=16,
        keep_checkpoints=2,
        eval_episodes=3,
        algo_kwargs={"eval_interval": 16, "learning_rate": 0.05},
        env_kwargs={"max_episode_steps": 60},
    )
    run = train(config).run_dir
    means = {row["step"]: row["eval_return_mean"] for row in read_metrics(run, "eval")}
    best = min(step for step, mean in means.items() if mean == max(means.values()))
    assert best < 144, "the best must be an old one for this test to say anything"
    assert steps_of(run) == [best, 144, 160]
    assert json.loads((run / "best.json").read_text())["step"] == best
    assert evaluate_checkpoint(run, 1, best=True).step == best


def test_without_an_interval_only_the_end_is_saved(tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path, checkpoint_interval=0, eval_episodes=0)
    run = train(config).run_dir
    assert steps_of(run) == [STEPS]
    with pytest.raises(CheckpointError, match="was never evaluated"):
        evaluate_checkpoint(run, best=True)


# A checkpoint is data


def test_a_checkpoint_cannot_make_us_call_anything(finished: TrainResult, tmp_path: Path) -> None:
    loaded = open_checkpoint(finished.run_dir, components={"learner"})
    target = tmp_path / "made by a checkpoint"
    header = dict(loaded.header) | {"step": 1}
    header["config"] = header["config"] | {
        "env_id": "os:mkdir",
        "env_kwargs": {"path": str(target)},
    }
    file = save_single_file(tmp_path / "agent", header=header, states=loaded.states)
    with pytest.raises(RLTrainingError):
        evaluate_checkpoint(file, 1)
    assert not target.exists()

"""Runs that imagine: when things happen, cuts inside a fit, what is refused before a run begins."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.imagining import ACTION, OBS, imagine, make_learner
from rl_training.algorithms.dynamics.fit import DynamicsTrainer
from rl_training.algorithms.dynamics.imagination import Rules
from rl_training.algorithms.mbpo import MBPO
from rl_training.algorithms.mopo import MOPO
from rl_training.algorithms.sources import TransitionReplay
from rl_training.data.replay.mapped import MappedBuffer
from rl_training.envs.factory import probe_env
from rl_training.envs.tasks.functions import termination_function
from rl_training.errors import ConfigError, DataError, EnvError, SpecMismatch
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.compile import runner as running
from rl_training.runtime.compile.runner import ModelRunner
from rl_training.runtime.phases.imagination import (
    ImaginationPhase,
    fields_of,
    rules_for,
    synthetic_buffer,
)
from rl_training.runtime.replay import load_buffer, make_replay
from rl_training.runtime.results import TrainingInterrupted
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import build, flat_state, small_config

BOTH = pytest.mark.parametrize("algo", ["mopo", "mbpo"])


def steps_of(folder: Path, kind: str) -> list[int]:
    return [row["step"] for row in read_metrics(folder, kind)]


def test_mopo_fits_once_and_imagines_anew_at_fixed_updates(tmp_path: Path) -> None:
    # Neither the log at 40 nor the end of a block at 32 moves a refresh.
    result = train(small_config("mopo", tmp_path, total_timesteps=96))
    assert steps_of(result.run_dir, "model") == [0]
    assert steps_of(result.run_dir, "imagined") == [0, 25, 50, 75]


def test_mbpo_fits_and_imagines_at_fixed_steps(tmp_path: Path) -> None:
    schedule = {"rollout_schedule": [50, 100, 1, 2]}
    config = small_config("mbpo", tmp_path, total_timesteps=130, algo_kwargs=schedule)
    result = train(config)
    assert steps_of(result.run_dir, "model") == [20, 50, 100]
    rows = read_metrics(result.run_dir, "imagined")
    horizons = [(row["step"], row["rollout_horizon"]) for row in rows]
    assert horizons == [(20, 1), (25, 1), (50, 1), (75, 1), (100, 2), (125, 2)]
    imagined = load_checkpoint(result.checkpoint_path).states["imagined"]
    assert imagined["inserted"]["value"] == 24 * (4 + 2 * 2)
    assert imagined["kept"]["value"] == 2 * 2 * 24


def test_the_log_says_how_far_the_model_can_be_trusted(tmp_path: Path) -> None:
    result = train(small_config("mbpo", tmp_path, total_timesteps=60))
    fits, rollouts = (read_metrics(result.run_dir, kind) for kind in ("model", "imagined"))
    wanted = {"holdout_error_2", "epochs", "calibration_error", "penalty_correlation"}
    wanted |= {"r2_obs_2", "r2_reward", "within_1_sigma_obs_0", "within_1_sigma_reward"}
    assert wanted | {"mbpo_model_loss", "open_loop_error_5"} <= fits[0].keys()
    wanted = {"imagined_terminals", "exploitation", "exploitation_alarm", "rollout_length"}
    assert wanted <= rollouts[0].keys()
    trained = read_metrics(result.run_dir, "train")[-1]
    assert trained["mbpo_model_loss"] == pytest.approx(fits[-2]["mbpo_model_loss"])


@pytest.mark.parametrize("algo", ["mopo", pytest.param("mbpo", marks=pytest.mark.matrix)])
def test_a_run_cut_inside_a_fit_ends_in_the_same_bits(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = {"model_max_epochs": 4, "model_patience": 4}
    config = small_config(algo, tmp_path, seeds=[1, 2], total_timesteps=96, algo_kwargs=patient)
    whole = train(config.replace(run_name="whole"))
    fit = 1 if algo == "mbpo" else 0
    note = DynamicsTrainer._note

    def note_and_signal(trainer: DynamicsTrainer, error: Tensor, steps: int) -> None:
        note(trainer, error, steps)
        if (trainer.num_fits.value, trainer.epoch.value) == (fit, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(DynamicsTrainer, "_note", note_and_signal)
        with pytest.raises(TrainingInterrupted) as cut:
            train(config.replace(run_name="cut"))
    saved = load_checkpoint(cut.value.checkpoint)
    assert saved.step == (50 if algo == "mbpo" else 0)
    assert saved.states["learner"]["imagination"]["trainer"]["epoch"]["value"] == 2
    resumed = resume_training(cut.value.run_dir)
    for ours, theirs in zip(resumed.per_seed, whole.per_seed, strict=True):
        first = load_checkpoint(ours.checkpoint_path).states
        second = load_checkpoint(theirs.checkpoint_path).states
        for part in ("learner", "imagined", "imagination", "replay"):
            assert compare_states(first[part], second[part]) == [], part


def always(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    return torch.ones(next_obs.shape[:-1], dtype=torch.bool)


@pytest.mark.parametrize(("rule", "discount"), [(always, 0.0), (None, 0.99)])
def test_an_imagined_end_reaches_the_learner_as_discount_zero(rule: Any, discount: float) -> None:
    learner, env = build("mopo")
    assert isinstance(learner, MOPO)
    real, _ = load_buffer(learner, env)
    buffer = synthetic_buffer(learner.imagination, real)
    made = imagine(learner, torch.zeros(1, 24, OBS), 2, Rules(rule))
    buffer.extend(fields_of(made, made.reward), 48)
    batch = buffer.sample(200)
    assert (batch.discount[0, 10:] == discount).all()  # the first 10 are real


def test_known_rewards_are_on_the_scale_of_the_data() -> None:
    settings: dict[str, Any] = {"reward_function": "auto", "reward_scale": 0.1, "reward_shift": 2.0}
    learner, env = build("mopo", **settings)
    assert isinstance(learner, MOPO)
    real, _ = load_buffer(learner, env)
    reward = rules_for(learner.imagination, real, env, {}).reward
    assert reward is not None
    hanging = torch.tensor([[[-1.0, 0.0, 0.0]]])
    found = reward(hanging, torch.zeros(1, 1, ACTION), hanging)
    assert float(found) == pytest.approx(2.0 - 0.1 * math.pi**2, rel=1e-5)


def test_starts_are_real_states() -> None:
    learner, env = build("mbpo", seeds=(0, 1))
    assert isinstance(learner, MBPO)
    replay = make_replay(learner.part(TransitionReplay), env, 1, learner)
    replay.rows["obs"][:, :30] = torch.arange(30).float().view(1, 30, 1)
    replay.rows["obs"][1] += 100
    replay.set_inserted(30)
    session: Any = SimpleNamespace(env_spec=env, config=SimpleNamespace(env_kwargs={}), step=0)
    starts = ImaginationPhase(session, learner, replay).starts()
    assert starts.shape == (2, 24, OBS)
    assert 0 <= starts[0].min() <= starts[0].max() <= 29
    assert 100 <= starts[1].min() <= starts[1].max() <= 129


# Compiled steps of the model


@pytest.mark.parametrize(
    ("first", "updates", "epoch", "compiled"),
    [(math.inf, 10**6, 10**6, False), (0, 0, 0, True), (100, 99, 0, False), (100, 100, 0, True)],
)
def test_when_steps_of_the_model_are_compiled_depends_on_counts_alone(
    first: float, updates: int, epoch: int, compiled: bool
) -> None:
    learner = make_learner(MOPO)
    learner.num_updates.value, learner.imagination.trainer.epoch.value = updates, epoch
    runner: Any = SimpleNamespace(first_update=first)
    ours = ModelRunner(learner, learner.imagination, runner)
    ours._choose(torch.zeros(1, 100, 2 * OBS + ACTION + 2))
    assert (learner.imagination.trainer.run_step == ours._step) == compiled


def test_a_long_fit_changes_over_between_two_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "EAGER_SECONDS", 0.005)  # 13 steps of small networks
    learner = make_learner(MOPO, model_max_epochs=5, model_patience=5)
    used: list[int] = []

    def programs(sources: list[Any]) -> dict[str, Any]:
        def step(rows: Tensor) -> dict[str, Tensor]:
            used.append(learner.imagination.trainer.epoch.value)
            return learner.imagination.trainer.step(rows)

        return {source.name: step for source in sources}

    accelerator = SimpleNamespace(programs=programs, captures=False)
    runner: Any = SimpleNamespace(first_update=10**9, accelerator=accelerator)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 100, 2 * OBS + ACTION + 2, generator=generator)
    ModelRunner(learner, learner.imagination, runner).fit(rows, lambda: None)
    assert sorted(set(used)) == [3, 4]  # after 15 steps, 5 an epoch
    assert learner.imagination.trainer.run_step == learner.imagination.trainer.step


# What is refused


@termination_function
def of_the_wrong_shape(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    return next_obs > 0


@BOTH
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"algo_kwargs": {"termination_function": f"{__name__}:of_the_wrong_shape"}},
            EnvError,
            r"must give \[B\] bool for a batch of B rows, got \[5, 3\] bool",
        ),
        (
            {"algo_kwargs": {"model_learn_reward": False}},
            ConfigError,
            "model_learn_reward is false, so the reward must be known",
        ),
        (
            {"algo_kwargs": {"termination_function": "somewhere"}},
            EnvError,
            "'somewhere' is not the name of one",
        ),
        ({"task": "CartPole-v1"}, SpecMismatch, "needs continuous actions, but CartPole-v1"),
        (
            {"task": "helpers.envs:NoiseEnv", "env_kwargs": {}},
            ConfigError,
            "termination_function auto knows no rule for helpers.envs:NoiseEnv",
        ),
    ],
)
def test_a_mistake_stops_a_run_before_it_begins(
    algo: str, changes: dict[str, Any], error: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        train(small_config(algo, tmp_path, **changes))
    assert not list(tmp_path.iterdir())


def test_a_dataset_too_small_to_hold_rows_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be fitted to 4 transitions.*give 5 or more"):
        train(small_config("mopo", tmp_path, algo_kwargs={"dataset_size": 4}))
    assert not list(tmp_path.iterdir())


@BOTH
def test_images_are_refused(algo: str) -> None:
    env = probe_env("Pendulum-v1", {}).model_copy(update={"obs_shape": (8, 8, 3)})
    spec = get_algorithm_spec(algo)
    with pytest.raises(SpecMismatch, match=r"takes observations with 1 axis.*\(8, 8, 3\)"):
        spec.check_env(env, spec.config_class())


def test_data_that_stays_on_disk_is_refused() -> None:
    learner = make_learner(MOPO)
    real = MappedBuffer.__new__(MappedBuffer)
    with pytest.raises(ConfigError, match="set dataset_storage to device"):
        synthetic_buffer(learner.imagination, real)


def test_a_group_of_seeds_imagines_what_single_runs_do(tmp_path: Path) -> None:
    group = train(small_config("mbpo", tmp_path, seeds=[1, 2], total_timesteps=60))
    for seed, member in zip((1, 2), group.per_seed, strict=True):
        single = train(small_config("mbpo", tmp_path, seed=seed, total_timesteps=60))
        ours, alone = (read_metrics(result.run_dir, "imagined")[-1] for result in (member, single))
        assert ours["imagined_reward"] == pytest.approx(alone["imagined_reward"], rel=1e-3)
        first, second = (
            flat_state(load_checkpoint(result.checkpoint_path).states["imagined"])
            for result in (member, single)
        )
        assert first["inserted.value"] == second["inserted.value"]
        assert np.array_equal(first["rng.keys"], second["rng.keys"])

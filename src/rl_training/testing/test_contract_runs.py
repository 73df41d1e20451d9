"""The contract of runs, for every registered algorithm: train, resume, groups, predict, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.recorder import FOLD_AFTER
from rl_training.runtime.threads import thread_count
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent, predict_from_checkpoint, resume_training
from rl_training.testing.contract import (
    TASK,
    flat_state,
    has_settings,
    image_task,
    names_under_test,
    parts_tasks,
    small_config,
    takes_pixels,
)

every_algorithm = pytest.mark.parametrize("algo", names_under_test())
MIX = [{"kind": "random", "weight": 3.0}, {"kind": "random"}]
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "off_policy": {
        "three environments": {"num_envs": 3},
        "two seeds": {"seeds": [4, 9]},
        "n-step and priorities": {"algo_kwargs": {"n_step": 3, "prioritized": True}},
        "ring overwritten": {"algo_kwargs": {"buffer_capacity": 60, "train_frequency": 2}},
        "acting before updating": {"overlap": True, "seeds": [4, 9]},
    },
    "on_policy": {
        "three environments": {"num_envs": 3},
        "two seeds": {"seeds": [4, 9]},
        "schedules": {"algo_kwargs": {"lr_schedule": {"type": "cosine"}, "target_kl": 0.005}},
        "observation statistics": {"algo_kwargs": {"normalize_obs": True}},
    },
    # The cut at 70 lies inside a block of steps, after which schedules move.
    "offline": {
        "two seeds": {"seeds": [4, 9]},
        "n-step": {"algo_kwargs": {"n_step": 3}},
        "observation statistics": {"algo_kwargs": {"normalize_observations": True}},
        "observations as they are": {"algo_kwargs": {"normalize_observations": False}},
        "schedules": {"algo_kwargs": {"lr_schedule": {"type": "linear"}}},
        "a mix of datasets": {"algo_kwargs": {"dataset_mix": MIX}},
    },
}
ONLINE = {"buffer_capacity": 100, "learning_starts": 20, "train_frequency": 2}
ONLINE_VARIANTS: dict[str, dict[str, Any]] = {
    "online": {"algo_kwargs": {"online": ONLINE}, "num_envs": 3},
    "online without data": {"algo_kwargs": {"online": ONLINE | {"offline_batch_ratio": 0.0}}},
}
OWN_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "gail": {
        "replay of rollouts": {"num_envs": 2, "algo_kwargs": {"discriminator_rollouts": 3}},
        "regularised": {"algo_kwargs": {"spectral_norm": True, "gradient_penalty": 1.0}},
        "absorbing": {"algo_kwargs": {"absorbing_states": True, "normalize_reward": True}},
        "warm start": {"algo_kwargs": {"bc_warmup_updates": 5, "normalize_obs": True}},
    },
    "iql": {"dropout": {"algo_kwargs": {"policy_dropout": 0.2}}},
    "cql": {
        "calibrated": {"algo_kwargs": {"calibrated": True, "n_step": 3}},
        "calibrated online": {
            "algo_kwargs": {"calibrated": True, "online": ONLINE},
            "num_envs": 2,
            "seeds": [4, 9],
        },
    },
    "bc": {"squared error": {"task": "Pendulum-v1", "algo_kwargs": {"loss": "mse"}}},
}


def variants_of(algo: str) -> dict[str, dict[str, Any]]:
    spec = get_algorithm_spec(algo)
    online = ONLINE_VARIANTS if spec.continues_online else {}
    return VARIANTS[spec.loop.value] | online | OWN_VARIANTS.get(algo, {})


RESUMES = [
    pytest.param(name, variant, id=f"{name}-{label}")
    for name in names_under_test()
    for label, variant in variants_of(name).items()
    if has_settings(name, variant.get("algo_kwargs", {}))
]
PIXELS: dict[str, dict[str, Any]] = {
    "off_policy": {"algo_kwargs": {"n_step": 2, "prioritized": True, "buffer_capacity": 60}},
    "on_policy": {},
    "offline": {},
}
STACKED = {
    "env_kwargs": {"max_episode_steps": 7, "wrappers": {"pixels": {"frame_stack": 3}}},
}


def pixels_of(algo: str) -> dict[str, Any]:
    variant = PIXELS[get_algorithm_spec(algo).loop.value]
    fields = get_algorithm_spec(algo).config_class.model_fields
    kept = {k: v for k, v in variant.get("algo_kwargs", {}).items() if k in fields}
    return STACKED | {"task": image_task(algo), "algo_kwargs": kept}


RESUMES += [
    pytest.param(name, pixels_of(name), id=f"{name}-pixels")
    for name in names_under_test()
    if takes_pixels(name)
]
RESUMES += [
    pytest.param(name, {"task": task, "env_kwargs": {}}, id=f"{name}-{task.partition(':')[2]}")
    for name in names_under_test()
    for task in parts_tasks(name)
]


@pytest.mark.expensive(only=("dqn", "ppo", "td3_bc"))
@pytest.mark.parametrize(("algo", "variant"), RESUMES)
def test_resumed_run_equals_the_uninterrupted_one(
    algo: str, variant: dict[str, Any], tmp_path: Path
) -> None:
    report = verify_resume(small_config(algo, tmp_path, **variant), 70)
    assert report.identical, report.lines()
    assert report.resume_level == "exact"


def test_log_lines_of_a_run_may_lie_as_many_updates_apart_as_the_recorder_folds(
    tmp_path: Path,
) -> None:
    window = FOLD_AFTER
    changes: dict[str, Any] = {"total_timesteps": 2 * window, "log_interval": window}
    config = small_config("dqn", tmp_path, **changes, eval_episodes=0, accelerate="off")
    result = resume_training(train(config, stop_at=2 * window - 8).run_dir)
    steps = [row["gradient_steps"] for row in read_metrics(result.run_dir, "train")]
    assert steps[1] - steps[0] == window


WIDE = {"hidden_sizes": [64, 64]}
"""Two threads share the products and decompositions of such layers, not those of smaller ones."""
THREADS = [pytest.param(name, 1, id=f"{name}-1") for name in names_under_test()] + [
    # Two threads on a busy machine take ten times as long; one method shows what all share.
    pytest.param(name, 2, id=f"{name}-2", marks=[] if name == "ppo" else [pytest.mark.slow])
    for name in names_under_test()
]


@pytest.mark.expensive
@pytest.mark.parametrize(("algo", "threads"), THREADS)
def test_a_resumed_run_is_bit_exact_whatever_threads_the_caller_has(
    algo: str, threads: int, tmp_path: Path
) -> None:
    wide = WIDE if has_settings(algo, WIDE) else {}
    config = small_config(algo, tmp_path, threads=threads, algo_kwargs=wide)
    with thread_count(3 - threads):
        report = verify_resume(config, 70)
        assert torch.get_num_threads() == 3 - threads
    assert report.identical, report.lines()
    assert report.resume_level == "exact"


@pytest.mark.expensive
@every_algorithm
def test_a_group_of_seeds_equals_single_runs_and_its_members_load_alone(
    algo: str, tmp_path: Path
) -> None:
    group = train(small_config(algo, tmp_path, seeds=[1, 2], total_timesteps=96))
    assert len(group.per_seed) == 2
    for seed, member in zip((1, 2), group.per_seed, strict=True):
        single = train(small_config(algo, tmp_path, seed=seed, total_timesteps=96))
        ours = flat_state(load_checkpoint(member.checkpoint_path).states["learner"])
        alone = flat_state(load_checkpoint(single.checkpoint_path).states["learner"])
        assert ours.keys() == alone.keys()
        for name, value in alone.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)
        assert load_agent(member.checkpoint_path).config.seed == seed


@pytest.mark.expensive
@every_algorithm
def test_predict_is_in_bounds_has_the_right_type_and_is_deterministic(
    algo: str, tmp_path: Path
) -> None:
    result = train(small_config(algo, tmp_path, eval_episodes=0, total_timesteps=64))
    agent = load_agent(result.checkpoint_path)
    spec = agent.env_spec
    obs = np.zeros(spec.obs_shape, np.float32)
    action = agent.predict(obs)
    assert action.dtype == np.dtype(spec.action_dtype)
    assert np.array_equal(action, agent.predict(obs))
    assert np.array_equal(action, predict_from_checkpoint(result.checkpoint_path, obs))
    batch = agent.predict(np.stack([obs, obs]), deterministic=False)
    assert len(batch) == 2
    if spec.action_kind == "continuous":
        assert (batch >= spec.action_low).all()
        assert (batch <= spec.action_high).all()


@pytest.mark.expensive
@every_algorithm
def test_every_action_kind_trains(algo: str, tmp_path: Path) -> None:
    for kind in get_algorithm_spec(algo).action_kinds:
        result = train(small_config(algo, tmp_path, task=TASK[kind], total_timesteps=64))
        assert result.metrics["global_step"] >= 64
        assert np.isfinite(result.metrics["eval_return_mean"])
        assert result.metrics["eval_episodes"] == 2

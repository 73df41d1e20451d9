"""Our side of the offline table: `train` as a user runs it, then the last checkpoint."""

from __future__ import annotations

import tempfile
from typing import Any

from bench.evidence.offline_job import Job, Policy
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent

WEIGHTS = {"cql": "cql_alpha", "iql": "beta", "td3_bc": "bc_alpha"}


def offline_config(job: Job, path: str, folder: str) -> TrainConfig:
    """Return the run of a job on the data at `path`."""
    settings: dict[str, Any] = {
        "dataset_kind": "npz",
        "dataset_path": path,
        "reward_scale": job.reward_scale,
        "batch_size": job.batch,
        "hidden_sizes": list(job.hidden),
        "learning_rate": job.learning_rate,
        "actor_learning_rate": job.learning_rate,
        "tau": job.tau,
        WEIGHTS[job.method]: job.weight,
        "num_critics": 2,
        "eval_interval": 0,
    }
    run: dict[str, Any] = {
        "algo": job.method,
        "env_id": job.env_id,
        "seed": job.seed,
        "total_timesteps": job.updates,
        "eval_episodes": 0,
        "checkpoint_interval": 0,
        "tensorboard": False,
        "device": "cpu",
        "threads": 1,
        "accelerate": job.accelerate,
        "output_dir": folder,
        "algo_kwargs": settings,
    }
    return TrainConfig(**run)


def train_offline(job: Job, path: str) -> Policy:
    """Train, and return the deterministic policy of the last checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(offline_config(job, path, folder))
        agent = load_agent(result.checkpoint_path, device="cpu")
    assert agent.step == job.updates
    return agent.predict

"""The d3rlpy package in the offline table: the same data, sizes, budget and reward scale.

What remains different: it has no transition for the last row of an episode that was cut, its CQL
evaluates the target at the mean action, and its IQL learns value and critics by one optimizer.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np

from bench.evidence.offline_job import Job, Policy

WEIGHTS = {"cql": "conservative_weight", "iql": "weight_temp", "td3_bc": "alpha"}
CONFIGS = {"cql": "CQLConfig", "iql": "IQLConfig", "td3_bc": "TD3PlusBCConfig"}


def train_offline(job: Job, path: str) -> Policy:
    """Train by `fit`, and return the deterministic policy it ends with."""
    d3rlpy: Any = importlib.import_module("d3rlpy")
    d3rlpy.seed(job.seed)
    with np.load(path) as file:
        data = d3rlpy.dataset.MDPDataset(
            observations=file["observations"],
            actions=file["actions"],
            rewards=job.reward_scale * file["rewards"],
            terminals=file["terminations"].astype(np.float32),
            timeouts=file["truncations"].astype(np.float32),
        )
    learner = _config(d3rlpy, job).create(device="cpu:0")
    learner.fit(
        data,
        n_steps=job.updates,
        n_steps_per_epoch=job.updates,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
    )
    assert learner.grad_step == job.updates
    policy: Policy = learner.predict
    return policy


def _config(d3rlpy: Any, job: Job) -> Any:
    encoder = d3rlpy.models.VectorEncoderFactory(list(job.hidden))
    box: Any = gymnasium.make(job.env_id).action_space
    settings: dict[str, Any] = {
        "batch_size": job.batch,
        "actor_encoder_factory": encoder,
        "critic_encoder_factory": encoder,
        "action_scaler": d3rlpy.preprocessing.MinMaxActionScaler(minimum=box.low, maximum=box.high),
        "n_critics": 2,
    }
    if job.method == "iql":
        settings["value_encoder_factory"] = encoder
    if job.method == "td3_bc":
        # Ours standardises too, as the authors do.
        settings["observation_scaler"] = d3rlpy.preprocessing.StandardObservationScaler()
    if not job.side.endswith("defaults"):
        settings |= _rates(job)
    return getattr(d3rlpy.algos, CONFIGS[job.method])(**settings)


def _rates(job: Job) -> dict[str, Any]:
    """Rates and weights of our side in place of the peer's own."""
    found = {"actor_learning_rate": job.learning_rate, "critic_learning_rate": job.learning_rate}
    found |= {"tau": job.tau, WEIGHTS[job.method]: job.weight}
    if job.method == "cql":
        # Its multiplier stays 1, so that the weight is the weight.
        found |= {"temp_learning_rate": job.learning_rate, "alpha_learning_rate": 0.0}
    return found

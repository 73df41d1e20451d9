"""Values to try on every field of a configuration."""

from __future__ import annotations

from typing import Any

POOL: tuple[object, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 10**9, -0.5, 0.5, 1.5, 1e300),
    *("", "auto", "text", "sac", "cpu", "cuda:1", "cuda:x", "a/b", "..", ".hidden", "linear"),
    *([], [1], [0], [-1], [1, 1], [0.5], [1.5], ["a"], [None], [True], [[1]]),
    *({}, {"no_such_key": 1}, {"type": "linear"}, {"type": "liner"}, {"patience": 0}),
)
ROOM_FOR: dict[str, dict[str, Any]] = {
    "buffer_capacity": {
        "batch_size": 1,
        "batch_length": 2,
        "burn_in": 0,
        "model_holdout_ratio": 0.9,
    },
    "batch_length": {"buffer_capacity": 10**12, "burn_in": 0},
    "burn_in": {"batch_length": 10**12, "buffer_capacity": 10**12},
    "learning_starts": {"model_holdout_ratio": 0.9},
    "synthetic_buffer_capacity": {"rollout_batch_size": 1, "rollout_horizon": 1},
    "batch_size": {"buffer_capacity": 10**12},
    "reward_scale": {"normalize_rewards": False},
    "reward_shift": {"normalize_rewards": False},
    "dataset_path": {"dataset_kind": "npz"},
    "dataset_id": {"dataset_kind": "minari"},
    "expert_dataset_path": {"expert_dataset_kind": "npz"},
    "expert_dataset_id": {"expert_dataset_kind": "minari"},
    "num_critics": {"num_target_critics": 1},
    "num_target_critics": {"num_critics": 10**12},
    "exploration_noise": {"exploration_noise_min": 0.0},
    "exploration_noise_min": {"exploration_noise": 1e30},
    "num_steps": {"sequence_length": 1},
    "sequence_length": {"num_steps": 7 * 10**9, "minibatch_size": 10**12},
    "minibatch_size": {"sequence_length": 1},
    "v_min": {"v_max": 9e29},
    "v_max": {"v_min": -9e29},
    "num_quantiles": {"quantiles_to_drop": 0},
    "quantiles_to_drop": {"num_quantiles": 10**12},
    "deter_size": {"recurrent_blocks": 1},
    "recurrent_blocks": {"deter_size": 7 * 64},
    "num_ensembles": {
        "planning_particles": 7_000,
        "planning_candidates": 40,
        "planning_horizon": 1,
    },
    "planning_particles": {"num_ensembles": 1, "planning_candidates": 40, "planning_horizon": 1},
    "planning_horizon": {"planning_candidates": 40, "planning_particles": 5},
    "planning_candidates": {"planning_topk": 1, "planning_horizon": 1, "planning_particles": 5},
    "planning_topk": {
        "planning_candidates": 10**6,
        "planning_horizon": 1,
        "planning_particles": 5,
    },
}
"""What must be set beside a field so that a rule over two fields does not speak."""

"""Actions to step with, and comparison of what came of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_training.envs import EnvSpec, Step


def random_actions(spec: EnvSpec, shape: tuple[int, ...], seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    if spec.num_actions is not None:
        return rng.integers(0, spec.num_actions, shape)
    return rng.uniform(-1, 1, shape + spec.action_shape).astype(np.float32)


def same_steps(left: Step, right: Step) -> bool:
    names = ("obs", "reward", "terminated", "truncated", "final_obs")
    return all(np.array_equal(getattr(left, n), getattr(right, n)) for n in names)

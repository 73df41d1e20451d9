"""Rollouts on an accelerator: what followed each observation is put together from what is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_training.envs.step import Step
from rl_training.runtime.loops import successors


@pytest.mark.parametrize("share_of_ends", [0.0, 0.3, 1.0])
def test_successors_are_the_true_ones_also_where_episodes_ended(share_of_ends: float) -> None:
    rng = np.random.default_rng(0)
    num_seeds, num_steps, num_envs = 2, 6, 3
    obs = rng.normal(size=(num_seeds, num_envs, 4)).astype(np.float32)
    shown, steps = [], []
    for _ in range(num_steps):
        shown.append(obs)
        final = rng.normal(size=obs.shape).astype(np.float32)
        terminated, truncated = rng.random((2, num_seeds, num_envs)) < share_of_ends
        ended = (terminated | truncated)[..., None]
        obs = np.where(ended, rng.normal(size=obs.shape).astype(np.float32), final)
        reward = np.zeros((num_seeds, num_envs), np.float32)
        steps.append(Step(obs, reward, terminated, truncated, final, reward))
    found = successors(torch.from_numpy(np.stack(shown, 1)), steps)
    wanted = np.stack([step.final_obs for step in steps], 1)
    assert np.array_equal(found.numpy(), wanted)

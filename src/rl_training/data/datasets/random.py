"""A made-up dataset for tests: deterministic, of any shape, from no environment.

Each observation is the last one times 0.9 plus a fixed linear effect of the action plus noise, or,
where it has several parts, a draw of its own; the reward is minus the mean square of the
successor.  Where the task has masks, actions are among those allowed.  Every second episode
terminates after 10 to 50 steps, the others are truncated at 50.  Nothing can be learned from it
about the task whose shapes it has.

Shapes: E episodes, L steps, D entries of an observation, A of an action.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.units import TaskSpec
from rl_training.rng import derive_seed

Array = NDArray[Any]
SHORTEST, LONGEST = 10, 50


def random_dataset(task: TaskSpec, size: int, seed: int) -> OfflineDataset:
    """Make `size` transitions with a task's shapes; the same seed gives the same rows."""
    rng = np.random.default_rng(derive_seed(seed, "random_dataset"))
    episodes = -(-size // SHORTEST)
    lengths = np.full(episodes, LONGEST)
    lengths[::2] = rng.integers(SHORTEST, LONGEST + 1, len(lengths[::2]))
    # No more episodes than are needed, because each is simulated whole.
    episodes = int(np.searchsorted(np.cumsum(lengths), size)) + 1
    lengths = lengths[:episodes]
    actions, effect = _actions(task, rng, episodes)
    observations = _observations(task, rng, effect)  # [E, L + 1, *shape]
    if task.observation is not None and task.observation.mask_size:
        actions = _allowed_actions(task, rng, task.observation.allowed(observations[:, :-1]))
    values = observations[:, 1:].astype(np.float64)
    scale = 255.0 if observations.dtype == np.uint8 else 1.0
    rewards = -np.square(values / scale).mean(axis=tuple(range(2, values.ndim)))
    kept = np.arange(LONGEST) < lengths[:, None]  # [E, L]
    last = np.arange(LONGEST) == lengths[:, None] - 1
    terminates = (np.arange(episodes) % 2 == 0)[:, None]
    columns = {
        "observations": observations[:, :-1],
        "actions": actions,
        "rewards": rewards.astype(np.float32),
        "next_observations": observations[:, 1:],
        "terminations": last & terminates,
        "truncations": last & ~terminates,
    }
    return OfflineDataset(
        **{name: column[kept][:size] for name, column in columns.items()},
        name="random dataset",
        source=f"random, size {size}, seed {seed}",
        env_id=task.env_id,
        notes=(
            "made up at random for tests of the machinery: nothing can be learned from it about "
            f"{task.env_id}",
        ),
    )


def _actions(task: TaskSpec, rng: np.random.Generator, episodes: int) -> tuple[Array, Array]:
    """Draw uniform actions `[E, L, ...]` and their effect on the observation `[E, L, D]`."""
    width = math.prod(task.obs_shape)
    if task.num_actions is not None:
        index = rng.integers(0, task.num_actions, (episodes, LONGEST))
        table = rng.normal(size=(task.num_actions, width))
        return index + task.action_start, 0.3 * table[index]
    if task.action_sizes:
        sizes, starts = np.array(task.action_sizes), np.array(task.action_starts)
        index = rng.integers(0, sizes, (episodes, LONGEST, len(sizes)))
        effect = 0.3 * (index / sizes) @ rng.normal(size=(len(sizes), width))
        return (index + starts).astype(np.float32), effect
    size = math.prod(task.action_shape)
    unit = rng.uniform(-1.0, 1.0, (episodes, LONGEST, size))
    effect = 0.3 * unit @ rng.normal(size=(size, width))
    if task.action_low is None or task.action_high is None:
        return unit.astype(np.float32), effect
    low, high = np.array(task.action_low), np.array(task.action_high)
    return (low + 0.5 * (unit + 1.0) * (high - low)).astype(np.float32), effect


def _allowed_actions(task: TaskSpec, rng: np.random.Generator, allowed: Array) -> Array:
    """Draw actions uniformly among those that masks `[E, L, values]` allow."""
    lots: Array = np.where(allowed, rng.random(allowed.shape), -1.0)
    if task.num_actions is not None:
        number: Array = lots.argmax(-1) + task.action_start
        return number
    ends = np.cumsum(task.action_sizes)[:-1]
    index = np.stack([part.argmax(-1) for part in np.split(lots, ends, -1)], -1)
    numbers: Array = (index + np.array(task.action_starts)).astype(np.float32)
    return numbers


def _observations(task: TaskSpec, rng: np.random.Generator, effect: Array) -> Array:
    episodes, _, width = effect.shape
    if task.observation is not None:
        rows = task.observation.example_rows(episodes * (LONGEST + 1), rng)
        return rows.reshape(episodes, LONGEST + 1, *task.obs_shape)
    if np.dtype(task.obs_dtype) == np.uint8:
        shape = (episodes, LONGEST + 1, *task.obs_shape)
        return rng.integers(0, 256, shape, dtype=np.uint8)
    noise = rng.normal(size=(episodes, LONGEST + 1, width))
    states = np.empty_like(noise)
    states[:, 0] = noise[:, 0]
    for step in range(LONGEST):
        states[:, step + 1] = 0.9 * states[:, step] + effect[:, step] + 0.1 * noise[:, step + 1]
    return states.astype(np.float32).reshape(episodes, LONGEST + 1, *task.obs_shape)

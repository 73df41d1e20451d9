"""How the rows of a dataset fit a task: shapes, dtypes, and actions in learner units.

Learner units are vectors of continuous actions in [-1, 1] and discrete actions from 0.  Actions of
several whole numbers are floats in a dataset as it was recorded, since only the task tells that
they are counted.  Shapes: N rows, A action entries.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import column_blocks, joined
from rl_training.errors import DataError
from rl_training.observations import ObservationSpec

Array = NDArray[Any]
TOLERANCE = 1e-4
"""How far outside its box an action may lie before it is an error, as a share of the box's width.

Rounding to float32 and back moves an action by about a thousandth of this."""


class TaskSpec(Protocol):
    """What a dataset must know of a task; `rl_training.envs.EnvSpec` is one."""

    @property
    def env_id(self) -> str: ...  # noqa: D102
    @property
    def obs_shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def obs_dtype(self) -> str: ...  # noqa: D102
    @property
    def observation(self) -> ObservationSpec | None: ...  # noqa: D102
    @property
    def action_kind(self) -> str: ...  # noqa: D102
    @property
    def action_shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def num_actions(self) -> int | None: ...  # noqa: D102
    @property
    def action_start(self) -> int: ...  # noqa: D102
    @property
    def action_sizes(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def action_starts(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def action_low(self) -> tuple[float, ...] | None: ...  # noqa: D102
    @property
    def action_high(self) -> tuple[float, ...] | None: ...  # noqa: D102
    @property
    def max_episode_steps(self) -> int | None: ...  # noqa: D102
    def unscale_action(self, action: Array) -> Array:
        """Environment units to learner units."""
        ...


def any_in_row(flags: Array) -> NDArray[np.bool_]:
    """Whether any entry of each row is true, `[N]`; for any number of rows, none included."""
    return np.asarray(flags.any(axis=tuple(range(1, flags.ndim))), np.bool_)


def check_fits(observations: Array, actions: Array, task: TaskSpec, name: str) -> None:
    """Check shapes and kinds of rows against a task.

    Raises:
        DataError: Naming the dataset, what it holds and what the task needs.
    """
    shape = observations.shape[1:]
    if shape != tuple(task.obs_shape):
        raise DataError(
            f"{name}: observations have shape {shape}, but {task.env_id} gives "
            f"{tuple(task.obs_shape)}; use data of this task, or set env_id to the data's task"
        )
    if np.dtype(task.obs_dtype) == np.uint8 and observations.dtype != np.uint8:
        raise DataError(
            f"{name}: observations are {observations.dtype}, but {task.env_id} gives uint8 "
            f"{'images' if task.observation is None else 'rows'}; store them as uint8"
        )
    discrete = actions.dtype.kind == "i"
    if not task.action_sizes and discrete != (task.action_kind == "discrete"):
        kind = "whole numbers (discrete)" if discrete else "real numbers (continuous)"
        raise DataError(
            f"{name}: actions are {kind}, but {task.env_id} takes {task.action_kind} ones; use "
            "data of this task, or set env_id to the data's task"
        )
    if task.num_actions is not None and actions.ndim != 1:
        raise DataError(
            f"{name}: actions have shape {actions.shape}, but {task.env_id} takes single whole "
            f"numbers; store one per row, of shape ({len(actions)},)"
        )
    entries = 1 if actions.ndim == 1 else actions.shape[1]
    if entries != math.prod(task.action_shape):
        raise DataError(
            f"{name}: actions have {entries} entries, but {task.env_id} takes "
            f"{math.prod(task.action_shape)}; use data of this task, or set env_id to the data's "
            "task"
        )


def rows_outside_box(actions: Array, task: TaskSpec) -> NDArray[np.int64]:
    """Return the rows whose action the task does not take, beyond rounding."""
    found = [
        block.start + np.flatnonzero(_outside(np.asarray(actions[block]), task))
        for block in column_blocks(actions)
    ]
    return joined(found)


def _outside(actions: Array, task: TaskSpec) -> NDArray[np.bool_]:
    if task.action_sizes:
        values = actions.reshape(len(actions), -1)
        index = values - np.array(task.action_starts)
        counted = (index >= 0) & (index < np.array(task.action_sizes)) & (index == np.floor(index))
        return any_in_row(~counted)
    if actions.dtype.kind == "i":
        assert task.num_actions is not None
        return (actions < task.action_start) | (actions >= task.action_start + task.num_actions)
    if task.action_low is None or task.action_high is None:
        return np.zeros(len(actions), np.bool_)
    low, high = np.array(task.action_low), np.array(task.action_high)
    slack = TOLERANCE * np.maximum(high - low, 1e-8)
    return any_in_row((actions < low - slack) | (actions > high + slack))


def rows_forbidden(observations: Array, actions: Array, task: TaskSpec) -> NDArray[np.int64]:
    """Return the rows whose action, one that the task takes, the mask beside it does not allow."""
    parts = task.observation
    if parts is None or not parts.mask_size:
        return np.empty(0, np.int64)
    first = np.cumsum((0, *parts.leaves[-1].sizes[:-1]))
    found = []
    for block in column_blocks(observations):
        index = to_learner_units(np.asarray(actions[block]), task).reshape(-1, len(first))
        allowed = parts.allowed(np.asarray(observations[block]))
        taken = np.take_along_axis(allowed, index.astype(np.int64) + first, -1)
        found.append(block.start + np.flatnonzero(~taken.all(-1)))
    return joined(found)


def check_masks(observations: Array, actions: Array, task: TaskSpec, name: str) -> None:
    """Refuse actions that the masks beside them do not allow: nobody can learn to take them.

    Raises:
        DataError: Naming the first row and its action.
    """
    rows = rows_forbidden(observations, actions, task)
    if len(rows):
        raise DataError(
            f"{name}: row {rows[0]}: action {np.asarray(actions[rows[0]])} is not allowed by the "
            f"mask of its observation ({len(rows)} of {len(actions)} actions are not); remove "
            "these rows and mark the row before each as truncated, or set "
            "env_kwargs.wrappers.action_mask to off"
        )


def box_text(task: TaskSpec) -> str:
    """Say which actions a task takes."""
    if task.num_actions is not None:
        return f"{task.action_start} to {task.action_start + task.num_actions - 1}"
    if task.action_sizes:
        ranges = zip(task.action_starts, task.action_sizes, strict=True)
        return " x ".join(f"{start} to {start + size - 1}" for start, size in ranges)
    assert task.action_low is not None
    assert task.action_high is not None
    lows, highs = sorted(set(task.action_low)), sorted(set(task.action_high))
    if len(lows) == len(highs) == 1:
        return f"[{lows[0]:g}, {highs[0]:g}]"
    pairs = zip(task.action_low, task.action_high, strict=True)
    return " x ".join(f"[{low:g}, {high:g}]" for low, high in pairs)


def learner_actions(
    actions: Array, task: TaskSpec, name: str, *, clip: bool
) -> tuple[Array, str | None]:
    """Map actions `[N, A]` or `[N]` to learner units.

    Args:
        actions: In the task's units.
        task: Whose box they must lie in.
        name: Of the dataset, for messages.
        clip: Bring continuous actions outside the box back to its border.

    Returns:
        The mapped actions, and a note if any were clipped.

    Raises:
        DataError: For an action outside the box that is not clipped, naming row, value and box.
    """
    note = check_actions(actions, task, name, clip=clip)
    counted = bool(task.action_sizes)
    shape = (len(actions), len(task.action_sizes)) if counted else actions.shape
    mapped = np.empty(shape, np.int64 if counted else actions.dtype)
    for block in column_blocks(actions):
        mapped[block] = to_learner_units(actions[block], task)
    return mapped, note


def to_learner_units(actions: Array, task: TaskSpec) -> Array:
    """Map checked actions to learner units; each row by itself."""
    if actions.dtype.kind == "i" and not task.action_sizes:
        return task.unscale_action(actions)
    units = task.unscale_action(actions.reshape(-1, *task.action_shape))
    return units if task.action_sizes else units.astype(np.float32, copy=False)


def check_actions(actions: Array, task: TaskSpec, name: str, *, clip: bool) -> str | None:
    """Look whether the task takes the actions, and return a note if some will be clipped.

    Raises:
        DataError: For an action outside the box that is not clipped, naming row, value and box.
    """
    outside = rows_outside_box(actions, task)
    if not len(outside):
        return None
    row, box = int(outside[0]), box_text(task)
    value = np.array2string(np.asarray(actions[row]), precision=6, threshold=8)
    problem = f"{len(outside)} of {len(actions)} actions lie outside {task.env_id}'s box {box}"
    counted = actions.dtype.kind == "i" or bool(task.action_sizes)
    if not clip or counted:
        mend = "" if counted else "; normalize_dataset_actions: true clips"
        raise DataError(f"{name}: row {row}: action {value} is not in {box} ({problem}){mend}")
    return f"{problem} and were clipped (first at row {row}: {value})"

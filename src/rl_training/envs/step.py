"""What environments give: one step, and the outcome of a restore.

Shapes: S seeds, n environments per seed; arrays are [S, n, ...], or [n, ...] for a single seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rl_training.envs.snapshot import ResumeLevel
from rl_training.envs.spec import Array


class Step(NamedTuple):
    """What one environment step gives; the arrays belong to the receiver.

    A tuple, because one is made in every step: a frozen dataclass takes five times as long.
    """

    obs: Array
    """What to act on next: already the first observation of the new episode where one ended.

    float32 where the task gives float64."""
    reward: Array
    """float32; what to learn from: scaled and clipped where `env_kwargs.wrappers` asks for it."""
    terminated: Array
    """bool; the episode ended by the task's rules. May be true together with `truncated`."""
    truncated: Array
    """bool; the episode was cut off, its last state has a value."""
    final_obs: Array
    """The true successor of the step; the same array as `obs` when no episode ended."""
    task_reward: Array
    """float32; what the task itself pays, which returns are made of; the same array as `reward`
    without a transform."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What became of the environments when a snapshot was restored."""

    level: ResumeLevel
    """`exact` or `replay`: all continue where they were; `restart`: those in `restarted` do not."""
    restarted: list[int]
    """Indices of environments in which a new episode was begun, seed by seed: `s * n + i`."""
    messages: list[str]
    """One sentence for each of them."""
    obs: Array
    """Current observations of all environments."""

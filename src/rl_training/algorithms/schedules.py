"""Schedules as functions of progress, the share of the *planned* run that is done, in [0, 1].

A run that is extended keeps its plan: beyond it every schedule stays at its end.
"""

from __future__ import annotations

import math

from rl_training.algorithms.config import LRSchedule


def linear(start: float, end: float, progress: float) -> float:
    """Go from `start` to `end` in a straight line."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def learning_rate_factor(schedule: LRSchedule, progress: float) -> float:
    """Return the factor on the base learning rate."""
    if schedule.type == "linear":
        return linear(schedule.start, schedule.end, progress)
    if schedule.type == "cosine":
        bend = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        return schedule.end + (schedule.start - schedule.end) * bend
    if schedule.type == "step":
        passed = sum(progress >= milestone for milestone in schedule.milestones)
        return schedule.start * schedule.gamma**passed
    return schedule.start

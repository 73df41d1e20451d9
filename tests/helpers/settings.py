"""All settings of a learner, its own and those of its parts, from keywords."""

from __future__ import annotations

from typing import Any

from rl_training.algorithms.base import AnyLearner


def settings_of(learner: type[AnyLearner], **values: Any) -> Any:
    """Return them; which fields there are is known only when they are put together."""
    return learner.settings_class()(**values)

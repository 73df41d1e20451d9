"""The managed classes `SAC`, `PPO`, `DQN`, ..., made from the registry when first asked for."""

from __future__ import annotations

from functools import cache

from rl_training.api.agent import Agent
from rl_training.experiment.registry import class_names, get_algorithm_spec


@cache
def managed_class(name: str) -> type[Agent]:
    """Return the managed class of an algorithm, by its registry name."""
    spec = get_algorithm_spec(name)
    class_name = spec.learner.__name__
    doc = f"{spec.title} ({spec.paper}): {spec.summary}."
    namespace = {"algo": name, "__doc__": doc, "__module__": __name__}
    return type(class_name, (Agent,), namespace)


def __getattr__(name: str) -> type[Agent]:
    names = class_names()
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return managed_class(names[name])


def __dir__() -> list[str]:
    return sorted(["Agent", "managed_class", *class_names()])

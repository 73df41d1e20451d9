"""Tells a task of several agents, as PettingZoo has them, from one of Gymnasium."""

from __future__ import annotations

from rl_training.errors import EnvError

INTERFACES = ("ParallelEnv", "AECEnv")
"""PettingZoo's own base classes."""
MAKERS = ("parallel_env", "raw_env")
"""What its modules call the functions that make one."""


def has_several_agents(task: object) -> bool:
    """Whether an environment, a class of them or a function that makes one is PettingZoo's.

    Nothing is called, and PettingZoo is not imported.
    """
    if hasattr(task, "possible_agents") or getattr(task, "__name__", "") in MAKERS:
        return True
    kind = task if isinstance(task, type) else type(task)
    return any(base.__name__ in INTERFACES for base in kind.__mro__)


def refuse_several_agents(task: object, env_id: str) -> None:
    """Refuse a task of several agents.

    Raises:
        EnvError: Saying what to do.
    """
    if has_several_agents(task):
        raise EnvError(
            f"environment {env_id} has several agents (PettingZoo's interface), but every method "
            "here trains one; make it a gymnasium.Env that one agent acts in, as "
            'docs/environments.md shows under "Several agents"'
        )

"""OGBench's tasks (Park et al., 2024, arXiv:2410.20092): made on request, and seeded as a whole.

The package draws some numbers from NumPy's global generator and some from spaces that nobody
seeds, so that a seeded reset did not give the same episode twice.  `SeededTask` makes every draw
follow from the seed of `reset`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.spec import AnyEnv
from rl_training.errors import MissingExtraError

_MANIPULATION = ("cube", "scene", "puzzle")
_FAMILIES = (*_MANIPULATION, "pointmaze", "antmaze", "humanoidmaze", "antsoccer", "powderworld")
_ID = re.compile(rf"(?:visual-)?({'|'.join(_FAMILIES)})-[\w-]+")


def is_ogbench(env_id: str) -> bool:
    """Whether an id has the form of OGBench's, such as `cube-single-singletask-task2-v0`."""
    return _ID.fullmatch(env_id) is not None


def is_slow(env_id: str) -> bool:
    """Whether it is a task with the robot arm, which makes a few hundred steps per second."""
    found = _ID.fullmatch(env_id)
    return found is not None and found[1] in _MANIPULATION


def register_ogbench(what: str) -> None:
    """Make the tasks known to Gymnasium.

    Args:
        what: What needs them, first thing in the message.

    Raises:
        MissingExtraError: OGBench is not installed.
    """
    if importlib.util.find_spec("ogbench") is None:
        raise MissingExtraError(f'{what} needs OGBench; run: pip install "rl-training[ogbench]"')
    try:
        importlib.import_module("ogbench")
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs OGBench with all that it uses ({error}); run: pip install "
            '"rl-training[ogbench]"'
        ) from error


@contextmanager
def numpy_seeded(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, and put it back where it was afterwards."""
    before = np.random.get_state()  # noqa: NPY002  what OGBench draws from
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


class SeededTask(gym.Wrapper[Any, Any, Any, Any]):
    """Makes all that a task draws follow from the seed of `reset`; keeps its spaces at hand.

    OGBench builds its spaces each time they are asked for, and computes an observation to do so.
    """

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        base: Any = env.unwrapped
        self._traces: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        if isinstance(getattr(type(base), "action_space", None), property):
            _draw_from_own_generator(base)
            with numpy_seeded(0):
                base.reset(seed=0)  # builds the simulation; what it draws must not differ
            self._traces = _traces(base)
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._draws_in_steps = "teleport" in str(getattr(base, "_maze_type", ""))
        self._generator = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        self._remove_traces()
        with numpy_seeded(self._draw()):
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step; where a teleport leads to is drawn."""
        if not self._draws_in_steps:
            return self.env.step(action)
        with numpy_seeded(self._draw()):
            return self.env.step(action)

    def _remove_traces(self) -> None:
        """Put back what an episode leaves behind: locks and targets outlive a reset."""
        base: Any = self.env.unwrapped
        attributes, arrays = self._traces
        vars(base).update(copy.deepcopy(attributes))
        for name, values in arrays.items():
            getattr(base._model, name)[:] = values

    def _draw(self) -> int:
        return int(self._generator.integers(2**32))


def _traces(base: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return attributes, and arrays of the simulation's model, that episodes change."""
    own = {name: value for name, value in vars(base).items() if name.startswith("_target_")}
    arrays = {name: getattr(base._model, name).copy() for name in ("dof_damping", "site_pos")}
    return copy.deepcopy(own), arrays


def _draw_from_own_generator(base: Any) -> None:
    """Let actions that a task samples in its own reset come from the task's own generator."""
    original: Any = type(base)
    shape = base.action_space.shape

    def action_space(self: Any) -> spaces.Box:
        return spaces.Box(-1.0, 1.0, shape, np.float32, seed=self.np_random)

    base.__class__ = type(
        original.__name__,
        (original,),
        {"action_space": property(action_space), "__module__": original.__module__},
    )

"""Checks on a throwaway instance that an environment keeps Gymnasium's contract."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rl_training.envs.factory import make_env
from rl_training.envs.spec import EnvSpec, check_reward
from rl_training.errors import EnvError, described


def probe_env(
    env_id: str, env_kwargs: Mapping[str, Any] | None = None, seed: int = 0, num_steps: int = 2
) -> EnvSpec:
    """Check Gymnasium's contract on a throwaway instance and return its spec.

    Raises:
        EnvError: `reset` or `step` gives something else than the contract says; the message says
            what.
        SpecMismatch: A space cannot be used.
    """
    with _same_folder():
        return _probed(env_id, env_kwargs, seed, num_steps)


def _probed(
    env_id: str, env_kwargs: Mapping[str, Any] | None, seed: int, num_steps: int
) -> EnvSpec:
    env = make_env(env_id, env_kwargs)
    try:
        spec = EnvSpec.from_env(env, env_id)
        env.action_space.seed(seed)
        _check_reset(spec, guarded(env_id, "reset", lambda: env.reset(seed=seed)))
        for _ in range(num_steps):
            action = env.action_space.sample()
            take_step = functools.partial(env.step, action)
            step = guarded(env_id, f"step({action})", take_step)
            if _check_step(spec, step):
                break
    except BaseException:
        with contextlib.suppress(Exception):  # the first error says more
            env.close()
        raise
    guarded(env_id, "close", env.close)
    return spec


@contextlib.contextmanager
def _same_folder() -> Iterator[None]:
    """Return to the working directory, which a throwaway environment may change."""
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)


def guarded(env_id: str, what: str, call: Callable[[], Any]) -> Any:
    """Call user code; whatever it raises is an `EnvError` that says `what` was called."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise EnvError(f"environment {env_id}: {what} raised {described(error)}") from error


def _check_reset(spec: EnvSpec, result: object) -> None:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvError(
            f"environment {spec.env_id}: reset must return (obs, info) with info a dict, got "
            f"{_shape_of(result)}"
        )
    _check_obs(spec, result[0], "reset")


def _check_step(spec: EnvSpec, result: object) -> bool:
    """Check one step; returns whether the episode ended."""
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(
            f"environment {spec.env_id}: step must return (obs, reward, terminated, truncated, "
            "info), "
            f"got {_shape_of(result)}"
        )
    obs, reward, terminated, truncated, _ = result
    _check_obs(spec, obs, "step")
    try:
        finite = bool(np.isfinite(float(reward)))
    except (TypeError, ValueError):
        finite = False
    if not finite:
        raise EnvError(
            f"environment {spec.env_id}: the reward of step must be one finite number, got "
            f"{reward!r}"
        )
    guarded(spec.env_id, "step", lambda: check_reward(reward))
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise EnvError(f"environment {spec.env_id}: {name} must be a bool, got {flag!r}")
    return bool(terminated or truncated)


def _check_obs(spec: EnvSpec, obs: object, where: str) -> None:
    shape, dtype = getattr(obs, "shape", None), str(getattr(obs, "dtype", type(obs).__name__))
    if shape != spec.obs_shape or dtype != spec.obs_dtype:
        raise EnvError(
            f"environment {spec.env_id}: the observation of {where} has shape {shape} and dtype "
            f"{dtype}, but "
            f"its observation space says {spec.obs_shape} and {spec.obs_dtype}; make the two agree"
        )
    if not np.isfinite(np.asarray(obs)).all():
        raise EnvError(
            f"environment {spec.env_id}: the observation of {where} is not finite: {obs!r}"
        )


def _shape_of(result: object) -> str:
    kind = type(result).__name__
    return f"a {kind} of length {len(result)}" if isinstance(result, (tuple, list)) else f"a {kind}"

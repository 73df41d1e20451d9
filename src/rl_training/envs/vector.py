"""n environments of one seed behind one contract: `Step`.

Resets of ended episodes happen here and nowhere else: Gymnasium runs with autoreset disabled, and
in the very step that ends an episode its environment is reset. No step is ever a reset in disguise,
so no transition crosses one.

Seeding: environment i is seeded once, at the first `reset`, from `np.random.SeedSequence([seed,
i])`; later resets continue its own generator. Results do not depend on the mode (`sync`, `async`,
vectorised).

Shapes: n environments; arrays are [n, ...].
"""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training.envs.factory import make_env
from rl_training.envs.plain import State
from rl_training.envs.probe import probe_env
from rl_training.envs.snapshot import ResumeLevel, SnapshotWrapper, weakest_level
from rl_training.envs.spec import AnyEnv, Array, EnvSpec
from rl_training.envs.vectorized import CARTPOLE_IDS, MaskedCartPole
from rl_training.envs.workers import WorkerError, WorkerVectorEnv
from rl_training.errors import CheckpointError, ConfigError, EnvError, NonFiniteError

Mode: TypeAlias = Literal["auto", "sync", "async"]
Backend: TypeAlias = SyncVectorEnv[Array, Array] | WorkerVectorEnv | MaskedCartPole

_MIN_VECTORIZED = 4  # below this, looping over environments is as fast


@dataclass(frozen=True, slots=True)
class Step:
    """What one environment step gives; the arrays belong to the receiver."""

    obs: Array
    """What to act on next: already the first observation of the new episode where one ended.

    float32 where the task gives float64."""
    reward: Array
    """float32."""
    terminated: Array
    """bool; the episode ended by the task's rules. May be true together with `truncated`."""
    truncated: Array
    """bool; the episode was cut off, its last state has a value."""
    final_obs: Array
    """The true successor of the step; the same array as `obs` when no episode ended."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What became of the environments when a snapshot was restored."""

    level: ResumeLevel
    """`exact` or `replay`: all go on where they were; `restart`: those in `restarted` do not."""
    restarted: list[int]
    """Indices of environments in which a new episode was begun."""
    messages: list[str]
    """One sentence for each of them."""
    obs: Array
    """Current observations of all environments."""


def env_seed(seed: int, index: int) -> int:
    """Seed of environment `index`; 31 bits, because some simulators take a C int."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) & 0x7FFFFFFF


def _make_wrapped(env_id: str, env_kwargs: dict[str, Any], index: int, seed: int) -> AnyEnv:
    return SnapshotWrapper(make_env(env_id, env_kwargs), env_id, index, seed)


class VectorEnv:
    """n environments of one seed; they are made at once and reset by `reset`.

    Args:
        env_id: Registered id or `module:Class`.
        env_kwargs: See `make_env`.
        num_envs: How many.
        seed: Seed of them all, see the module's docstring.
        mode: `sync` in this process, `async` one process each, `auto` sync or a vectorised
            version.
        spec: The task's spec if it was probed before; None probes a throwaway instance.
        timeout: Seconds an `async` environment may take for one answer.

    Raises:
        ConfigError: `num_envs`, `seed` or `mode` cannot be used.
        EnvError: The environment cannot be made or breaks the contract.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        seed: int = 0,
        mode: Mode = "auto",
        *,
        spec: EnvSpec | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._check_arguments(num_envs, seed, mode)
        kwargs = dict(env_kwargs or {})
        self.env_id = env_id
        self.num_envs = num_envs
        self.seed = seed
        self.spec = probe_env(env_id, kwargs, env_seed(seed, 0)) if spec is None else spec
        self.num_steps = 0
        """Calls of `step` so far."""
        self._timeout = timeout
        self._to_env = self.spec.action_map.to_env
        self._float_action = self.spec.action_kind == "continuous"
        self._float_obs = np.dtype(self.spec.obs_dtype).kind == "f"
        self._backend = self._make_backend(kwargs, mode)
        # Sync and async hand out the array that they write into at the next call.
        self._hands_out_buffer = not isinstance(self._backend, MaskedCartPole)
        self._buffer: Array | None = None
        self._last_actions: Array | None = None
        self.resume_level: ResumeLevel = "exact"
        """The weakest level of the environments, see `rl_training.envs.snapshot`."""
        if not isinstance(self._backend, MaskedCartPole):
            self.resume_level = weakest_level(self._backend.call("resume_level"))

    @staticmethod
    def _check_arguments(num_envs: int, seed: int, mode: str) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs must be >= 1, got {num_envs}")
        if seed < 0:
            raise ConfigError(f"seed must be >= 0, got {seed}")
        if mode not in ("auto", "sync", "async"):
            raise ConfigError(f"the environment mode must be auto, sync or async, got {mode!r}")

    def _make_backend(self, kwargs: dict[str, Any], mode: Mode) -> Backend:
        plain = set(kwargs) <= {"max_episode_steps"} and self.env_id in CARTPOLE_IDS
        if mode == "auto" and plain and self.num_envs >= _MIN_VECTORIZED:
            assert self.spec.max_episode_steps is not None
            return MaskedCartPole(self.num_envs, self.spec.max_episode_steps)
        makers = [
            functools.partial(_make_wrapped, self.env_id, kwargs, i, self.seed)
            for i in range(self.num_envs)
        ]
        if mode == "async":
            return WorkerVectorEnv(makers, self._timeout)
        return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)

    @property
    def is_async(self) -> bool:
        """Whether the environments run in worker processes."""
        return isinstance(self._backend, WorkerVectorEnv)

    def reset(self, seed: int | None = None) -> Array:
        """Begin new episodes everywhere; returns observations [n, ...].

        The first call seeds the environments, later calls continue their generators unless `seed`
        takes the place of the seed given at the start.
        """
        first = self._buffer is None or seed is not None
        self.seed = self.seed if seed is None else seed
        seeds: list[int | None] = [env_seed(self.seed, i) for i in range(self.num_envs)]
        try:
            obs, _ = self._backend.reset(seed=seeds if first else None)
        except Exception as error:
            raise self._failure(error) from error
        self._buffer = obs
        return self._finite(self._owned(obs))

    def step(self, actions: Array) -> Step:
        """One step of every environment.

        Args:
            actions: [n, ...] in learner units: [-1, 1] for bounded continuous actions, indices from
                0 for discrete.

        Raises:
            NonFiniteError: An action is NaN or infinite.
            EnvError: An environment raised, hung, died, or gave NaN or infinity.
        """
        env_actions = self._checked_actions(actions)
        try:
            obs, reward, terminated, truncated, _ = self._backend.step(env_actions)
        except Exception as error:
            raise self._failure(error) from error
        return self._finish(obs, reward, terminated, truncated)

    def send(self, actions: Array) -> None:
        """Begin a step in the workers; `receive` waits for it. Only for `is_async`."""
        assert isinstance(self._backend, WorkerVectorEnv), "send needs mode='async'"
        env_actions = self._checked_actions(actions)
        try:
            self._backend.step_async(env_actions)
        except Exception as error:
            raise self._failure(error) from error

    def receive(self) -> Step:
        """Finish the step that `send` began."""
        assert isinstance(self._backend, WorkerVectorEnv), "receive needs mode='async'"
        try:
            obs, reward, terminated, truncated, _ = self._backend.step_wait()
        except Exception as error:
            raise self._failure(error) from error
        return self._finish(obs, reward, terminated, truncated)

    def _checked_actions(self, actions: Array) -> Array:
        if self._float_action and not np.isfinite(actions).all():
            bad = np.flatnonzero(~np.isfinite(actions).reshape(self.num_envs, -1).all(axis=1))
            raise NonFiniteError(
                f"the action for environment {bad[0]} of {self.env_id} (seed {self.seed}) is not "
                "finite at step "
                f"{self.num_steps}: {actions[bad[0]]}; the policy has diverged: "
                "lower learning_rate, or resume from an earlier checkpoint"
            )
        env_actions = self._to_env(actions)
        assert len(env_actions) == self.num_envs, (env_actions.shape, self.num_envs)
        self._last_actions = env_actions
        return env_actions

    def _finish(self, obs: Array, reward: Array, terminated: Array, truncated: Array) -> Step:
        final_obs = self._owned(obs)
        reward32 = reward.astype(np.float32)
        # For a handful of numbers Python's sum is faster than NumPy's isfinite; it errs only
        # towards looking again.
        if not math.isfinite(sum(reward32.tolist())) and not np.isfinite(reward32).all():
            raise self._not_finite("reward", reward32)
        self._finite(final_obs)
        self.num_steps += 1
        self._buffer = obs
        ended = terminated | truncated
        if not any(ended.tolist()):
            return Step(final_obs, reward32, terminated, truncated, final_obs)
        try:
            fresh, _ = self._backend.reset(options={"reset_mask": ended})
        except Exception as error:
            raise self._failure(error) from error
        self._buffer = fresh
        return Step(self._finite(self._owned(fresh)), reward32, terminated, truncated, final_obs)

    def _owned(self, obs: Array) -> Array:
        """The receiver's own observations; float64 becomes float32, which learners take."""
        if obs.dtype == np.float64:
            return obs.astype(np.float32)
        return obs.copy() if self._hands_out_buffer else obs

    def _finite(self, obs: Array) -> Array:
        if self._float_obs and not np.isfinite(obs).all():
            raise self._not_finite("observation", obs)
        return obs

    def _not_finite(self, what: str, values: Array) -> EnvError:
        index = int(np.flatnonzero(~np.isfinite(values).reshape(self.num_envs, -1).all(axis=1))[0])
        return EnvError(
            f"environment {self.env_id} (index {index}, seed {self.seed}) gave a {what} that is "
            "not finite at step "
            f"{self.num_steps}: {values[index]}{self._last_action(index)}"
        )

    def _last_action(self, index: int) -> str:
        if self._last_actions is None:
            return ""
        return f"; the last action was {self._last_actions[index]!r}"

    def _failure(self, error: Exception) -> EnvError:
        """One error that names the environment; workers do not outlive it."""
        backend = self._backend
        if not isinstance(backend, WorkerVectorEnv):
            return error if isinstance(error, EnvError) else EnvError(self._describe(0, error))
        if isinstance(error, WorkerError) and isinstance(error.__cause__, EnvError):
            failure = EnvError(str(error.__cause__))
        elif isinstance(error, WorkerError):
            failure = EnvError(self._describe(error.index, error))
        elif isinstance(error, multiprocessing.TimeoutError):
            silence = f"gave no answer within {self._timeout:g} s"
            failure = EnvError(self._describe(backend.slow_worker(), silence))
        else:
            index, code = backend.dead_worker() or (0, None)
            reason = f"its worker process died (exit code {code})" if code is not None else error
            failure = EnvError(self._describe(index, reason))
        backend.close(terminate=True)
        return failure

    def _describe(self, index: int, reason: object) -> str:
        kind = f"{type(reason).__name__}: " if isinstance(reason, Exception) else ""
        return (
            f"environment {self.env_id} (index {index}, seed {self.seed}) failed at step "
            f"{self.num_steps}: "
            f"{kind}{reason}{self._last_action(index)}"
        )

    def snapshot(self) -> State:
        """The state of all environments as plain data; they go on undisturbed."""
        assert self._buffer is not None, "reset before snapshot"
        state: State = {
            "env_id": self.env_id,
            "num_envs": self.num_envs,
            "num_steps": self.num_steps,
        }
        if isinstance(self._backend, MaskedCartPole):
            masked = self._backend.snapshot()
            return state | {"kind": "cartpole", "level": "exact", "cartpole": masked}
        envs = list(self._call("snapshot"))
        self.resume_level = weakest_level(env["level"] for env in envs)
        obs = self._buffer.copy()
        return state | {"kind": "wrapped", "level": self.resume_level, "obs": obs, "envs": envs}

    def restore(self, state: State) -> RestoreReport:
        """Continue from a snapshot of the same task and number of environments.

        Raises:
            CheckpointError: The snapshot is of another task, number or kind of environments.
        """
        self._check_snapshot(state)
        if self._buffer is None:
            self.reset()
        assert self._buffer is not None
        self.num_steps = state["num_steps"]
        if isinstance(self._backend, MaskedCartPole):
            self._backend.restore(state["cartpole"])
            return RestoreReport("exact", [], [], self._backend.observations())
        try:
            self._backend.set_attr("pending_state", state["envs"])
        except (EOFError, OSError) as error:
            raise self._failure(error) from error
        messages = self._call("restore_pending")
        restarted = [i for i, message in enumerate(messages) if message is not None]
        np.copyto(self._buffer, state["obs"])
        if restarted:
            last_obs = self._call("last_obs")
            for i in restarted:
                self._buffer[i] = last_obs[i]
        level: ResumeLevel = "restart" if restarted else state["level"]
        return RestoreReport(
            level, restarted, [m for m in messages if m], self._owned(self._buffer)
        )

    def _call(self, name: str) -> tuple[Any, ...]:
        assert not isinstance(self._backend, MaskedCartPole)
        try:
            return self._backend.call(name)
        except CheckpointError:
            raise
        except Exception as error:
            failure = self._failure(error)
            if isinstance(error.__cause__, CheckpointError):
                raise CheckpointError(str(error.__cause__)) from error
            raise failure from error

    def _check_snapshot(self, state: State) -> None:
        kind = "cartpole" if isinstance(self._backend, MaskedCartPole) else "wrapped"
        own = {"env_id": self.env_id, "num_envs": self.num_envs, "kind": kind}
        for key, value in own.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"environment snapshot: {key} is {state.get(key)!r}, but this run has "
                    f"{value!r}; resume with "
                    f"the env_id, num_envs and env_kwargs of the run"
                )

    def close(self) -> None:
        """Close the environments and end their processes; may be called twice."""
        if not self._backend.closed:
            self._backend.close()

"""S seeds side by side, n environments each, behind one contract: `Step`.

Resets of ended episodes happen here and nowhere else: Gymnasium runs with autoreset disabled, and
in the very step that ends an episode its environment is reset. No step is ever a reset in disguise,
so no transition crosses one.

Seeding: environment i of a seed is seeded once, at the first `reset`, from
`np.random.SeedSequence([seed, i])`; later resets continue its own generator. Results do not depend
on the mode (`sync`, `async`, vectorised) nor on the other seeds.

The environments pay their own reward; what a reward is scaled and clipped to is computed here, so
that a step has both.

Shapes: S seeds, n environments per seed; arrays are [S, n, ...].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from rl_training.envs.backends.kinds import Backend, InParts, Mode, TellsSuccess, make_backend
from rl_training.envs.backends.lanes import Task, Transition
from rl_training.envs.factory import probe_env
from rl_training.envs.options import learning_reward, with_task_reward
from rl_training.envs.plain import State
from rl_training.envs.snapshot import ResumeLevel, weakest_level
from rl_training.envs.spec import Array, EnvSpec
from rl_training.envs.step import RestoreReport, Step
from rl_training.envs.wrappers import RewardMap
from rl_training.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    NonFiniteError,
    described,
)

_FEW_NUMBERS = 64


def env_seed(seed: int, index: int) -> int:
    """Seed of environment `index`; 31 bits, because some simulators take a C int."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) & 0x7FFFFFFF


def _total(values: Array, start: float = 0.0) -> float:
    """Sum of a handful of numbers; if it is finite, so are they.

    This takes a fifth of the time of NumPy's isfinite, and errs only towards looking again.
    """
    return sum(values.ravel().tolist(), start)


def _check_arguments(num_envs: int, seeds: Sequence[int], mode: str) -> None:
    if num_envs < 1:
        raise ConfigError(f"num_envs must be >= 1, got {num_envs}")
    if min(seeds) < 0:
        raise ConfigError(f"seed must be >= 0, got {min(seeds)}")
    if mode not in get_args(Mode):
        names = ", ".join(get_args(Mode))
        raise ConfigError(f"the environment mode must be one of {names}, got {mode!r}")


class SeedVectorEnv:
    """The environments of S seeds; seeds do not influence each other."""

    def __init__(self, task: Task, backend: Backend, transform: RewardMap | None = None) -> None:
        self._transform = transform
        self.env_id = task.env_id
        self.spec: EnvSpec = task.spec
        self.seeds = task.seeds
        self.num_seeds, self.num_envs = task.shape
        self.backend = backend
        self.resume_level: ResumeLevel = backend.resume_level
        """The weakest level of all environments, as of the last snapshot."""
        self._to_env = self.spec.action_map.for_batch(task.shape).to_env
        self._action_shape = (*task.shape, *self.spec.action_shape)
        self._float_action = self.spec.action_kind == "continuous"
        self._float_obs = np.dtype(self.spec.obs_dtype).kind == "f"
        # Numbers that may not be finite are looked for in all environments at once.
        integers = not (self._float_action or self._float_obs)
        self._in_parts = backend if integers and isinstance(backend, InParts) else None
        self._last_part = len(self.parts) - 1
        lanes = self.num_seeds * self.num_envs
        self._few_numbers = lanes * max(self.spec.obs_dim, self.spec.action_dim) <= _FEW_NUMBERS
        self._started = False
        self._last_actions: Array | None = None
        self._num_steps = 0
        self._steps_before = [0] * self.num_seeds  # A restored seed brings its count along.

    @classmethod
    def make(
        cls,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        seeds: Sequence[int] = (0,),
        mode: Mode = "auto",
        *,
        spec: EnvSpec | None = None,
        timeout: float = 300.0,
        threads: int = 0,
    ) -> SeedVectorEnv:
        """Make the environments of several seeds; they are reset by `reset`.

        Args:
            env_id: Registered id or `module:Class`.
            env_kwargs: See `make_env`.
            num_envs: How many for each seed.
            seeds: The seeds, see the module's docstring.
            mode: `sync` in this process, `async` in processes, `ray` in actors of a cluster,
                `native` all at once where there is such a version, `auto` that or sync, for games
                on four cores or more `async`.
            spec: The task's spec if it was probed before; None probes a throwaway instance.
            timeout: Seconds an `async` environment may take for one answer.
            threads: CPU threads of a native version, or processes of `async`; 0 takes as many as
                pay, at most the cores. Results do not depend on it.

        Raises:
            ConfigError: `num_envs`, `seeds` or `mode` cannot be used.
            EnvError: The environment cannot be made or breaks the contract.
        """
        assert seeds, "at least one seed"
        _check_arguments(num_envs, seeds, mode)
        kwargs = dict(env_kwargs or {})
        transform = learning_reward(env_id, kwargs)
        task = Task(
            env_id=env_id,
            env_kwargs=with_task_reward(kwargs),
            spec=probe_env(env_id, kwargs, env_seed(seeds[0], 0)) if spec is None else spec,
            num_envs=num_envs,
            seeds=tuple(seeds),
        )
        return cls(task, make_backend(task, mode, timeout, threads), transform)

    @property
    def note(self) -> str | None:
        """How the environments run, in one sentence; None if nothing had to be chosen."""
        if self.backend.note is None:
            return None
        count = self.num_seeds * self.num_envs
        noun = "environment runs" if count == 1 else "environments run"
        return f"{count} {noun} in vector_mode {self.backend.note}"

    def num_steps(self, seed_index: int = 0) -> int:
        """Calls of `step` so far, those before a restored snapshot included."""
        return self._steps_before[seed_index] + self._num_steps

    def reset(self, seeds: Sequence[int] | None = None) -> Array:
        """Begin new episodes everywhere; returns observations [S, n, ...].

        The first call seeds the environments, later calls continue their generators unless `seeds`
        take the place of the seeds given at the start.
        """
        if seeds is not None:
            assert len(seeds) == self.num_seeds, (seeds, self.num_seeds)
            self.seeds = tuple(seeds)
        lane_seeds: list[int] | None = None
        if seeds is not None or not self._started:
            lane_seeds = [env_seed(seed, i) for seed in self.seeds for i in range(self.num_envs)]
        try:
            obs = self.backend.reset(lane_seeds)
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        self._started = True
        self._require_finite(obs)
        return obs

    def step(self, actions: Array) -> Step:
        """One step of every environment.

        Args:
            actions: [S, n, ...] in learner units: [-1, 1] for bounded continuous actions, indices
                from 0 for discrete.

        Raises:
            NonFiniteError: An action is NaN or infinite.
            EnvError: An environment raised, hung, died, or gave NaN or infinity.
        """
        if self._float_action and not (self._few_numbers and math.isfinite(_total(actions))):
            self._require_finite_actions(actions)
        self._last_actions = env_actions = self._to_env(actions)
        assert env_actions.shape == self._action_shape, (env_actions.shape, self._action_shape)
        try:
            transition = self.backend.step(env_actions)
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        return self._as_step(transition)

    @property
    def parts(self) -> tuple[slice, ...]:
        """Shares of each seed's environments that can be stepped in turns, or all of them."""
        return (slice(0, self.num_envs),) if self._in_parts is None else self._in_parts.parts

    def begin(self, actions: Array, index: int) -> None:
        """Begin a step of one of several `parts`; see `step` for its actions [S, its n, ...].

        Every part must be stepped as often as the others before anything else is done.
        """
        assert self._in_parts is not None, "environments that are stepped all at once"
        try:
            self._in_parts.begin(self.spec.action_map.to_env(actions), index)
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error

    def end(self, index: int) -> Step:
        """Finish the step of a part, with arrays [S, its n, ...], while others continue."""
        assert self._in_parts is not None, "environments that are stepped all at once"
        try:
            transition = self._in_parts.end(index)
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        return self._as_step(transition, index)

    def _as_step(self, transition: Transition, index: int | None = None) -> Step:
        """Check what the environments, or a part of them, have given, and renew ended episodes."""
        obs, reward, terminated, truncated = transition
        if not (self._few_numbers and math.isfinite(_total(obs, _total(reward)))):
            self._require_finite(obs, reward)
        self._num_steps += index is None or index == self._last_part
        learned = reward if self._transform is None else self._transform(reward)
        # Looking for a byte in a string takes a tenth of the time of `any` over an array.
        if 1 not in terminated.tobytes() and 1 not in truncated.tobytes():
            return Step(obs, learned, terminated, truncated, obs, reward)
        ended = terminated | truncated
        try:
            if index is None or self._in_parts is None:
                fresh = self.backend.renew(ended, obs)
            else:
                fresh = self._in_parts.renew_part(ended, index)
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        if not (self._few_numbers and math.isfinite(_total(fresh))):
            self._require_finite(fresh)
        return Step(fresh, learned, terminated, truncated, obs, reward)

    def _require_finite(self, obs: Array, reward: Array | None = None) -> None:
        if reward is not None and not np.isfinite(reward).all():
            raise self._not_finite("reward", reward)
        if self._float_obs and not np.isfinite(obs).all():
            raise self._not_finite("observation", obs)

    def _first_bad(self, values: Array) -> int:
        lanes = np.isfinite(values).reshape(self.num_seeds * self.num_envs, -1)
        return int(np.flatnonzero(~lanes.all(axis=1))[0])

    def _require_finite_actions(self, actions: Array) -> None:
        if np.isfinite(actions).all():
            return
        seed, index = divmod(self._first_bad(actions), self.num_envs)
        raise NonFiniteError(
            f"the action for environment {index} of {self.env_id} (seed {self.seeds[seed]}) is not "
            f"finite at step {self.num_steps(seed)}: {actions[seed, index]}; the policy has "
            "diverged: lower learning_rate, or resume from an earlier checkpoint"
        )

    def _not_finite(self, what: str, values: Array) -> EnvError:
        seed, index = divmod(self._first_bad(values), self.num_envs)
        return EnvError(
            f"environment {self.env_id} (index {index}, seed {self.seeds[seed]}) gave a {what} "
            f"that is not finite at step {self.num_steps(seed)}: {values[seed, index]}"
            f"{self._last_action(seed, index)}"
        )

    def _last_action(self, seed: int, index: int) -> str:
        if self._last_actions is None:
            return ""
        return f"; the last action was {self._last_actions[seed, index]!r}"

    def _failure(self, error: Exception | SystemExit) -> EnvError:
        """One error that names the environment."""
        lane, reason = self.backend.blame(error)
        if isinstance(reason, EnvError):
            return reason
        seed, index = divmod(lane, self.num_envs)
        what = described(reason) if isinstance(reason, BaseException) else reason
        return EnvError(
            f"environment {self.env_id} (index {index}, seed {self.seeds[seed]}) failed at step "
            f"{self.num_steps(seed)}: {what}{self._last_action(seed, index)}"
        )

    def snapshot(self) -> State:
        """The state of all seeds as plain data; the environments continue undisturbed."""
        assert self._started, "reset before snapshot"
        try:
            parts = self.backend.snapshot()
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        self.resume_level = weakest_level(part["level"] for part in parts)
        own = {"env_id": self.env_id, "num_envs": self.num_envs}
        counts = [{"num_steps": self.num_steps(seed)} for seed in range(self.num_seeds)]
        return {"per_seed": [own | n | part for n, part in zip(counts, parts, strict=True)]}

    def restore(self, state: State) -> RestoreReport:
        """Continue from a snapshot; environment i of seed s is reported as index `s * n + i`.

        Raises:
            CheckpointError: The snapshot is of another task, number or kind of environments.
        """
        parts: list[State] = state["per_seed"]
        self._check_snapshot(parts)
        if not self._started:
            self.reset()
        try:
            messages = self.backend.restore(parts)
        except CheckpointError:
            raise
        except (Exception, SystemExit) as error:
            failure = self._failure(error)
            if isinstance(error.__cause__, CheckpointError):
                raise CheckpointError(str(error.__cause__)) from error
            raise failure from error
        self._steps_before = [part["num_steps"] - self._num_steps for part in parts]
        restarted = [lane for lane, message in enumerate(messages) if message is not None]
        return RestoreReport(
            level="restart" if restarted else weakest_level(part["level"] for part in parts),
            restarted=restarted,
            messages=[message for message in messages if message],
            obs=self.backend.observations(),
        )

    def _check_snapshot(self, parts: list[State]) -> None:
        if len(parts) != self.num_seeds:
            raise CheckpointError(
                f"environment snapshot: it holds {len(parts)} seeds, but this run has "
                f"{self.num_seeds}; resume with the seeds of the run"
            )
        own = {"env_id": self.env_id, "num_envs": self.num_envs, "kind": self.backend.kind}
        for part in parts:
            for key, value in own.items():
                if part.get(key) == value:
                    continue
                keys = "env_id, num_envs and env_kwargs"
                if key == "kind":
                    keys = "vector_mode, num_envs and env_kwargs"
                raise CheckpointError(
                    f"environment snapshot: {key} is {part.get(key)!r}, but this run has "
                    f"{value!r}; resume with the {keys} of the run"
                )

    def successes(self) -> Array | None:
        """What each environment's last ended episode said about success in its last step, [S, n].

        NaN where it said nothing; None where the environments run in a way that has no infos.
        """
        return self.backend.successes() if isinstance(self.backend, TellsSuccess) else None

    def close(self) -> None:
        """Close all environments and end their processes; may be called twice."""
        self.backend.close()

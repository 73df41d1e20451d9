"""n environments of one seed: `SeedVectorEnv` without the axis of seeds.

Shapes: n environments; arrays are [n, ...].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_training.envs.backends.kinds import Backend, Mode
from rl_training.envs.plain import State
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.snapshot import ResumeLevel
from rl_training.envs.spec import Array, EnvSpec
from rl_training.envs.step import RestoreReport, Step


class VectorEnv:
    """n environments of one seed; the arguments are those of `SeedVectorEnv.make`."""

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
        self._seeds = SeedVectorEnv.make(
            env_id, env_kwargs, num_envs, (seed,), mode, spec=spec, timeout=timeout
        )
        self.env_id = env_id
        self.num_envs = num_envs
        self.spec = self._seeds.spec

    @property
    def seed(self) -> int:
        """Seed of all environments."""
        return self._seeds.seeds[0]

    @property
    def num_steps(self) -> int:
        """Calls of `step` so far."""
        return self._seeds.num_steps()

    @property
    def resume_level(self) -> ResumeLevel:
        """The weakest level of the environments, see `rl_training.envs.snapshot`."""
        return self._seeds.resume_level

    @property
    def backend(self) -> Backend:
        """The way in which the environments run."""
        return self._seeds.backend

    def reset(self, seed: int | None = None) -> Array:
        """Begin new episodes everywhere, see `SeedVectorEnv.reset`; returns [n, ...]."""
        obs: Array = self._seeds.reset(None if seed is None else (seed,))[0]
        return obs

    def step(self, actions: Array) -> Step:
        """One step of every environment, see `SeedVectorEnv.step`; actions [n, ...]."""
        step = self._seeds.step(actions[None])
        obs = step.obs[0]
        final_obs = obs if step.final_obs is step.obs else step.final_obs[0]
        return Step(
            obs,
            step.reward[0],
            step.terminated[0],
            step.truncated[0],
            final_obs,
            step.task_reward[0],
        )

    def snapshot(self) -> State:
        """The state of all environments as plain data; they go on undisturbed."""
        state: State = self._seeds.snapshot()["per_seed"][0]
        return state

    def restore(self, state: State) -> RestoreReport:
        """Continue from a snapshot of the same task and number of environments.

        Raises:
            CheckpointError: The snapshot is of another task, number or kind of environments.
        """
        report = self._seeds.restore({"per_seed": [state]})
        return RestoreReport(report.level, report.restarted, report.messages, report.obs[0])

    def close(self) -> None:
        """Close the environments and end their processes; may be called twice."""
        self._seeds.close()

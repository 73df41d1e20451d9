"""S seeds side by side: one `VectorEnv` each, arrays with a leading seed axis.

Shapes: S seeds, n environments per seed; arrays are [S, n, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_training.envs.plain import State
from rl_training.envs.probe import probe_env
from rl_training.envs.snapshot import ResumeLevel, weakest_level
from rl_training.envs.spec import Array, EnvSpec
from rl_training.envs.vector import Mode, RestoreReport, Step, VectorEnv, env_seed
from rl_training.errors import CheckpointError


class SeedVectorEnv:
    """The environments of S seeds; seeds do not influence each other."""

    def __init__(self, envs: Sequence[VectorEnv]) -> None:
        assert envs, "at least one seed"
        self.envs = list(envs)
        self.spec: EnvSpec = self.envs[0].spec
        self.num_seeds = len(self.envs)
        self.num_envs = self.envs[0].num_envs
        assert all(e.num_envs == self.num_envs and e.spec == self.spec for e in self.envs)
        self._all_async = all(env.is_async for env in self.envs)

    @classmethod
    def make(
        cls,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        seeds: Sequence[int] = (0,),
        mode: Mode = "auto",
        *,
        timeout: float = 300.0,
    ) -> SeedVectorEnv:
        """Make the environments of several seeds; the task is probed once."""
        spec = probe_env(env_id, env_kwargs, env_seed(seeds[0], 0))
        made: list[VectorEnv] = []
        try:
            made.extend(
                VectorEnv(env_id, env_kwargs, num_envs, seed, mode, spec=spec, timeout=timeout)
                for seed in seeds
            )
        except Exception:
            for env in made:
                env.close()
            raise
        return cls(made)

    @property
    def resume_level(self) -> ResumeLevel:
        """The weakest level of all seeds."""
        return weakest_level(env.resume_level for env in self.envs)

    def reset(self, seeds: Sequence[int] | None = None) -> Array:
        """Begin new episodes everywhere, reseeded if `seeds` are given; returns [S, n, ...]."""
        given: Sequence[int | None] = [None] * self.num_seeds if seeds is None else seeds
        return np.stack([env.reset(seed) for env, seed in zip(self.envs, given, strict=True)])

    def step(self, actions: Array) -> Step:
        """One step of every environment; actions [S, n, ...] in learner units."""
        if self.num_seeds == 1:
            step = self.envs[0].step(actions[0])
            obs = step.obs[None]
            final_obs = obs if step.final_obs is step.obs else step.final_obs[None]
            reward, terminated, truncated = step.reward, step.terminated, step.truncated
            return Step(obs, reward[None], terminated[None], truncated[None], final_obs)
        if self._all_async:
            for env, action in zip(self.envs, actions, strict=True):
                env.send(action)
            return _stacked([env.receive() for env in self.envs])
        return _stacked([env.step(a) for env, a in zip(self.envs, actions, strict=True)])

    def snapshot(self) -> State:
        """Snapshots of all seeds."""
        return {"per_seed": [env.snapshot() for env in self.envs]}

    def restore(self, state: State) -> RestoreReport:
        """Continue from a snapshot; environment i of seed s is reported as index `s * n + i`."""
        if len(state["per_seed"]) != self.num_seeds:
            raise CheckpointError(
                f"environment snapshot: it holds {len(state['per_seed'])} seeds, but this run has "
                f"{self.num_seeds}; resume with the seeds of the run"
            )
        parts = zip(self.envs, state["per_seed"], strict=True)
        reports = [env.restore(part) for env, part in parts]
        return RestoreReport(
            level=weakest_level(report.level for report in reports),
            restarted=[s * self.num_envs + i for s, r in enumerate(reports) for i in r.restarted],
            messages=[message for report in reports for message in report.messages],
            obs=np.stack([report.obs for report in reports]),
        )

    def close(self) -> None:
        """Close all environments and end their processes; may be called twice."""
        for env in self.envs:
            env.close()


def _stacked(steps: list[Step]) -> Step:
    obs = np.stack([step.obs for step in steps])
    none_ended = all(step.final_obs is step.obs for step in steps)
    return Step(
        obs=obs,
        reward=np.stack([step.reward for step in steps]),
        terminated=np.stack([step.terminated for step in steps]),
        truncated=np.stack([step.truncated for step in steps]),
        final_obs=obs if none_ended else np.stack([step.final_obs for step in steps]),
    )

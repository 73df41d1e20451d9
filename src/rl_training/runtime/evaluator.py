"""Evaluation on environments of its own.

It draws from no generator of the training run: its environments, and the randomness of acting, are
seeded by (seed, step).  So evaluating more often, in another way or not at all leaves training
bit-exact.  Atari games are played whole, and every task pays its own reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import ActingState, AnyLearner
from rl_training.envs.backends.kinds import Mode
from rl_training.envs.options import evaluation_kwargs
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.tasks.spaces_only import require_environment
from rl_training.errors import EnvError
from rl_training.rng import Rng, derive_seed
from rl_training.runtime.compile.cuda_graph import CapturedPolicy
from rl_training.runtime.compile.trace import CompileError, Source, trace
from rl_training.transfer import HostCopy

MAX_PARALLEL = 32
LONGEST_EPISODE = 1_000_000
"""Steps after which an episode counts as one that never ends; a whole Atari game has 27,000."""


class _CapturedPolicy:
    """A policy as a CUDA graph, for observations of one shape."""

    def __init__(
        self,
        learner: AnyLearner,
        act: Callable[[Tensor], Tensor],
        rng: Rng,
        state: ActingState | None,
        obs: NDArray[Any],
    ) -> None:
        self.policy: CapturedPolicy | None = None
        """None where it cannot be captured."""
        self._rng, self._state = rng, state
        self._learner, self._shape = learner, obs.shape
        self._starts = torch.ones(obs.shape[:2], dtype=torch.bool, device=learner.device)
        example = torch.from_numpy(obs).to(learner.device)
        act(example)  # libraries set themselves up at first use
        owners: dict[str, object] = {"learner": learner}
        if state is not None:
            owners["acting"] = state
        try:
            trace(Source("evaluation", act, owners), (example,))
        except (CompileError, RuntimeError):
            return  # it reads a number back, or one of Python's that changes during a run
        self.policy = CapturedPolicy(act, learner.device)
        self.policy.capture(obs)

    def begin(self, fresh: Mapping[str, Tensor]) -> None:
        """Go to the start of episodes, and to the randomness of an evaluation."""
        self._rng.load_state_dict(fresh)
        if self._state is not None:
            self._state.begin_episodes(self._starts)

    def fits(self, learner: AnyLearner, obs: NDArray[Any]) -> bool:
        """Tell whether it is this learner's, for so many observations."""
        return self._learner is learner and self._shape == obs.shape


class Evaluator:
    """Runs whole episodes with the learner's policy: its best actions, or sampled ones.

    All episodes of all seeds are stepped together, natively where the task can be.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: dict[str, Any],
        seeds: Sequence[int],
        *,
        deterministic: bool = True,
        mode: Mode = "auto",
        threads: int = 0,
    ) -> None:
        self.env_id, self.seeds, self.deterministic = env_id, tuple(seeds), deterministic
        self.env_kwargs = evaluation_kwargs(env_kwargs)
        # What a policy learned from native frames is judged on native frames. The other modes
        # give the same bits and are for environments that are slow to train in.
        self._mode: Mode = "native" if mode == "native" else "auto"
        self._threads = threads
        self._envs: SeedVectorEnv | None = None
        self._captured: _CapturedPolicy | None = None
        self.successes: list[list[float]] | None = None
        """Of the last evaluation, `[S][num_episodes]`: what each episode's last step said about
        success, 0 or 1; None where no episode said anything."""

    def evaluate(self, learner: AnyLearner, num_episodes: int, step: int) -> list[list[float]]:
        """Return the episode returns of each seed, `[S][num_episodes]`; sets `successes`."""
        require_environment(self.env_id)
        chunks = []
        for chunk, first in enumerate(range(0, num_episodes, MAX_PARALLEL)):
            count = min(num_episodes - first, MAX_PARALLEL)
            chunks.append(self._run_chunk(learner, count, (step, chunk)))
        returns, successes = (np.concatenate(parts, 1) for parts in zip(*chunks, strict=True))
        told = not np.isnan(successes).all()
        # Some tasks speak of success only where there was one.
        self.successes = np.nan_to_num(successes).tolist() if told else None
        found: list[list[float]] = returns.tolist()
        return found

    def _run_chunk(
        self, learner: AnyLearner, count: int, key: tuple[int, int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Run `count` episodes of each seed; their returns and what they said about success."""
        envs = self._environments(count)
        obs = envs.reset([derive_seed(seed, "eval", *key) for seed in self.seeds])
        total = np.zeros(obs.shape[:2])
        success = np.full(obs.shape[:2], np.nan)
        running = np.ones(obs.shape[:2], dtype=bool)
        policy = self._policy(learner, obs, key)
        for _ in range(LONGEST_EPISODE):
            step = envs.step(policy(obs).array())
            total += np.where(running, step.task_reward, 0.0)
            ended = running & (step.terminated | step.truncated)
            obs = step.obs
            if not ended.any():
                continue
            said = envs.successes()
            if said is not None:
                success[ended] = said[ended]
            running &= ~ended
            if not running.any():
                return total, success
        raise EnvError(
            f"environment {self.env_id}: an episode of the evaluation had not ended after "
            f"{LONGEST_EPISODE} steps; set env_kwargs.max_episode_steps, or eval_episodes to 0"
        )

    def _policy(
        self, learner: AnyLearner, obs: NDArray[Any], key: tuple[int, int]
    ) -> Callable[[NDArray[Any]], HostCopy]:
        """Return the policy at the start of episodes, with the randomness of `key`."""
        seeds = [derive_seed(seed, "eval policy", *key) for seed in self.seeds]
        rng = Rng(seeds, "eval", learner.device)
        # An episode that ended is not acted in again, so its state does not matter.
        state = learner.initial_acting_state(obs.shape[1])
        if state is not None:
            state.draw_from(rng)
        choose = learner.act_from if self.deterministic else learner.sample_from

        def act(on_device: Tensor) -> Tensor:
            with torch.no_grad(), learner.drawing_from(rng):
                return choose(state, on_device)

        if self._captures(learner, obs.shape[1]):
            # One by one, the launches of its small operations take most of an evaluation's time.
            fresh = rng.state_dict()  # to be captured, the policy is tried, which draws
            if self._captured is None or not self._captured.fits(learner, obs):
                self._captured = _CapturedPolicy(learner, act, rng, state, obs)
            self._captured.begin(fresh)
            if self._captured.policy is not None:
                return self._captured.policy
        return lambda obs: HostCopy.of(act(torch.from_numpy(obs).to(learner.device)))

    def _captures(self, learner: AnyLearner, num_envs: int) -> bool:
        """Whether acting may be one CUDA graph; parts of it that are graphs cannot be in one."""
        return learner.device.type == "cuda" and not learner.acting_parts(num_envs)

    def _environments(self, count: int) -> SeedVectorEnv:
        if self._envs is None or self._envs.num_envs != count:
            self.close()
            self._envs = SeedVectorEnv.make(
                self.env_id,
                self.env_kwargs,
                count,
                self.seeds,
                self._mode,
                threads=self._threads,
            )
        return self._envs

    def close(self) -> None:
        """Close the environments."""
        if self._envs is not None:
            self._envs.close()
            self._envs = None

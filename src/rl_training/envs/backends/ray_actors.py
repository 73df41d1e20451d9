"""Environments in actors of a Ray cluster, with the same bits as in this process.

An actor owns some of the lanes, as `SyncEnvs` does here.  One that dies is made again from its last
snapshot and given the calls since then again, so that nothing is lost and nothing differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rl_training.cluster import connect, import_ray
from rl_training.envs.backends.kinds import SyncEnvs
from rl_training.envs.backends.lanes import (
    LaneTask,
    Task,
    Transition,
    split,
    unwrapped_states,
    wrapped_state,
    wrapped_states,
)
from rl_training.envs.plain import State
from rl_training.envs.snapshot import ResumeLevel, weakest_level
from rl_training.envs.spec import Array
from rl_training.errors import EnvError, RemoteTraceback

MOST_CALLS = 2_000
"""Calls kept to be repeated; then the actor's state is fetched, and they are forgotten."""
MOST_REVIVALS = 3
"""How often in a row an actor may die over the same call."""


class LaneWorker:
    """What an actor does: environments one after another, all arrays `[lanes, ...]`."""

    def __init__(self, task: LaneTask) -> None:
        self._envs = SyncEnvs(task)

    def resume_level(self) -> ResumeLevel:
        """The weakest level of the environments."""
        return self._envs.resume_level

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes."""
        obs: Array = self._envs.reset(seeds)[0]
        return obs

    def step(self, actions: Array) -> Transition:
        """One step of all."""
        obs, reward, terminated, truncated = self._envs.step(actions[None])
        return obs[0], reward[0], terminated[0], truncated[0]

    def renew(self, ended: Array) -> Array:
        """Begin new episodes where `ended`."""
        obs: Array = self._envs.renew(ended[None], self._envs.observations())[0]
        return obs

    def successes(self) -> Array:
        """What each environment's last ended episode said about success."""
        success: Array = self._envs.successes()[0]
        return success

    def observations(self) -> Array:
        """The current observations."""
        obs: Array = self._envs.observations()[0]
        return obs

    def snapshot(self) -> State:
        """The state of all."""
        return self._envs.snapshot()[0]

    def restore(self, state: State) -> list[str | None]:
        """Continue from a snapshot."""
        return self._envs.restore([state])

    def close(self) -> None:
        """Close them."""
        self._envs.close()


@dataclass
class _Part:
    """An actor, and what it takes to make it again."""

    task: LaneTask
    handle: Any = None
    base: State | None = None
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)


class RayEnvs:
    """Environments spread over actors."""

    kind: ClassVar[str] = "wrapped"
    note = None

    def __init__(self, task: Task, timeout: float) -> None:
        self._ray = import_ray("vector_mode ray")
        self._began = connect(self._ray)
        self._shape, self._timeout = task.shape, timeout
        self._actor = self._ray.remote(LaneWorker)
        self._parts = [_Part(part) for part in split(task, self._count(task))]
        self._failed = 0
        self._closed = False
        self._level: ResumeLevel = "restart"  # until they have said otherwise
        for part in self._parts:
            part.handle = self._make(part.task)
        levels = self._all("resume_level", [()] * len(self._parts), keep=False)
        self._level = weakest_level(levels)

    def _count(self, task: Task) -> int:
        processors = int(self._ray.cluster_resources().get("CPU", 1))
        return max(1, min(task.shape[0] * task.shape[1], processors))

    def _make(self, task: LaneTask) -> Any:
        # No CPU of their own: a run that is itself a task of the cluster must not wait for them.
        return self._actor.options(num_cpus=0, scheduling_strategy="SPREAD").remote(task)

    # Calls

    def _all(self, name: str, arguments: Sequence[tuple[Any, ...]], *, keep: bool) -> list[Any]:
        """Call every actor, and those that died once more; `keep` what changes their state."""
        references = []
        for part, given in zip(self._parts, arguments, strict=True):
            if keep:
                part.calls.append((name, given))
            references.append(getattr(part.handle, name).remote(*given))
        return [
            self._answer(index, name, arguments[index], reference, keep)
            for index, reference in enumerate(references)
        ]

    def _answer(
        self, index: int, name: str, given: tuple[Any, ...], reference: Any, keep: bool
    ) -> Any:
        part = self._parts[index]
        self._failed = index
        revivals = 0 if self._level == "restart" else MOST_REVIVALS
        while revivals and self._is_dead(reference):
            revivals -= 1
            self._revive(part, skip_last=keep)
            reference = getattr(part.handle, name).remote(*given)
        return self._ray.get(reference, timeout=self._timeout)

    def _is_dead(self, reference: Any) -> bool:
        """Wait for an answer; tells whether the actor died over it."""
        try:
            self._ray.get(reference, timeout=self._timeout)
        except self._ray.exceptions.RayActorError:
            return True
        return False

    def _revive(self, part: _Part, *, skip_last: bool) -> None:
        """Make an actor again and bring it to where it was before the call that found it dead."""
        part.handle = self._make(part.task)
        references = [] if part.base is None else [part.handle.restore.remote(part.base)]
        calls = part.calls[:-1] if skip_last else part.calls
        references += [getattr(part.handle, name).remote(*given) for name, given in calls]
        if references:
            self._ray.wait(references[-1:], timeout=self._timeout)

    def _by_lanes(self, values: Array) -> list[Array]:
        """Cut `[S, n, ...]` into the actors' parts."""
        lanes = values.reshape(-1, *values.shape[2:])
        ends = np.cumsum([len(part.task.lanes) for part in self._parts])[:-1]
        return list(np.split(lanes, ends))

    def _joined(self, parts: Sequence[Array]) -> Array:
        joined = np.concatenate(parts)
        return joined.reshape(*self._shape, *joined.shape[1:])

    # What `SeedVectorEnv` asks for

    @property
    def resume_level(self) -> ResumeLevel:
        """The weakest level of the environments."""
        return self._level

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes everywhere."""
        given: list[tuple[Any, ...]] = [(None,)] * len(self._parts)
        if seeds is not None:
            table = np.asarray(seeds, dtype=object).reshape(self._shape)
            given = [(part.tolist(),) for part in self._by_lanes(table)]
        return self._joined(self._all("reset", given, keep=True))

    def step(self, actions: Array) -> Transition:
        """One step of all environments."""
        if len(self._parts[0].calls) >= MOST_CALLS and self._level != "restart":
            self.snapshot()
        given = [(part,) for part in self._by_lanes(actions)]
        answers = self._all("step", given, keep=True)
        obs, reward, terminated, truncated = zip(*answers, strict=True)
        return (
            self._joined(obs),
            self._joined(reward),
            self._joined(terminated),
            self._joined(truncated),
        )

    def renew(self, ended: Array, obs: Array) -> Array:  # noqa: ARG002
        """Begin new episodes where `ended`."""
        given = [(part,) for part in self._by_lanes(ended)]
        return self._joined(self._all("renew", given, keep=True))

    def successes(self) -> Array:
        """What each environment's last ended episode said about success; NaN for nothing."""
        return self._joined(self._all("successes", [()] * len(self._parts), keep=False))

    def observations(self) -> Array:
        """The current observations."""
        return self._joined(self._all("observations", [()] * len(self._parts), keep=False))

    def snapshot(self) -> list[State]:
        """The state of every seed."""
        states = self._all("snapshot", [()] * len(self._parts), keep=False)
        for part, state in zip(self._parts, states, strict=True):
            if self._level != "restart":
                part.base, part.calls = state, []
        envs = [env for state in states for env in state["envs"]]
        obs = np.concatenate([state["obs"] for state in states])
        return wrapped_states(self._shape, obs, envs)

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots."""
        obs, envs = unwrapped_states(states)
        messages: list[str | None] = []
        start = 0
        for index, part in enumerate(self._parts):
            lanes = slice(start, start + len(part.task.lanes))
            start = lanes.stop
            part.base, part.calls = wrapped_state(obs[lanes], envs[lanes]), []
            reference = part.handle.restore.remote(part.base)
            messages += self._answer(index, "restore", (part.base,), reference, keep=False)
        return messages

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """Which environment failed, and why."""
        lane = sum(len(part.task.lanes) for part in self._parts[: self._failed])
        reason: object = error
        if isinstance(error, self._ray.exceptions.RayTaskError):
            cause = error.cause
            error.__cause__ = RemoteTraceback(str(error))  # its text is the traceback
            reason = cause if isinstance(cause, EnvError) else f"{type(cause).__name__}: {cause}"
        elif isinstance(error, self._ray.exceptions.GetTimeoutError):
            reason = f"gave no answer within {self._timeout:g} s"
        elif isinstance(error, self._ray.exceptions.RayActorError):
            reason = "its Ray actor died and could not be made again"
        self.close()
        return lane, reason

    def close(self) -> None:
        """End the actors."""
        if self._closed:
            return
        self._closed = True
        for part in self._parts:
            if part.handle is not None:
                self._ray.kill(part.handle)
        if self._began:
            self._ray.shutdown()

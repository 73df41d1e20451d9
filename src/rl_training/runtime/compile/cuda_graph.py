"""Programs as CUDA graphs: one launch for many kernels, and for several updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.sources import rows_per_update
from rl_training.data.replay.foresight import Foresight
from rl_training.data.replay.storage import ReplayBuffer, StepArrays
from rl_training.runtime.compile.cache import Program
from rl_training.runtime.compile.programs import counted
from rl_training.runtime.compile.trace import flatten, unflatten
from rl_training.runtime.recorder import MOST_AT_ONCE, MetricRecorder
from rl_training.transfer import Arrival, Captured, HostCopy, Staging, capture, pinned_like

STEPS_PER_REPLAY = MOST_AT_ONCE
"""Updates in one CUDA graph, where that many are due at once."""


class CapturedUpdates:
    """Updates of one phase as CUDA graphs of one step and of several."""

    def __init__(
        self, learner: AnyLearner, recorder: MetricRecorder, program: Program, phase: int
    ) -> None:
        self.learner, self.recorder, self.phase = learner, recorder, phase
        self._program = program
        recorder.prepare_keeping()
        self._graphs = {1: self._captured(1)}

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        return capture(lambda: do_updates([self._program] * size, self.recorder))

    def __call__(self, count: int) -> int:
        """Do several updates if that many are due and alike, else one; returns how many."""
        size = STEPS_PER_REPLAY if self._alike(count) else 1
        if size not in self._graphs:
            # Not before: updates of thousands of kernels take seconds to capture.
            self._graphs[size] = self._captured(size)
        self._graphs[size].replay()
        self.recorder.count_kept(size)
        return size

    def _alike(self, count: int) -> bool:
        if count < STEPS_PER_REPLAY:
            return False
        done = self.learner.num_updates.value
        phases = set()
        for step in range(STEPS_PER_REPLAY):
            with counted(self.learner, done + step):
                phases.add(self.learner.phase())
        return phases == {self.phase}


def do_updates(programs: Sequence[Program], recorder: MetricRecorder) -> None:
    """Do updates one after the other and keep what they measure; device work only."""
    for program in programs:
        recorder.keep(program())


class CapturedPass:
    """What a pass of the off-policy loop does on the device, as one CUDA graph.

    It stores a step, does the updates that are due and chooses the next actions, so that a pass
    costs one launch and one wait. These follow each other as they do one by one; where acting
    overlaps, the actions come first and the host need not wait for the updates. Schedules of acting
    (an exploration rate) are read at the step before the one that is acted in.

    Updates whose batches hold no row of a step may be begun before the environments take it, and
    run meanwhile. They give the same bits as after it: what the device computes, and in which order
    it draws, is the same. Storing the step and acting are the rest of the pass then.
    """

    def __init__(
        self,
        learner: AnyLearner,
        replay: ReplayBuffer,
        recorder: MetricRecorder,
        act: Callable[[Tensor], Tensor],
        updates: Mapping[int, Program],
        *,
        acts_first: bool,
    ) -> None:
        """Take hold of the parts; a graph is captured when it is first needed.

        Args:
            learner: Who learns.
            replay: What it learns from, and the steps are stored in.
            recorder: Takes the metrics.
            act: Chooses exploring actions `[S, n, ...]` for observations of the device.
            updates: Programs of one update, by phase.
            acts_first: Choose actions before the updates, see `TrainConfig.overlap`.
        """
        self.learner, self.replay, self.recorder = learner, replay, recorder
        self._act, self._updates, self._acts_first = act, dict(updates), acts_first
        self._device = learner.device
        self._arrival = Arrival(self._device)
        stored = replay.rows["action"]
        lead = (learner.num_seeds, replay.num_envs)
        self._action = pinned_like(stored.new_empty(*lead, *stored.shape[2:]))
        self._chosen = HostCopy(self._action, self._arrival.event)
        self._single = {phase: (phase,) for phase in self._updates}
        self._graphs: dict[tuple[int, ...], Captured] = {}
        self._early: dict[tuple[int, ...], Captured] = {}
        self._staging: Staging | None = None
        self._foresight: Foresight | None = None
        if replay.foreseeable and not acts_first:
            self._foresight = Foresight(replay, rows_per_update(learner))
        self._begun: tuple[int, ...] | None = None

    def phases(self, count: int) -> tuple[int, ...] | None:
        """Return the phases of the next updates; None where a pass cannot be one graph."""
        learner = self.learner
        if count == 1:
            return self._single.get(learner.phase())
        if count > MOST_AT_ONCE:
            return None
        phases, done = [], learner.num_updates.value
        for step in range(count):
            with counted(learner, done + step):
                phases.append(learner.phase())
        return tuple(phases) if self._updates.keys() >= set(phases) else None

    def forget_draws(self) -> None:
        """Note that batches were drawn outside of whole passes."""
        if self._foresight is not None:
            self._foresight.forget()

    def begin(self, count: int) -> None:
        """Begin the updates of the next step if none of them needs it; `__call__` does the rest."""
        assert self._begun is None
        if not count or self._foresight is None or self._staging is None:
            return
        phases = self.phases(count)
        if phases is None or not self._foresight.is_apart(count):
            return
        graph = self._early.get(phases)
        if graph is None:
            graph = self._early[phases] = Captured(partial(self._ahead, phases), self._device)
        graph()
        self._begun = phases

    def _ahead(self, phases: tuple[int, ...]) -> None:
        self.replay.count_ahead()
        do_updates([self._updates[phase] for phase in phases], self.recorder)

    def __call__(self, seen: StepArrays, obs: NDArray[Any], phases: tuple[int, ...]) -> HostCopy:
        """Store a step, do the updates of these phases and choose actions for `obs`."""
        assert self._begun in (None, phases), (self._begun, phases)
        left = phases if self._begun is None else ()
        self._begun = None
        graph = self._graphs.get(left)
        if graph is None:
            graph = self._graphs[left] = self._graph(obs, left)
        assert self._staging is not None
        # The actions of the pass before have arrived, so nothing reads the staged arrays any more.
        np.copyto(self._staging.writable()["obs"], obs)
        self.replay.add_step(seen, graph)
        if phases:
            self.learner.num_updates.value += len(phases)
            self.recorder.count_kept(len(phases))
            if self._foresight is not None:
                self._foresight.drawn(len(phases))
        return self._chosen

    def _graph(self, obs: NDArray[Any], phases: tuple[int, ...]) -> Captured:
        if self._staging is None:
            seen = torch.from_numpy(obs)
            self._staging = Staging({"obs": (seen.shape, seen.dtype)}, self._device)
            self.replay.prepare_staging()
            self.recorder.prepare_keeping()
        programs = [self._updates[phase] for phase in phases]

        def whole() -> None:
            if self._acts_first:
                self._choose()
            self.replay.store_staged()
            do_updates(programs, self.recorder)
            if not self._acts_first:
                self._choose()

        return Captured(whole, self._device)

    def _choose(self) -> None:
        assert self._staging is not None
        self._staging.send()
        chosen = self._act(self._staging.device["obs"])
        self._action.copy_(chosen, non_blocking=True)
        self._arrival.mark()


class CapturedPolicy:
    """Acting as one CUDA graph, from observations of the host to actions of the host.

    Both transfers are part of the graph, so that a step costs one launch and one wait.
    """

    def __init__(self, act: Callable[..., Tensor], device: torch.device) -> None:
        """Take hold of a policy; it is captured at its first call.

        Args:
            act: Chooses actions `[S, n, ...]` for observations and further tensors of the device;
                what it changes, it changes in place.
            device: Where it acts.
        """
        self._act, self._device = act, device
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def obs(self) -> Tensor:
        """The observations of the last call on the device, until the next one."""
        return self._staging.device["obs"]

    def __call__(self, obs: NDArray[Any], *more: Tensor, part: slice | None = None) -> HostCopy:
        """Begin to choose actions for observations `[S, n, ...]`.

        With a part, `obs` is what these environments see, and the others see what they saw last.
        """
        if self._graph is None:
            assert part is None, "the first call must show all environments"
            self.capture(obs, more)
            assert self._graph is not None
        seen = self._staging.writable()["obs"]
        np.copyto(seen if part is None else seen[:, part], obs)
        for static, tensor in zip(self._more, more, strict=True):
            static.copy_(tensor)
        self._graph.replay()
        # The actions arrive after the observations were read: one event tells of both.
        return HostCopy(self._action, self._staging.mark_sent())

    def capture(self, obs: NDArray[Any], more: tuple[Tensor, ...] = ()) -> None:
        """Capture the policy for what a call would be given; it does not act yet."""
        example = torch.from_numpy(obs)
        self._staging = Staging({"obs": (example.shape, example.dtype)}, self._device)
        self._more = [tensor.clone() for tensor in more]
        found: list[Tensor] = []
        capture(lambda: found.append(self._act(self.obs, *self._more)))  # to learn its shape
        self._action = pinned_like(found[0])

        def whole() -> None:
            self._staging.send()
            self._action.copy_(self._act(self.obs, *self._more), non_blocking=True)

        self._graph = capture(whole)


class CapturedCall:
    """A program with arguments as a CUDA graph, captured at its first call."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._graph: torch.cuda.CUDAGraph | None = None
        self._arguments: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, *arguments: Any) -> Any:
        """Run it; the result belongs to the caller."""
        given, structure = flatten(list(arguments))
        if self._graph is None:
            self._arguments = [
                tensor.clone(memory_format=torch.contiguous_format) for tensor in given
            ]
            inside = unflatten(structure, iter(self._arguments))
            self._graph = capture(lambda: self._outputs.extend(flatten(self.program(*inside))[0]))
        for static, tensor in zip(self._arguments, given, strict=True):
            static.copy_(tensor)
        self._graph.replay()
        return unflatten(self.program.output, iter([tensor.clone() for tensor in self._outputs]))

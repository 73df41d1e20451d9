"""Programs as CUDA graphs: one launch for many kernels, and for several updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.runtime.compile.cache import Program
from rl_training.runtime.compile.programs import counted
from rl_training.runtime.compile.trace import flatten, unflatten
from rl_training.transfer import HostCopy, Staging, capture, pinned_like

if TYPE_CHECKING:
    from rl_training.runtime.session import MetricRecorder

STEPS_PER_REPLAY = 8
"""Updates in one CUDA graph, where that many are due at once."""


class CapturedUpdates:
    """Updates of one phase as CUDA graphs of one step and of several."""

    def __init__(
        self, learner: AnyLearner, recorder: MetricRecorder, program: Program, phase: int
    ) -> None:
        self.learner, self.recorder, self.phase = learner, recorder, phase
        self._graphs = {size: _capture(program, size) for size in (1, STEPS_PER_REPLAY)}

    def __call__(self, count: int) -> int:
        """Do several updates if that many are due and alike, else one; returns how many."""
        size = STEPS_PER_REPLAY if self._alike(count) else 1
        graph, rows = self._graphs[size]
        graph.replay()
        self.recorder.record_rows(rows.clone())
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


def _capture(program: Program, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture `size` calls; also returns the rows they write, `[size, S, M]`."""
    rows: list[Tensor] = []
    graph = capture(lambda: rows.append(torch.stack([program() for _ in range(size)])))
    return graph, rows[0]


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

    def __call__(self, obs: NDArray[Any], *more: Tensor) -> HostCopy:
        """Begin to choose actions for observations `[S, n, ...]`."""
        if self._graph is None:
            self._capture(obs, more)
            assert self._graph is not None
        np.copyto(self._staging.writable()["obs"], obs)
        for static, tensor in zip(self._more, more, strict=True):
            static.copy_(tensor)
        self._graph.replay()
        # The actions arrive after the observations were read: one event tells of both.
        return HostCopy(self._action, self._staging.mark_sent())

    def _capture(self, obs: NDArray[Any], more: tuple[Tensor, ...]) -> None:
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

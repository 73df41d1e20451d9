"""Programs as CUDA graphs: one launch for many kernels, and for several updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.runtime.compile.cache import Program
from rl_training.runtime.compile.programs import counted
from rl_training.runtime.compile.trace import flatten, unflatten
from rl_training.runtime.recorder import MetricRecorder

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
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        rows = torch.stack([program() for _ in range(size)])
    return graph, rows


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
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                self._outputs = flatten(self.program(*inside))[0]
        for static, tensor in zip(self._arguments, given, strict=True):
            static.copy_(tensor)
        self._graph.replay()
        return unflatten(self.program.output, iter([tensor.clone() for tensor in self._outputs]))

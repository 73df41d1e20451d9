"""The worker's end of the line to the benchmark: wait for a request, do a chunk, report.

Peers import this in their own environments, so only the standard library is used.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Literal, TextIO

Accelerate = Literal["off", "compile", "graph"]
Precision = Literal["fp32", "tf32", "bf16"]
VectorMode = Literal["auto", "sync"]


@dataclass(frozen=True, kw_only=True)
class WorkSettings:
    """How a side does its work."""

    chunk: int
    threads: int = 1
    accelerate: Accelerate = "off"
    precision: Precision = "fp32"
    vector_mode: VectorMode = "auto"


class Pace:
    """Hands out chunks one at a time, so that sides can take turns."""

    def __init__(self, settings: WorkSettings, requests: TextIO, answers: TextIO) -> None:
        self.settings = settings
        self._requests, self._answers = requests, answers
        self._facts: dict[str, object] | None = {}
        self._start = 0.0

    def tell(self, **facts: object) -> None:
        """Note something about the preparation, before the first `begin`."""
        assert self._facts is not None
        self._facts |= facts

    def begin(self) -> bool:
        """Wait for the next request and start the clock; False when no more is wanted."""
        if self._facts is not None:
            self._answer({"ready": self._facts})
            self._facts = None
        if not self._requests.readline():
            return False
        self._start = time.perf_counter()
        return True

    def end(self, amount: float) -> None:
        """Report how much was done since `begin`, per second."""
        self.report(amount / (time.perf_counter() - self._start))

    def report(self, figure: float, **detail: float) -> None:
        """Report a figure of another kind."""
        self._answer({"figure": figure, "detail": detail})

    def fail(self, reason: str) -> None:
        """Say why there is nothing to measure."""
        self._answer({"failed": reason})

    def _answer(self, message: dict[str, object]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

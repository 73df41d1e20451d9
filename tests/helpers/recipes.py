"""A maker of made-up episodes, for shards without a simulator."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS = 2_500
"""Rows of an episode: two of them make a shard."""


@dataclass
class CountingMaker:
    """Episodes that say by which arguments they were made; some of them may go wrong."""

    deadly: Path | None = None
    """While this file exists, making episode 5 kills the process."""
    failing: bool = False
    """Whether making episode 5 raises."""
    slow: float = 0.0
    """Seconds that an episode takes."""

    def __call__(self, split: str, number: int) -> dict[str, NDArray[Any]]:
        if number == 5 and self.failing:
            raise ZeroDivisionError("no such episode")
        if number == 5 and self.deadly is not None and self.deadly.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.slow)
        rng = np.random.default_rng([number, split == "validation"])
        return {"values": rng.normal(size=(STEPS, 2)), "numbers": np.full(STEPS, number)}

    def close(self) -> None:
        pass

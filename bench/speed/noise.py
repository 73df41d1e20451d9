"""The same made-up transitions for all sides of an offline row; peers read it too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.speed.sizes import SAC

EPISODE = 1_000


def noise_columns() -> dict[str, NDArray[np.float32]]:
    """Return `SAC.buffer` transitions of noise whose episodes end by termination.

    Terminations, because some peers drop the last row of an episode that was cut.
    """
    rng = np.random.default_rng(0)
    count = SAC.buffer
    return {
        "observations": 0.3 * rng.standard_normal((count, SAC.obs), np.float32),
        "actions": np.tanh(rng.standard_normal((count, SAC.action), np.float32)),
        "rewards": 0.3 * rng.standard_normal(count, np.float32),
        "terminals": (np.arange(count) % EPISODE == EPISODE - 1).astype(np.float32),
    }

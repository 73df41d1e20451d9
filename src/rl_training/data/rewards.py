"""What is done to rewards before they are learned from: recorded and new ones alike.

Critics that learned on scaled rewards are wrong by that factor on any others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def scale_rewards(rewards: NDArray[Any], scale: float, shift: float) -> NDArray[np.float32]:
    """Return `scale * r + shift` in single precision, rounded once."""
    return (np.asarray(rewards, np.float64) * scale + shift).astype(np.float32)

"""The state of the Atari emulator as plain data, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_training.envs.plain import State, encode, generator_from


def atari_state(base: Any) -> State:
    """The emulator's whole state, its random numbers included."""
    raw: bytes = base.ale.cloneState(include_rng=True).serialize()
    return {"ale": np.frombuffer(raw, np.uint8).copy(), "generator": encode(base.np_random)}


def set_atari_state(base: Any, state: State) -> None:
    """Put the emulator where it was."""
    saved = type(base.ale.cloneState())(np.asarray(state["ale"], np.uint8).tobytes())
    base.ale.restoreState(saved)
    base._np_random = generator_from(state["generator"])

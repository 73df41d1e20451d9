"""Tells which updates need not wait for the step that the environments are taking.

An update learns from a batch of rows, and the newest step is one of up to a million of them: most
batches do not hold it.  The draws of a replay are a function of a key and a counter, so the host
can compute what the device is going to draw without asking it.  An update whose batch holds no row
of the step in progress gives the same bits before that step is stored as after it.

Shapes: D draws, S seeds, B rows drawn per seed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_training.data.replay.storage import ReplayBuffer

_AT_ONCE = 1 << 14
"""Numbers that are computed at a time, or those of one draw where it has more."""


class Foresight:
    """Knows the next draws of a replay."""

    def __init__(self, replay: ReplayBuffer, batch_size: int) -> None:
        """Take hold of a replay whose `foreseeable` says that it can be done.

        Args:
            replay: Its batches are foreseen.
            batch_size: Rows of each per seed.
        """
        assert replay.foreseeable, type(replay).__name__
        self._replay, self._batch_size = replay, batch_size
        self._draws = max(1, _AT_ONCE // (replay.num_seeds * batch_size))
        self._first = 0
        self._words: NDArray[np.uint32] = np.zeros((0, 0, 0), np.uint32)  # [D, S, B]
        self._next: int | None = None

    def forget(self) -> None:
        """Note that others have drawn: where the draws are is to be asked of the device."""
        self._next = None

    def drawn(self, count: int) -> None:
        """Note that the next `count` batches were drawn."""
        if self._next is not None:
            self._next += count

    def is_apart(self, count: int) -> bool:
        """Tell whether none of the next `count` batches reads the step that is stored next."""
        replay = self._replay
        if self._next is None:
            self._next = int(replay.rng.counter)
        size = min(replay.inserted.value + replay.num_envs, replay.drawable)
        for newest in replay.draws_of_newest():
            # The integer `w * size >> 32` is in the range for words from `first` to `last`.
            first = -(-(newest.start << 32) // size)
            last = -(-(min(newest.stop, size) << 32) // size) - 1
            width = np.uint32(last - first)
            for draw in range(self._next, self._next + count):
                # Unsigned, so that words below the first one wrap around to large numbers.
                if (self._of(draw) - np.uint32(first) <= width).any():
                    return False
        return True

    def _of(self, draw: int) -> NDArray[np.uint32]:
        """Return the words of a numbered draw, `[S, B]`."""
        if not self._first <= draw < self._first + len(self._words):
            self._first = draw
            self._words = self._replay.rng.foresee(draw, self._draws, self._batch_size)
        words: NDArray[np.uint32] = self._words[draw - self._first]
        return words

"""Where the time of a run goes: clocks around methods, put there from outside."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Watched = tuple[type[Any], str, str]
"""Class, name of a method, and the label that its time is charged to."""


class Timers:
    """Seconds by label; a watched method called by another is charged to its own label only."""

    def __init__(self, synchronize: Callable[[], object] | None = None) -> None:
        """Make the clocks.

        Args:
            synchronize: Called before every reading.  An accelerator works on while Python goes
                ahead; without this its time is charged to whoever happens to wait for it.
        """
        self.seconds: dict[str, float] = defaultdict(float)
        self._synchronize = synchronize
        self._labels = ["other"]
        self._originals: dict[Watched, Callable[..., Any]] = {}
        self._last = 0.0

    def restart(self) -> None:
        """Forget what was charged so far."""
        self.seconds.clear()
        self._last = time.perf_counter()

    @contextmanager
    def watching(self, methods: Sequence[Watched]) -> Iterator[None]:
        """Charge the time of the block, and of these methods inside it."""
        originals = {method: getattr(method[0], method[1]) for method in methods}
        for (owner, name, label), original in originals.items():
            setattr(owner, name, self._timed(original, label))
        self._originals = originals
        self._last = time.perf_counter()
        try:
            yield
        finally:
            self._charge()
            self.leave(methods)

    def leave(self, methods: Sequence[Watched]) -> None:
        """Watch these methods no more: reading a clock in every step costs a fast loop dearly."""
        for method in methods:
            if method in self._originals:
                setattr(method[0], method[1], self._originals.pop(method))

    def _timed(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._charge()
            self._labels.append(label)
            try:
                return method(*arguments, **keywords)
            finally:
                self._charge()
                self._labels.pop()

        return timed

    def _charge(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = time.perf_counter()
        self.seconds[self._labels[-1]] += now - self._last
        self._last = now

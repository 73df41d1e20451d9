"""Signals that ask a run to stop: SIGTERM, SIGINT and SIGUSR1.

The first one is remembered and the loop saves a checkpoint at its next step; from then on the
default handlers are back, so a second one ends the process at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class SignalFlag:
    """Name of the signal that arrived, or None."""

    def __init__(self) -> None:
        self.received: str | None = None


@contextmanager
def watch_signals() -> Iterator[SignalFlag]:
    """Catch stop signals while the block runs; outside the main thread this does nothing."""
    flag = SignalFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    watched = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGUSR1"):
        watched.append(signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in watched}

    def remember(number: int, _frame: FrameType | None) -> None:
        flag.received = signal.Signals(number).name
        for other, handler in before.items():
            signal.signal(other, handler)

    for number in watched:
        signal.signal(number, remember)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

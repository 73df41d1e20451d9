"""Environments in worker processes: time limits, clear failures, no orphans."""

from __future__ import annotations

import atexit
import functools
import operator
import os
import queue
import signal
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState

from rl_training.envs.spec import AnyEnv, Array
from rl_training.errors import EnvError, RemoteTraceback

_CLOSE_SECONDS = 5.0


class WorkerError(Exception):
    """What went wrong in which worker."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


def _make_in_worker(make: Callable[[], AnyEnv], owner: int) -> AnyEnv:
    """Make an environment; in a worker process, leave signals to the owner.

    A terminal or a scheduler signals the whole group. The owner must still be able to ask its
    workers for a snapshot then, and ends them itself.
    """
    if os.getpid() != owner:
        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
    return make()


def _kill(processes: Sequence[BaseProcess], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child inherits this hook, but not the workers
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:  # one that could not be started cannot be waited for
            process.join(_CLOSE_SECONDS)


class WorkerVectorEnv(AsyncVectorEnv[Array, Array]):
    """One process per environment; every wait has a time limit."""

    def __init__(self, env_fns: Sequence[Callable[[], AnyEnv]], timeout: float) -> None:
        self._timeout = timeout
        self._owner = os.getpid()
        makers = [functools.partial(_make_in_worker, make, self._owner) for make in env_fns]
        self.processes = []
        try:
            super().__init__(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        except OSError as error:
            self._give_up()
            raise EnvError(
                f"{len(env_fns)} environments in processes of their own cannot be started "
                f"({error.strerror or error}); raise the limits of open files and processes "
                "(ulimit -n, ulimit -u), use fewer environments, or set vector_mode to sync"
            ) from error
        except Exception:
            self._give_up()
            raise
        # Workers ignore SIGTERM, with which multiprocessing would end them when the interpreter
        # exits.
        self._at_exit = functools.partial(_kill, self.processes, self._owner)
        atexit.register(self._at_exit)

    def _give_up(self) -> None:
        """End the workers there are, where not all could be started."""
        _kill(self.processes, self._owner)
        for pipe in getattr(self, "parent_pipes", ()):
            pipe.close()
        self.closed = True  # else the collector would close what was never opened

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Array, dict[str, Any]]:
        """Reset all, or those of `options["reset_mask"]`."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait(self._timeout)

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """The results of the step that `step_async` began."""
        return super().step_wait(self._timeout if timeout is None else timeout)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of the call that `call_async` began."""
        return super().call_wait(self._timeout if timeout is None else timeout)

    def dead_worker(self) -> tuple[int, int | None] | None:
        """Index and exit code of the first worker that is gone."""
        for index, process in enumerate(self.processes):
            process.join(0.1)
            if not process.is_alive():
                return index, process.exitcode
        return None

    def slow_worker(self) -> int:
        """Index of the first worker that has not answered."""
        silent = [i for i, pipe in enumerate(self.parent_pipes) if pipe and not pipe.poll(0)]
        return silent[0] if silent else 0

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        # Gymnasium's version warns with the whole traceback and raises whatever type came back.
        failed = [index for index, success in enumerate(successes) if not success]
        if not failed:
            return
        self._state = AsyncState.DEFAULT
        try:
            reports = [self.error_queue.get(timeout=_CLOSE_SECONDS) for _ in failed]
        except queue.Empty:
            raise WorkerError(failed[0], "an exception that could not be sent back") from None
        # Several may fail in one step and report in any order.
        index, kind, value, trace = min(reports, key=operator.itemgetter(0))
        failure = WorkerError(index, f"{kind.__name__}: {value}")
        failure.__context__ = RemoteTraceback(trace)  # the error itself lost it on its way here
        raise failure from value

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers: politely if they are idle, by force otherwise."""
        if not terminate and self._state == AsyncState.DEFAULT:
            for pipe in self.parent_pipes:
                if pipe is not None and not pipe.closed:
                    self._say_close(pipe)
            for process in self.processes:
                process.join(_CLOSE_SECONDS if timeout is None else timeout)
        _kill(self.processes, self._owner)
        for pipe in self.parent_pipes:
            if pipe is not None:
                pipe.close()
        self.error_queue.close()
        self.error_queue.cancel_join_thread()
        atexit.unregister(self._at_exit)

    @staticmethod
    def _say_close(pipe: Any) -> None:
        try:
            pipe.send(("close", None))
        except OSError:
            return  # the worker is gone already, which is what closing asks for

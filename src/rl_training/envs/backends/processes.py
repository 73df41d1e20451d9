"""Environments in worker processes: time limits, clear failures, no orphans.

As many processes as the cores allow, each with a share of the lanes that it steps one after
another.  A step is one message to each and one back; actions, observations, rewards and flags are
in memory that all of them share.  An environment whose episode ends is reset in the same message:
its first observation waits there for `renew`.
"""

from __future__ import annotations

import atexit
import functools
import math
import multiprocessing
import os
import select
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rl_training.envs.backends.lanes import (
    LaneTask,
    Task,
    Transition,
    make_lanes,
    received_dtype,
    require_same_spaces,
    restore_lane,
    spaces_of,
    split,
    unwrapped_states,
    wrapped_states,
)
from rl_training.envs.backends.mujoco_batch import usable_cores
from rl_training.envs.factory import close_env
from rl_training.envs.plain import State
from rl_training.envs.snapshot import ResumeLevel, SnapshotWrapper, weakest_level
from rl_training.envs.spec import Array
from rl_training.errors import EnvError, RemoteTraceback, RLTrainingError, described

_CLOSE_SECONDS = 5.0
_LONGEST_WAIT = 2**31 - 1  # milliseconds that the operating system can count
_STEP = b"step"
_DONE, _FAILED = b"+", b"-"
_owner_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
"""This process's ends of the pipes to its workers."""


class WorkerError(Exception):
    """What went wrong in which lane."""

    def __init__(self, lane: int, reason: str) -> None:
        super().__init__(reason)
        self.lane = lane


def worker_count(num_lanes: int, threads: int = 0) -> int:
    """Processes that pay: all cores, or `threads` of them, but no more than shorten a step.

    Eight environments are stepped as fast by four processes as by six: two after another.
    """
    cores = min(usable_cores(), threads or num_lanes)
    return math.ceil(num_lanes / math.ceil(num_lanes / cores))


def _shared(shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[Any, ...]:
    """Memory for an array, and what it takes to see it as one; another process can be given it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return multiprocessing.RawArray("B", size), shape, np.dtype(dtype)


class _Board:
    """Arrays in memory that the workers and their owner share."""

    def __init__(self, task: Task, workers: int) -> None:
        spec = task.spec
        lanes = math.prod(task.shape)
        observations = ((lanes, *spec.obs_shape), received_dtype(spec))
        self._memory = {
            "obs": _shared(*observations),
            "fresh": _shared(*observations),
            "actions": _shared((lanes, *spec.action_shape), spec.action_dtype),
            "rewards": _shared((lanes,), np.float32),
            "terminated": _shared((lanes,), np.bool_),
            "truncated": _shared((lanes,), np.bool_),
            "success": _shared((lanes,), np.float64),
            "lane": _shared((workers,), np.int64),
            "began": _shared((workers,), np.float64),
        }
        self.__setstate__(self._memory)

    def __getstate__(self) -> dict[str, Any]:
        return self._memory

    def __setstate__(self, memory: dict[str, Any]) -> None:
        self._memory = memory
        self.obs, self.fresh, self.actions = map(self._view, ("obs", "fresh", "actions"))
        """Observations, first ones of new episodes where a step ended one, actions."""
        self.rewards = self._view("rewards")
        self.terminated, self.truncated = map(self._view, ("terminated", "truncated"))
        self.success = self._view("success")
        """What the last ended episode of each lane said; NaN for nothing."""
        self.lane, self.began = map(self._view, ("lane", "began"))
        """What each worker is busy with, and since when."""

    def _view(self, name: str) -> Array:
        memory, shape, dtype = self._memory[name]
        view: Array = np.frombuffer(memory, dtype).reshape(shape)
        return view


class _Share:
    """What a worker does: its environments one after another."""

    def __init__(self, task: LaneTask, number: int, first: int, board: _Board) -> None:
        self._task, self._number, self._first, self._board = task, number, first, board
        lanes = slice(first, first + len(task.lanes))
        self._obs, self._fresh, self._actions = (
            board.obs[lanes],
            board.fresh[lanes],
            board.actions[lanes],
        )
        self._rewards = board.rewards[lanes]
        self._terminated, self._truncated = board.terminated[lanes], board.truncated[lanes]
        self._success = board.success[lanes]
        self._envs: list[SnapshotWrapper] = []
        self._answers: dict[bytes, Callable[[Any], object]] = {
            _STEP: self._step,
            b"make": self._make,
            b"reset": self._reset,
            b"snapshot": self._snapshot,
            b"restore": self._restore,
        }

    def answer(self, request: bytes, argument: Any) -> object:
        """Do what the owner asks for."""
        return self._answers[request](argument)

    def _begin(self, index: int) -> None:
        """Tell the owner which environment it is waiting for; each has a time limit of its own."""
        self._board.lane[self._number] = self._first + index
        self._board.began[self._number] = time.monotonic()

    def _make(self, _: None) -> tuple[ResumeLevel, tuple[str, str]]:
        """Make the environments; returns their level, and their spaces as text."""
        self._envs = make_lanes(self._task, self._begin)
        observation, action = spaces_of(self._envs[0])
        level = weakest_level(env.resume_level for env in self._envs)
        return level, (str(observation), str(action))

    def _reset(self, seeds: Sequence[int] | None) -> None:
        given: Sequence[int | None] = [None] * len(self._envs) if seeds is None else seeds
        for index, (env, seed) in enumerate(zip(self._envs, given, strict=True)):
            self._begin(index)
            self._obs[index] = env.reset(seed=seed)[0]
        self._terminated[:] = self._truncated[:] = False
        self._success[:] = math.nan

    def _step(self, _: None) -> None:
        """One step of all, and a new episode where one ended."""
        # An environment may keep its action, which must not change under its hands.
        actions = self._actions.copy()
        for index, env in enumerate(self._envs):
            self._begin(index)
            obs, reward, terminated, truncated, _info = env.step(actions[index])
            self._obs[index] = obs
            # Slices, because a number may come as an array of one.
            self._rewards[index : index + 1] = reward
            self._terminated[index : index + 1] = terminated
            self._truncated[index : index + 1] = truncated
            if terminated or truncated:
                self._success[index] = env.success
                self._fresh[index] = env.reset()[0]

    def _snapshot(self, _: None) -> tuple[Array, list[State]]:
        states = []
        for index, env in enumerate(self._envs):
            self._begin(index)
            states.append(env.snapshot())
        obs_dtype = np.dtype(self._task.spec.obs_dtype)
        return np.array([env.last_obs for env in self._envs], obs_dtype), states

    def _restore(self, snapshot: tuple[Array, list[State]]) -> list[str | None]:
        messages = []
        for index, (env, obs, state) in enumerate(zip(self._envs, *snapshot, strict=True)):
            self._begin(index)
            messages.append(restore_lane(env, state, obs))
            self._obs[index] = env.last_obs
        self._terminated[:] = self._truncated[:] = False
        return messages

    @property
    def current_lane(self) -> int:
        """What it is or was last busy with."""
        return int(self._board.lane[self._number])

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            close_env(env, env.label)


def _work(task: LaneTask, number: int, first: int, board: _Board, connection: Connection) -> None:
    """Answer the owner until it says no more, or is gone."""
    # A terminal or a scheduler signals the whole group. The owner must still be able to ask its
    # workers for a snapshot then, and ends them itself.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Forking copied them, and a pipe does not end while anybody holds its other end.
    for end in list(_owner_ends):
        end.close()
    share = _Share(task, number, first, board)
    with suppress(EOFError, OSError):
        while request := connection.recv_bytes():
            argument = None if request == _STEP else connection.recv()
            try:
                value = share.answer(request, argument)
            except BaseException as error:
                _send_error(connection, share.current_lane, error)
                continue
            connection.send_bytes(_DONE)
            if request != _STEP:
                connection.send(value)
    share.close()


def _send_error(connection: Connection, lane: int, error: BaseException) -> None:
    """Describe a failure to the owner, and send it too if it can be."""
    connection.send_bytes(_FAILED)
    connection.send((lane, described(error), "".join(traceback.format_exception(error))))
    try:
        connection.send(error)
    except OSError:
        raise
    except Exception:
        connection.send(None)


def _receive_error(connection: Connection) -> WorkerError:
    """Return what a worker reported, from the original error where it could be sent."""
    lane, text, trace = connection.recv()
    failure = WorkerError(lane, text)
    failure.__context__ = RemoteTraceback(trace)  # the error itself lost it on its way here
    with suppress(Exception):  # some cannot be made again from what was sent
        failure.__cause__ = connection.recv()
    return failure


def _waiter(connection: Connection) -> Callable[[float], bool]:
    """Return `connection.poll`, which itself takes as long as ten cheap steps each time."""
    if not hasattr(select, "poll"):
        return connection.poll
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    return lambda seconds: bool(poller.poll(min(math.ceil(seconds * 1000), _LONGEST_WAIT)))


@dataclass(frozen=True)
class _Worker:
    """A process from the side of its owner."""

    process: BaseProcess
    connection: Connection
    wait: Callable[[float], bool]
    lanes: slice


def _kill(processes: Sequence[BaseProcess], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child inherits this hook, but not the workers
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(_CLOSE_SECONDS)


class WorkerEnvs:
    """Environments in worker processes.

    Args:
        task: The environments.
        timeout: Seconds that one environment may take for one answer.
        threads: At most so many processes; 0 takes as many as pay. Results do not depend on it.
        why: Why they run so, if the user did not ask for it.

    Raises:
        EnvError: An environment cannot be made, or not so many processes.
    """

    kind: ClassVar[str] = "wrapped"

    def __init__(self, task: Task, timeout: float, threads: int = 0, why: str = "") -> None:
        self._task, self._timeout = task, timeout
        self._obs_shape = (*task.shape, *task.spec.obs_shape)
        self.processes: list[BaseProcess] = []
        self._workers: list[_Worker] = []
        self._idle, self._closed = True, False
        num_lanes = math.prod(task.shape)
        count = worker_count(num_lanes, threads)
        self.note = f"async: {_spread(num_lanes, count)}{why}"
        # Workers ignore SIGTERM, with which multiprocessing would end them when the interpreter
        # exits.
        self._at_exit = functools.partial(_kill, self.processes, os.getpid())
        atexit.register(self._at_exit)
        try:
            self._board = _Board(task, count)
            self._start(count)
            self._first_lanes = np.array([worker.lanes.start for worker in self._workers])
            levels, spaces = zip(*self._ask(b"make"), strict=True)
            for other in spaces:
                require_same_spaces(task.env_id, spaces[0], other)
            self.resume_level: ResumeLevel = weakest_level(levels)
        except OSError as error:
            self._end(politely=False)
            raise EnvError(
                f"{count} processes for {num_lanes} environments cannot be started "
                f"({error.strerror or error}); raise the limits of open files and processes "
                "(ulimit -n, ulimit -u), use fewer environments, or set vector_mode to sync"
            ) from error
        except WorkerError as error:
            self._end(politely=False)
            if isinstance(error.__cause__, RLTrainingError):
                raise error.__cause__ from error
            seed, index = divmod(error.lane, task.num_envs)
            raise EnvError(
                f"environment {task.env_id} (index {index}, seed {task.seeds[seed]}) cannot be "
                f"made: {error}"
            ) from error
        except BaseException:
            self._end(politely=False)
            raise

    def _start(self, count: int) -> None:
        first = 0
        for number, part in enumerate(split(self._task, count)):
            lanes = slice(first, first + len(part.lanes))
            own, theirs = multiprocessing.Pipe()
            _owner_ends.add(own)
            process = multiprocessing.get_context().Process(
                target=_work,
                args=(part, number, first, self._board, theirs),
                name=f"environments {lanes.start} to {lanes.stop - 1}",
                daemon=True,
            )
            try:
                process.start()
            except BaseException:
                own.close()
                raise
            finally:
                theirs.close()
            self.processes.append(process)
            self._workers.append(_Worker(process, own, _waiter(own), lanes))
            first = lanes.stop

    # Messages

    def _ask(self, request: bytes, arguments: Sequence[object] | None = None) -> list[Any]:
        """Ask every worker, each with its own argument; returns what they say."""
        given = [None] * len(self._workers) if arguments is None else arguments
        self._idle = False
        self._board.lane[:] = self._first_lanes
        self._board.began[:] = time.monotonic()
        for worker, argument in zip(self._workers, given, strict=True):
            with suppress(OSError):  # one that is gone is noticed below, with its exit code
                worker.connection.send_bytes(request)
                if request != _STEP:
                    worker.connection.send(argument)
        # In the order of lanes: where several fail at once, the first is named.
        answers = [self._answer(number, request) for number in range(len(self._workers))]
        self._idle = True
        return answers

    def _answer(self, number: int, request: bytes) -> object:
        worker, board = self._workers[number], self._board
        while not worker.wait(max(0.0, board.began[number] + self._timeout - time.monotonic())):
            # Meanwhile it may have continued to its next environment.
            if board.began[number] + self._timeout <= time.monotonic():
                reason = f"gave no answer within {self._timeout:g} s"
                raise WorkerError(int(board.lane[number]), reason)
        try:
            if worker.connection.recv_bytes() == _DONE:
                return None if request == _STEP else worker.connection.recv()
            failure = _receive_error(worker.connection)
        except (EOFError, OSError) as error:
            worker.process.join(_CLOSE_SECONDS)
            reason = f"its worker process died (exit code {worker.process.exitcode})"
            raise WorkerError(int(board.lane[number]), reason) from error
        raise failure

    def _by_worker(self, values: Sequence[Any] | Array) -> list[Any]:
        return [values[worker.lanes] for worker in self._workers]

    # What `SeedVectorEnv` asks for

    def reset(self, seeds: Sequence[int] | None) -> Array:
        """Begin new episodes everywhere."""
        self._ask(b"reset", None if seeds is None else self._by_worker(seeds))
        return self.observations()

    def step(self, actions: Array) -> Transition:
        """One step of all environments."""
        board, shape = self._board, self._task.shape
        board.actions[...] = actions.reshape(board.actions.shape)
        self._ask(_STEP)
        return (
            board.obs.copy().reshape(self._obs_shape),
            board.rewards.copy().reshape(shape),
            board.terminated.copy().reshape(shape),
            board.truncated.copy().reshape(shape),
        )

    def renew(self, ended: Array, obs: Array) -> Array:
        """The observations in which the episodes after those that ended have begun."""
        current = obs.copy()
        current[ended] = self._board.fresh.reshape(self._obs_shape)[ended]
        return current

    def successes(self) -> Array:
        """What each environment's last ended episode said about success; NaN for nothing."""
        return self._board.success.copy().reshape(self._task.shape)

    def observations(self) -> Array:
        """The current observations."""
        board = self._board
        ended = (board.terminated | board.truncated).reshape(self._task.shape)
        return self.renew(ended, board.obs.reshape(self._obs_shape))

    def snapshot(self) -> list[State]:
        """The state of every seed; observations as the environments gave them."""
        obs, envs = zip(*self._ask(b"snapshot"), strict=True)
        joined = [env for part in envs for env in part]
        return wrapped_states(self._task.shape, np.concatenate(obs), joined)

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Continue from snapshots."""
        obs, envs = unwrapped_states(states)
        parts = zip(self._by_worker(obs), self._by_worker(envs), strict=True)
        return [message for answer in self._ask(b"restore", list(parts)) for message in answer]

    def blame(self, error: Exception | SystemExit) -> tuple[int, object]:
        """Which environment failed, and why; the workers do not outlive it."""
        self._end(politely=False)
        if not isinstance(error, WorkerError):
            return 0, error
        cause = error.__cause__
        return error.lane, cause if isinstance(cause, EnvError) else str(error)

    def close(self) -> None:
        """Close the environments and end their processes."""
        self._end(politely=self._idle)

    def _end(self, *, politely: bool) -> None:
        """End the workers, by force those that do not end by themselves; may be called twice."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers if politely else ():
            with suppress(OSError):  # it is gone already
                worker.connection.send_bytes(b"")
        for worker in self._workers if politely else ():
            worker.process.join(_CLOSE_SECONDS)
        _kill(self.processes, os.getpid())
        for worker in self._workers:
            worker.connection.close()
        atexit.unregister(self._at_exit)


def _spread(num_lanes: int, count: int) -> str:
    """How many processes step how many environments, in words."""
    if count == 1:
        return "in one process beside this one"
    most = math.ceil(num_lanes / count)
    return f"in {count} processes with {'' if num_lanes % count == 0 else 'at most '}{most} each"

"""A process that has imported everything and forks a run for each order: lives and deaths of runs.

Start-up of Python and PyTorch would take most of the time of a test that kills runs again and
again.  Orders come as JSON lines; each is carried out by a forked child, and the answer is a JSON
line with the child's exit code (negative: the signal that ended it) and how long it lived.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from helpers.tiny import clean_environment

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.002


@dataclass(frozen=True)
class Life:
    """How a run ended: exit code as of `subprocess`, and seconds."""

    code: int
    seconds: float

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class ForkServer:
    """The parent's end."""

    def __init__(self) -> None:
        environment = clean_environment()
        environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests")
        environment["OMP_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        folder: Path,
        config: dict[str, Any] | None = None,
        *,
        delay: float | None = None,
        signal_number: int = signal.SIGKILL,
        die_at: str | None = None,
        count: int = 1,
        twice: bool = False,
        timeout: float = 600.0,
    ) -> Life:
        """Train `config`, or take the run in `folder` up, and end it as told.

        Args:
            folder: The run's folder.
            config: What to train; None resumes, or begins again where nothing was begun.
            delay: Seconds after which the child is sent `signal_number`.
            signal_number: The signal.
            die_at: A point of the code, `module:Class.method` or `module:function`, at which the
                child sends itself the signal.
            count: At which call of that point; negative counts mean after the call.
            twice: Send it again at the next call of that point.
            timeout: Seconds after which it is taken for hanging and killed.
        """
        order = {
            "folder": str(folder),
            "config": config,
            "delay": delay,
            "signal": int(signal_number),
            "die_at": die_at,
            "count": count,
            "twice": twice,
            "timeout": timeout,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server has died"
        return Life(**json.loads(answer))

    def kill(self) -> None:
        """End the child that runs now, at once."""
        for child in psutil.Process(self._process.pid).children():
            child.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    """A server for the time of a block."""
    server = ForkServer()
    try:
        yield server
    finally:
        server.close()


# The child's end


def _arm(die_at: str, count: int, number: int, twice: bool) -> None:
    """Make the process send itself a signal at the |count|-th call of a function."""
    import importlib

    module_name, _, path = die_at.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def armed(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        due = calls[0] == abs(count) or (twice and calls[0] == abs(count) + 1)
        if due and count > 0:
            os.kill(os.getpid(), number)
        result = original(*args, **kwargs)
        if due and count < 0:
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, armed)


def _live(order: dict[str, Any]) -> int:
    from rl_training.experiment.config import TrainConfig
    from rl_training.runtime.results import TrainingInterrupted
    from rl_training.runtime.train import train
    from rl_training.runtime.workflows import resume_training

    if order["die_at"] is not None:
        _arm(order["die_at"], order["count"], order["signal"], order["twice"])
    folder = Path(order["folder"])
    try:
        if order["config"] is not None and not folder.exists():
            train(TrainConfig(**order["config"]))
        else:
            resume_training(folder)
    except TrainingInterrupted:
        return 75
    return 0


def _child(order: dict[str, Any]) -> None:
    code = 3
    try:
        code = _live(order)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _watch(pid: int, order: dict[str, Any]) -> Life:
    begun = time.monotonic()
    sent = False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        lived = time.monotonic() - begun
        if done:
            return Life(os.waitstatus_to_exitcode(status), lived)
        if not sent and order["delay"] is not None and lived >= order["delay"]:
            os.kill(pid, order["signal"])
            sent = True
        if lived > order["timeout"]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Life(124, lived)
        time.sleep(POLL)


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
    from rl_training.runtime import train, workflows  # noqa: F401 - imported once for all children

    for name in algorithm_names():
        get_algorithm_spec(name)
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            # What a run prints must not be taken for an answer.
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            _child(order)
        life = _watch(pid, order)
        print(json.dumps({"code": life.code, "seconds": life.seconds}), flush=True)


if __name__ == "__main__":
    _serve()

"""Python commands in forks of one process that has imported the package and PyTorch already.

A test that needs a process of its own, for instance one that has not imported the user's module,
gets it in a twentieth of the time that Python and PyTorch take to start.  What a fork has beside a
new interpreter are modules of the package and of its dependencies, nothing of a test.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from helpers.tiny import Outcome, clean_environment

ROOT = Path(__file__).resolve().parents[2]
CLOSED = "closed"
CAPTURED = "captured"
INHERITED = os.environ.get("PYTHONPATH")
"""What the tests themselves were started with."""
_servers: dict[int, subprocess.Popen[str]] = {}


def run_warm(
    *arguments: object,
    cwd: Path | None = None,
    stdin: str = os.devnull,
    stderr: str = CAPTURED,
    timeout: float = 120,
) -> Outcome:
    """Do what `helpers.tiny.run_python` does, in a fork.

    Args:
        arguments: Of the interpreter: `-m` and a module, `-c` and code, or a file, and theirs.
        cwd: Where it runs; here by default.
        stdin: The file that it reads, or `CLOSED`.
        stderr: Where its errors go: `CAPTURED` in the outcome, a file, or `CLOSED`.
        timeout: Seconds after which it is killed, with exit code 124.
    """
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        order = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd or Path.cwd()),
            "environment": clean_environment(),
            "streams": [stdin, str(out), str(err) if stderr == CAPTURED else stderr],
            "timeout": timeout,
        }
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the warm process has died"
        said = err.read_text(encoding="utf-8") if err.exists() else ""
        return Outcome(json.loads(answer), out.read_text(encoding="utf-8"), said)


def _server() -> subprocess.Popen[str]:
    """Return the warm process of this test process, started when it is first needed."""
    if os.getpid() not in _servers:
        environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
        # Not the path of the command that comes first: it would be that of all the others, too.
        own = (str(ROOT / "src"), str(ROOT / "tests"), INHERITED)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, own))
        server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        _servers[os.getpid()] = server
        atexit.register(_end, server)
    return _servers[os.getpid()]


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.wait(timeout=30)
    server.stdout.close()


# The warm process


def _child(order: dict[str, Any]) -> None:
    """Become what was ordered, as far as a fork can, and end as it ends."""
    for number, place in enumerate(order["streams"]):
        _connect(number, place)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    first, *rest = order["arguments"]
    here = str(Path(first).resolve().parent) if first not in ("-m", "-c") else ""
    named = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [here, *named, *(path for path in sys.path[1:] if path not in named)]
    code: object = 1
    try:
        _run(first, rest)
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        import traceback

        traceback.print_exc()
    atexit._run_exitfuncs()
    status = code if isinstance(code, int) else int(code is not None)
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = 120  # as of an interpreter that ends
    os._exit(status)


def _run(first: str, rest: list[str]) -> None:
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def _connect(number: int, place: str) -> None:
    """Open a stream as an interpreter that starts would find it; a closed one is None."""
    name = ("stdin", "stdout", "stderr")[number]
    if place == CLOSED:
        os.close(number)
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
        return
    flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
    opened = os.open(place, flags, 0o600)
    os.dup2(opened, number)
    os.close(opened)
    mode, errors = ("rb", "strict") if number == 0 else ("wb", "strict")
    raw = open(number, mode, closefd=False)  # noqa: SIM115 - lives as long as the process
    if number == 2:
        errors = "backslashreplace"
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=number == 2)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _wait(pid: int, timeout: float) -> int:
    until = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124
        time.sleep(0.005)


def _serve() -> None:
    import gymnasium  # noqa: F401 - imported once for all children
    import torch

    torch.set_num_threads(1)
    from rl_training.experiment.registry import get_algorithm_spec
    from rl_training.runtime import train, workflows  # noqa: F401 - once for all children

    for name in ("dqn", "ppo", "sac"):
        get_algorithm_spec(name)
    del sys.modules["__main__"]
    for line in sys.stdin:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line))
        print(_wait(pid, json.loads(line)["timeout"]), flush=True)


if __name__ == "__main__":
    _serve()

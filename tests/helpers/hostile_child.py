"""Runs commands on hostile files in one process, under an audit hook, with limits.

Arguments: a JSON file of cases, and a good file of each kind to warm up with.  Prints a JSON line
per case: exit code, what it said, forbidden events, seconds of CPU time, growth of memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # else a first run measures what is best, and writes it down

FORBIDDEN = {
    *("exec", "pickle.find_class", "marshal.loads", "marshal.load", "code.__new__"),
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "ctypes.dlopen", "webbrowser.open", "os.kill"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod"),
    *("shutil.rmtree", "shutil.move", "shutil.copyfile", "os.truncate"),
}
SECONDS = 20
PACKAGE = str(Path(__file__).resolve().parents[2] / "src" / "rl_training")
armed: list[str] | None = None


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if armed is None:
        return
    if (event == "exec" and _is_our_code(arguments[0])) or _is_harmless(event, arguments):
        return
    if event in FORBIDDEN or _writes(event, arguments):
        armed.append(f"{event} {str(arguments)[:200]}")


def _is_our_code(code: Any) -> bool:
    """A module of ours imported on demand, or an annotation in it that the command line reads."""
    caller = sys._getframe(2).f_globals.get("__name__")
    return caller in ("typing", "inspect", "annotationlib") or code.co_filename.startswith(PACKAGE)


def _is_harmless(event: str, arguments: tuple[Any, ...]) -> bool:
    """The lock of a run that is to be resumed, folders that are there, our own cache."""
    path = str(arguments[0]) if arguments else ""
    if event == "os.mkdir":
        return os.path.isdir(path) or path.startswith(os.environ["RL_TRAINING_CACHE"])
    return event == "open" and os.path.basename(path) == ".lock"


def _writes(event: str, arguments: tuple[Any, ...]) -> bool:
    if event != "open":
        return False
    flags = arguments[2] if isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and arguments[0] != os.devnull


def command(words: list[str]) -> tuple[int, str]:
    from rl_training.cli import main

    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["rl-training", *words]),
    ):
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        except BaseException as error:
            code, _ = -1, err.write(f"{type(error).__name__}: {str(error)[:300]}")
    return code if isinstance(code, int) else -2, err.getvalue()


def too_long(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_memory(room: int) -> None:
    """Let allocations fail that would need more than `room` bytes beyond what there is."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))


def main() -> None:
    global armed
    with open(sys.argv[1]) as file:
        orders = json.load(file)
    import torch

    torch.set_num_threads(1)
    for words in orders["warm"]:
        code, said = command(words)
        assert code == 0, (words, said)
    for words in orders["warm_errors"]:
        assert command(words)[0] == 2
    if sys.platform == "linux":
        limit_memory(2 * 2**30)
    signal.signal(signal.SIGALRM, too_long)
    sys.addaudithook(hook)
    for name, words in orders["cases"]:
        begun, before = time.process_time(), peak()
        armed = []
        signal.alarm(SECONDS)
        code, said = command(words)
        signal.alarm(0)
        found, armed = armed, None
        print(
            json.dumps(
                {
                    "name": name,
                    "code": code,
                    "said": said,
                    "events": found,
                    "seconds": time.process_time() - begun,
                    "grown": peak() - before,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()

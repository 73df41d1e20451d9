"""Rows measured in worker processes that take turns: ours, eager and compiled, and the peers."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.speed.figures import Figure
from bench.speed.options import BenchError, Options
from bench.speed.pace import WorkSettings
from bench.speed.rows import Row

ROOT = Path(__file__).resolve().parents[2]
PEER_PACKAGES = {
    "sb3": "stable_baselines3",
    "d3rlpy": "d3rlpy",
    "axiomrl": "axiomrl",
    "imitation": "imitation",
    "mbrl": "mbrl",
    "offlinerlkit": "",
    "dreamerv3_torch": "",
    "tianshou": "tianshou",
}
"""Name of a peer on the command line to the package it is; empty for one that is a folder."""
FALLBACK = "running without compiled updates"
"""How a run begins to say that it does not use what was asked for."""


class Side:
    """A worker process that times one chunk when asked to."""

    def __init__(
        self, name: str, command: list[str], settings: WorkSettings, environment: dict[str, str]
    ) -> None:
        self.name = name
        self.samples: list[float] = []
        self.details: list[dict[str, float]] = []
        self.facts: dict[str, Any] = {}
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (see close)
        self.process = subprocess.Popen(
            [*command, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": str(settings.threads)},
        )

    def wait_until_ready(self) -> None:
        """Wait for the preparation, compilation included.

        Raises:
            BenchError: When the side cannot do the work.
        """
        self.facts = self._read()["ready"]

    def time_chunk(self) -> tuple[float, dict[str, float]]:
        """Ask for one chunk; returns its figure and what belongs to it.

        Raises:
            BenchError: When the side fails.
        """
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = self._read()
        return answer["figure"], answer["detail"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": self._last_words()}
        if "failed" in answer:
            raise BenchError(f"{self.name}: {answer['failed']}")
        return answer

    def _last_words(self) -> str:
        code = self.process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"ended with status {code}"

    def close(self) -> None:
        """Let the process end by itself, so that it removes its folders; then make sure."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._log.close()


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Prepare all sides one after the other, then let them take turns."""
    with ExitStack() as stack:
        environment = dict(os.environ)
        if options.cold:
            environment |= stack.enter_context(_empty_caches())
        sides = [_start(stack, side) for side in _our_sides(row, options, environment)]
        notes: list[str] = []
        for name in row.peers:
            python = find_peer(name, options)
            if python is None:
                continue
            try:
                sides.append(_start(stack, _peer_side(name, python, row, options)))
            except BenchError as error:
                notes.append(f"skipped {error}")
        require_same_sizes({side.name: side.facts.get("sizes", {}) for side in sides})
        _take_turns(sides, options.repeats)
        yield _figure(row, sides, notes)


def require_same_sizes(sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Compare what sides say of their sizes; one that says nothing is believed.

    Raises:
        BenchError: When two sides do not do the same work.
    """
    told = {side: dict(found) for side, found in sizes.items() if found}
    if len({tuple(sorted(found.items())) for found in told.values()}) > 1:
        raise BenchError(f"the sides differ in size, so nothing was measured: {told}")


def _start(stack: ExitStack, side: Side) -> Side:
    stack.callback(side.close)
    side.wait_until_ready()
    return side


def _take_turns(sides: list[Side], repeats: int) -> None:
    for repeat in range(repeats + 1):
        for side in sides:
            figure, detail = side.time_chunk()
            if repeat:  # the first chunk warms up
                side.samples.append(figure)
                side.details.append(detail)


def _our_sides(row: Row, options: Options, environment: dict[str, str]) -> Iterator[Side]:
    for accelerate in row.ours:
        settings = WorkSettings(
            chunk=row.chunk,
            threads=options.threads,
            accelerate=accelerate,
            precision=row.precision,
            vector_mode=row.vector_mode,
        )
        command = [sys.executable, "-m", "bench.speed.worker", "bench.speed.ours", row.work]
        yield Side(accelerate, command, settings, environment)


def _peer_side(name: str, python: str, row: Row, options: Options) -> Side:
    settings = WorkSettings(chunk=row.chunk, threads=options.threads)
    # A peer has an environment of its own, into which our packages must not leak.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if name in options.paths:
        environment["PYTHONPATH"] = options.paths[name]
    command = [python, "-m", "bench.speed.worker", f"bench.peers.{name}", row.work]
    return Side(name, command, settings, environment)


def find_peer(name: str, options: Options) -> str | None:
    """Return the interpreter that has a peer: the one given, or this one if it has it."""
    if name in options.peers:
        return options.peers[name]
    if not PEER_PACKAGES[name]:
        return sys.executable if name in options.paths else None
    return sys.executable if importlib.util.find_spec(PEER_PACKAGES[name]) else None


@contextmanager
def _empty_caches() -> Iterator[dict[str, str]]:
    """Caches of compiled programs that begin empty and are removed afterwards."""
    names = ("RL_TRAINING_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        yield {name: os.path.join(folder, name.lower()) for name in names}


def _figure(row: Row, sides: list[Side], notes: list[str]) -> Figure:
    compile_seconds = {}
    details = {}
    for side in sides:
        notes += [f"{side.name}: {m}" for m in side.facts.get("messages", ()) if FALLBACK in m]
        if side.facts.get("compile_seconds"):
            compile_seconds[side.name] = side.facts["compile_seconds"]
        for name in side.details[0] if side.details else ():
            details[name] = statistics.median(detail[name] for detail in side.details)
    for seconds in compile_seconds.values():
        notes.append(f"{seconds:.1f} s to compile, load and check the programs, not counted")
    if details:
        notes.append(", ".join(f"{name} {value:.4g}" for name, value in details.items()))
    if row.peers and len(sides) == len(row.ours) and not notes:
        is_package = bool(PEER_PACKAGES[row.peers[0]])
        option = (
            f"--peer {row.peers[0]}=PYTHON" if is_package else f"--peer-path {row.peers[0]}=FOLDER"
        )
        notes.append(f"no peer: give one with {option}")
    return Figure(
        row=row.name,
        label=row.name,
        unit=row.unit,
        samples={side.name: side.samples for side in sides},
        bar=row.bar,
        notes=tuple(notes),
        extra={
            "compile_seconds": compile_seconds,
            "details": details,
            "chunk": row.chunk,
            "versions": {side.name: side.facts.get("version") for side in sides},
        },
    )

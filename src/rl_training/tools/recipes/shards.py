"""Episodes made in processes and kept in shards, so that work that was done is never lost.

A shard holds some whole episodes.  It appears under its name when it is complete, so what a killed
command leaves behind are whole shards, and the same command continues where it was.  Which process
makes a shard changes nothing in it.  Processes import this module, so it imports no PyTorch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rl_training.errors import DataError, RLTrainingError, described

Array = NDArray[Any]
SHARD_ROWS = 5_000
"""Rows of a shard, about; a killed command loses at most one shard per process."""
PLAN_FILE = "plan.json"
_WATCH_SECONDS = 1.0
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class MakesEpisodes(Protocol):
    """What a process has: it is sent there once and makes one episode after another."""

    def __call__(self, split: str, number: int) -> Mapping[str, Array]:
        """Return the columns of an episode, which depend on nothing but the arguments."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """What has to be made."""

    name: str
    """In messages: `ogbench/cube-single-play`."""
    folder: Path
    """Where the shards are kept."""
    identity: Mapping[str, Any]
    """What shards of one folder have in common: recipe, seed, versions."""
    episodes: Mapping[str, int]
    """Number of episodes of each split."""
    episode_steps: int

    @property
    def rows(self) -> int:
        """Rows of all splits."""
        return sum(self.episodes.values()) * self.episode_steps

    def shards(self, split: str) -> list[Shard]:
        """Return the shards of a split in order.

        Bounds do not depend on the number of episodes, so that a larger set takes over the whole
        shards of a smaller one.
        """
        each = max(1, SHARD_ROWS // self.episode_steps)
        count = self.episodes.get(split, 0)
        bounds = [(first, min(first + each, count)) for first in range(0, count, each)]
        return [Shard(self.folder, split, first, stop) for first, stop in bounds]


@dataclass(frozen=True)
class Shard:
    """Episodes `first` to `stop` (excluded) of a split."""

    folder: Path
    split: str
    first: int
    stop: int

    @property
    def path(self) -> Path:
        """Its file."""
        return self.folder / f"{self.split}-{self.first:06}-{self.stop:06}.npz"

    def read(self) -> dict[str, Array]:
        """Return its columns, episode after episode.

        Raises:
            DataError: When it is damaged.
        """
        try:
            with self.path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{self.path} is damaged ({error}); remove it and run the command again"
            ) from None


@dataclass(frozen=True)
class Progress:
    """How far the work is."""

    rows: int
    total: int
    rate: float | None
    """Rows per second of this command; None before the first shard."""

    @property
    def seconds_left(self) -> float | None:
        """What is left at this rate."""
        return None if not self.rate else (self.total - self.rows) / self.rate


def make_shards(
    work: Work,
    maker: MakesEpisodes,
    *,
    jobs: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> None:
    """Make the shards that are not there yet.

    Args:
        work: What to make.
        maker: Makes an episode; it is sent to each process.
        jobs: Processes; 1 works in this one.
        on_progress: Called at the start and after each shard.

    Raises:
        DataError: When the folder holds shards of something else, the disk is full or a process
            dies; finished shards stay.
    """
    _claim(work)
    wanted = [shard for split in work.episodes for shard in work.shards(split)]
    missing = [shard for shard in wanted if not shard.path.exists()]
    count = _Count(work, missing, on_progress)
    count.told()
    if not missing:
        return
    try:
        if jobs == 1:
            for shard in missing:
                count.finished(_make_one(maker, shard))
        else:
            _make_in_processes(missing, maker, min(jobs, len(missing)), count.finished)
    except OSError as error:
        raise _refused(work, error) from None
    except BrokenProcessPool:
        raise DataError(
            f"{work.name}: a process that made episodes has died, maybe for lack of memory; what "
            f"is finished is kept in {work.folder}, and the same command continues from there "
            "(with a smaller --jobs if memory was short)"
        ) from None
    finally:
        maker.close()


class _Count:
    """Counts finished rows and says how fast they come."""

    def __init__(
        self,
        work: Work,
        missing: Sequence[Shard],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._work, self._on_progress = work, on_progress
        self._missing = sum(shard.stop - shard.first for shard in missing) * work.episode_steps
        self._done = 0
        self._began = time.monotonic()

    def finished(self, shard: Shard) -> None:
        """Note a shard, and look whether the disk can hold the rest."""
        self._done += (shard.stop - shard.first) * self._work.episode_steps
        row_bytes = shard.path.stat().st_size / (shard.stop - shard.first)
        row_bytes /= self._work.episode_steps
        # Shards that are still missing, and all rows once more when they are put together.
        needed = row_bytes * (self._missing - self._done + self._work.rows)
        free = shutil.disk_usage(self._work.folder).free
        if needed > free:
            raise DataError(
                f"{self._work.name}: it needs another {needed / 2**30:.2f} GiB, but only "
                f"{free / 2**30:.2f} GiB are free where {self._work.folder} is; make room, or make "
                "less with --fraction (finished parts are kept there)"
            )
        self.told()

    def told(self) -> None:
        """Report."""
        if self._on_progress is None:
            return
        rate = self._done / max(time.monotonic() - self._began, 1e-9) if self._done else None
        total = self._work.rows
        self._on_progress(Progress(total - self._missing + self._done, total, rate))


def _claim(work: Work) -> None:
    """Begin a folder of shards, or recognise one of the same work."""
    plan, text = work.folder / PLAN_FILE, json.dumps(dict(work.identity), indent=2, sort_keys=True)
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
        if plan.exists():
            if plan.read_text(encoding="utf-8").strip() != text:
                raise DataError(
                    f"{work.folder} holds the unfinished work of another command (see {PLAN_FILE} "
                    "there: other seed, recipe or versions); finish that one, remove the folder, "
                    "or choose another --out"
                )
            return
        part = plan.with_suffix(f".{os.getpid()}.part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(plan)
    except OSError as error:
        raise _refused(work, error) from None


def _refused(work: Work, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"{work.name}: the disk of {work.folder} is full; make room and run the same command "
            "again, it continues where it was"
        )
    return DataError(f"{work.folder} cannot be written ({error.strerror or error})")


def _make_one(maker: MakesEpisodes, shard: Shard) -> Shard:
    """Make the episodes of a shard and write it, whole or not at all."""
    episodes = [maker(shard.split, number) for number in range(shard.first, shard.stop)]
    columns = {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]}
    part = shard.path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **columns)
            file.flush()
            os.fsync(file.fileno())
        part.replace(shard.path)
    finally:
        part.unlink(missing_ok=True)
    return shard


# Processes

_maker: MakesEpisodes | None = None
"""What this process makes episodes with."""


def _start(maker: MakesEpisodes, owner: int) -> None:
    """Prepare a process: the owner ends it, and it does not outlive the owner."""
    global _maker
    _maker = maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group
    threading.Thread(target=partial(_leave_without, owner), daemon=True).start()


def _leave_without(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _work_on(shard: Shard) -> Shard:
    assert _maker is not None
    try:
        return _make_one(_maker, shard)
    except (RLTrainingError, OSError):
        raise
    except Exception as error:
        # Others may not survive the way to another process.
        raise DataError(
            f"episode {shard.first} or a following one of {shard.split} failed: {described(error)}"
        ) from None


def _make_in_processes(
    shards: Sequence[Shard], maker: MakesEpisodes, jobs: int, finished: Callable[[Shard], None]
) -> None:
    pool = ProcessPoolExecutor(
        jobs,
        # A forked process would share the threads and files of this one.
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(maker, os.getpid()),
    )
    waiting: set[Future[Shard]] = set()
    try:
        with _one_thread_each():
            waiting = {pool.submit(_work_on, shard) for shard in shards}
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    finished(future.result())
    except BaseException:
        processes = list((pool._processes or {}).values())
        for process in processes:
            process.kill()  # half a shard is not worth waiting for
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let new processes compute with one thread: there is one of them for each core."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

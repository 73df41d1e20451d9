"""Files and folders of checkpoints: every change to the disk goes through the few functions here.

They are called as attributes of this module, so that a fault-injection harness can replace them.
A run's `checkpoints` folder and the folders in it may be links, to another disk; a link is deleted
or moved as such, what it points to stays.
A folder is in one of four stages, told by its name: `step_<n>` is a checkpoint; `.tmp-...` is being
written, `.old-...` is being replaced, `.del-...` is being deleted by the process whose id ends it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import psutil

from rl_training.errors import CheckpointError

_CHUNK = 2**20
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_HIDDEN = re.compile(r"\.(tmp|old|del)-(step_(?:0|[1-9][0-9]{0,17}))-([0-9]{1,10})")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and digest by which a file is recognised as undamaged."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest of the whole file."""


class CheckpointEntry(NamedTuple):
    """A folder that claims to be the checkpoint of a step."""

    step: int
    path: Path


# -- changes to the disk -------------------------------------------------------------------------


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, hash it on the way and return once it is on the disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size=size, sha256=digest.hexdigest())


def append(file: io.FileIO, data: bytes) -> None:
    """Write all of `data` at the end of an unbuffered file, or nothing of it."""
    end, left = file.tell(), memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        # A disk that fills up takes the beginning of a line; half a line is worse than none.
        with contextlib.suppress(OSError):
            file.truncate(end)
            file.seek(end)
        raise


def link_file(source: Path, target: Path) -> None:
    """Give an immutable file a second name."""
    os.link(source, target, follow_symlinks=False)


def rename(source: Path, target: Path) -> None:
    """Move a folder, or a file over another, in one step."""
    source.replace(target)


def make_dir(path: Path) -> None:
    """Make one new folder."""
    path.mkdir()


def fsync_dir(path: Path) -> None:
    """Make names within a folder durable (Windows does so by itself and offers no call)."""
    if os.name != "nt":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_tree(path: Path) -> None:
    """Delete a folder and all that is in it, or a link to one."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def remove_file(path: Path) -> None:
    """Delete one file, if it is there."""
    path.unlink(missing_ok=True)


# -- what is built of them -----------------------------------------------------------------------


def make_parents(path: Path) -> None:
    """Make `path` and its parents where missing, each made durable in its own parent."""
    if not path.is_dir():
        make_parents(path.parent)
        with contextlib.suppress(FileExistsError):  # another process was first, which is as good
            make_dir(path)
        fsync_dir(path.parent)


def checkpoints_dir(run_dir: Path | str) -> Path:
    """Return the folder in which a run keeps its checkpoints."""
    return Path(run_dir) / "checkpoints"


def hidden_path(folder: Path, stage: str) -> Path:
    """Return the name of a step's folder in stage `tmp`, `old` or `del` of this process."""
    return folder.parent / f".{stage}-{folder.name}-{os.getpid()}"


def publish(staged: Path, final: Path) -> None:
    """Move a finished folder into place; an older one of that name stays findable throughout."""
    aside = hidden_path(final, "old") if os.path.lexists(final) else None
    if aside is not None:
        rename(final, aside)
    try:
        rename(staged, final)
    except OSError:
        if aside is not None:
            rename(aside, final)
        raise
    fsync_dir(final.parent)
    if aside is not None:
        # The save has succeeded; what cannot be deleted now is swept by the next save.
        with contextlib.suppress(OSError):
            discard(aside, final)


def discard(path: Path, final: Path) -> None:
    """Delete the folder `path` of step `final` so that no half of it can be taken for the whole."""
    doomed = hidden_path(final, "del")
    if os.path.lexists(doomed):
        remove_tree(doomed)
    rename(path, doomed)
    fsync_dir(doomed.parent)
    remove_tree(doomed)


def sweep(folder: Path) -> None:
    """Tidy up what dead processes, or an earlier failure of this one, left in `folder`.

    A folder that was set aside is put back if the crash came before its successor was in place.
    """
    for stage, final, path in list(_leftovers(folder)):
        if stage == "old" and not os.path.lexists(final):
            rename(path, final)
            fsync_dir(folder)
            continue
        # A leftover that will not go costs space only; it must not stop a save.
        with contextlib.suppress(OSError):
            if stage == "old":
                discard(path, final)
            else:
                remove_tree(path)


def _leftovers(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield stage, final place and path of every hidden folder that no live process is using."""
    for path in sorted(folder.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match and (int(match[3]) == os.getpid() or not psutil.pid_exists(int(match[3]))):
            yield match[1], folder / match[2], path


def step_entries(folder: Path) -> list[CheckpointEntry]:
    """Return the step folders in a `checkpoints` folder, oldest step first.

    Nothing is changed: a folder that was set aside when a crash struck, or is being replaced at
    this moment, is listed where it is.  So is a link, wherever it leads.

    Raises:
        CheckpointError: When `folder` is a link to nowhere, or no folder.
    """
    found: dict[int, Path] = {}
    aside: dict[int, Path] = {}
    # Two looks: a replacement that moves between the names during one is settled for the other.
    for _ in range(2):
        for name in _subfolders(folder):
            if match := _STEP.fullmatch(name):
                found[int(match[1])] = folder / name
            elif (match := _HIDDEN.fullmatch(name)) and match[1] == "old":
                aside[int(match[2].removeprefix("step_"))] = folder / name
    return [CheckpointEntry(*entry) for entry in sorted({**aside, **found}.items())]


def _subfolders(folder: Path) -> list[str]:
    if not os.path.lexists(folder):
        return []
    check_folder(folder)
    # The kind comes with the name; asked for afterwards, the folder might be on the move.
    with advise(f"listing {folder}"), os.scandir(folder) as entries:
        return [e.name for e in entries if e.is_symlink() or e.is_dir(follow_symlinks=False)]


def check_folder(path: Path) -> None:
    """Refuse a link that leads nowhere, and anything there but a folder.

    Raises:
        CheckpointError: Saying which.
    """
    if path.is_dir() or not os.path.lexists(path):
        return
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, which is not there; mount its disk, or put "
            f"back what was there."
        )
    raise CheckpointError(f"{path} is not a folder; put back the folder that was there.")


def step_of(path: Path) -> int | None:
    """Return n for a path named `step_<n>`."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def is_plain(path: Path) -> bool:
    """Whether `path` is a file itself: not a link, which may lead out of the folder, or a pipe."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def open_regular(path: Path, where: str, *, follow_symlinks: bool = False) -> BinaryIO:
    """Open a plain file for reading; links, pipes and devices are refused.

    Raises:
        CheckpointError: The file does not exist, or is something else.
    """
    try:
        if not stat.S_ISREG(path.stat(follow_symlinks=follow_symlinks).st_mode):
            raise CheckpointError(
                f"{where} is a link, folder or device; checkpoints hold plain files only."
            )
        # The second look at links is for one put there since the first.
        flags = 0 if follow_symlinks else getattr(os, "O_NOFOLLOW", 0)
        flags |= os.O_RDONLY | getattr(os, "O_BINARY", 0)
        return os.fdopen(os.open(path, flags), "rb")
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is missing; use another checkpoint.") from error
    except OSError as error:
        raise CheckpointError(
            f"{where} cannot be read ({error.strerror}); {_advice(error)}."
        ) from error


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file in pieces."""
    while chunk := file.read(_CHUNK):
        yield chunk


def check_size(path: Path, record: FileRecord, where: str) -> None:
    """Raise unless `path` is a plain file of the recorded size."""
    with open_regular(path, where) as file:
        size = os.fstat(file.fileno()).st_size
    if size != record.size:
        raise CheckpointError(
            f"{where} is damaged: it has {size} bytes where the manifest says {record.size}; "
            f"use another checkpoint."
        )


def check_digest(path: Path, record: FileRecord, where: str) -> None:
    """Raise unless the content of `path` has the recorded digest."""
    digest = hashlib.sha256()
    with open_regular(path, where) as file:
        for chunk in _guarded(read_chunks(file), where):
            digest.update(chunk)
    _require_digest(digest.hexdigest(), record, where)


def read_checked(path: Path, record: FileRecord, where: str) -> bytes:
    """Return the content of `path`, the very bytes whose size and digest were checked."""
    check_size(path, record, where)
    with open_regular(path, where) as file:
        data = b"".join(_guarded(read_chunks(file), where))
    _require_digest(hashlib.sha256(data).hexdigest(), record, where)
    return data


def _guarded(chunks: Iterator[bytes], where: str) -> Iterator[bytes]:
    try:
        yield from chunks
    except OSError as error:
        raise CheckpointError(
            f"{where} cannot be read ({error.strerror}); {_advice(error)}."
        ) from error


def _require_digest(found: str, record: FileRecord, where: str) -> None:
    if found != record.sha256:
        raise CheckpointError(
            f"{where} is damaged: its SHA-256 is {found[:12]}... where the manifest says "
            f"{record.sha256[:12]}...; use another checkpoint."
        )


@contextlib.contextmanager
def advise(what: str) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` of one line that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{what} failed ({reason}); {_advice(error)}.") from error


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk, keep fewer checkpoints, or choose another output folder"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the folder accessible to this user, or choose another output folder"
    return "check the disk or network share, then try again"

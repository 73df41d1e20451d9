"""Files that commands write where the user says: whole or not at all, and never over a device."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_replaceable(path: Path) -> None:
    """Refuse a path at which a device, a pipe or a folder is; moving a file there would remove it.

    Raises:
        OSError: Saying so.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(
            errno.EEXIST, "a folder, device or pipe is there; choose another name", str(path)
        )


@contextmanager
def written_beside(target: Path, suffix: str | None = None) -> Iterator[Path]:
    """Give a path beside `target` to write to, and move that file to `target` at the end.

    Where `target` is a link, the link is replaced and what it leads to stays as it is.

    Args:
        target: The file; its folder is made where missing.
        suffix: Ending of the path that is given; None takes the target's.

    Raises:
        OSError: When something else than a file is there, or the disk refuses.
    """
    check_replaceable(target)
    # Absolute: the user's code may change the working directory before the end.
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    ending = target.suffix if suffix is None else suffix
    part = target.with_name(f".{target.stem[:100]}.{os.getpid()}.part{ending}")
    try:
        yield part
        os.replace(part, target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)

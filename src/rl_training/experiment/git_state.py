"""Commit and cleanness of the repository around the working folder, without obeying its settings.

A folder that came as an archive may bring a `.git/config` of its own, by which git runs programs:
`core.fsmonitor`, hooks, filters of attributes, remotes of missing objects.  So the commit is read
from the files, and `git status` runs in an empty repository that borrows objects and index.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REF = re.compile(r"refs/[A-Za-z0-9][\w./+@#-]*")
_MOST_BYTES = 16 * 2**20
"""Of a file of references or ignored names."""
_SECONDS = 10


def git_state(start: Path) -> dict[str, Any] | None:
    """Return `commit` and `dirty` of the repository that `start` is in; None where there is none.

    `dirty` is None where it cannot be told.
    """
    try:
        for folder in (start, *start.parents):
            if (folder / ".git").exists():
                git_dir = _git_dir(folder / ".git")
                common = _common_dir(git_dir)
                commit = _commit(git_dir, common)
                return {"commit": commit, "dirty": _is_dirty(folder, git_dir, common, commit)}
    except (OSError, ValueError):
        pass  # no repository that can be read: nothing to report
    return None


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} is not a plain file")
    with path.open(encoding="utf-8") as file:
        return file.read(_MOST_BYTES)


def _git_dir(path: Path) -> Path:
    """Follow the file that a work tree or a submodule has in place of the folder."""
    if path.is_dir():
        return path
    return path.parent / _read(path).removeprefix("gitdir:").strip()


def _common_dir(git_dir: Path) -> Path:
    """Return where a work tree shares objects and branches with others."""
    shared = git_dir / "commondir"
    return git_dir / _read(shared).strip() if shared.is_file() else git_dir


def _commit(git_dir: Path, common: Path) -> str:
    head = _read(git_dir / "HEAD").strip()
    if head.startswith("ref:"):
        head = _resolved(head.removeprefix("ref:").strip(), git_dir, common)
    if not _COMMIT.fullmatch(head):
        raise ValueError("HEAD is not a commit")
    return head


def _resolved(name: str, git_dir: Path, common: Path) -> str:
    if not _REF.fullmatch(name) or ".." in name:
        raise ValueError("HEAD is not a branch")
    for folder in (git_dir, common):
        if (folder / name).is_file():
            return _read(folder / name).strip()
    packed = re.search(rf"^(\w+) {re.escape(name)}$", _read(common / "packed-refs"), re.MULTILINE)
    return packed[1] if packed else ""


def _is_dirty(tree: Path, git_dir: Path, common: Path, commit: str) -> bool | None:
    """Tell whether files differ from the commit, or None where git cannot."""
    with tempfile.TemporaryDirectory(prefix="rl-training-git-") as name:
        empty = Path(name)
        for folder in ("refs", "objects", "info"):
            (empty / folder).mkdir()
        (empty / "HEAD").write_text(f"{commit}\n", encoding="ascii")
        (empty / "config").write_text("[core]\n\trepositoryformatversion = 0\n", encoding="ascii")
        excluded = common / "info" / "exclude"
        if excluded.is_file():
            (empty / "info" / "exclude").write_text(_read(excluded), encoding="utf-8")
        borrowed = {
            "GIT_DIR": empty,
            "GIT_WORK_TREE": tree,
            "GIT_OBJECT_DIRECTORY": common / "objects",
            "GIT_INDEX_FILE": git_dir / "index",
            "GIT_OPTIONAL_LOCKS": "0",
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        settings = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
        try:
            done = subprocess.run(
                ["git", *settings, "status", "--porcelain", "--ignore-submodules=all"],
                capture_output=True,
                cwd=tree,
                env=kept | {key: str(value) for key, value in borrowed.items()},
                check=True,
                timeout=_SECONDS,
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return bool(done.stdout.strip())

"""A model of a disk that loses, in a crash, whatever was not flushed.

It watches the file operations of checkpoints and knows what POSIX promises: the content of a file
once the file was flushed, an entry of a folder once that folder was.  Of the entries that were not,
a crash may keep any part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl_training.experiment.checkpoint import files


@dataclass(eq=False)
class Folder:
    """Names and what they stand for, as the disk has them and as the process sees them."""

    durable: dict[str, Folder | bytes] = field(default_factory=dict)
    current: dict[str, Folder | bytes] = field(default_factory=dict)


Change = tuple[Folder, dict[str, "Folder | bytes | None"]]
"""Entries of one folder that change together; None is an entry that goes."""


class LossyDisk:
    """Records what happens below `root` while it is installed."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, *, ignore_flushes: bool) -> None:
        self.root, self._ignores = root, ignore_flushes
        self.tree = _scan(root)
        self.pending: list[Change] = []
        self.moments: list[tuple[Folder, list[Change]]] = []
        """Durable tree and pending changes after every operation."""
        self._remember()
        for name in ("write_file", "link_file", "rename", "make_dir", "fsync_dir"):
            patch.setattr(files, name, self._shim(name, getattr(files, name)))
        for name in ("remove_tree", "remove_file"):
            patch.setattr(files, name, self._shim(name, getattr(files, name), first=True))

    def _shim(
        self, name: str, original: Callable[..., Any], first: bool = False
    ) -> Callable[..., Any]:
        note = getattr(self, f"_{name}")

        def operation(*arguments: Any) -> Any:
            if first:
                note(*arguments)
            result = original(*arguments)
            if not first:
                note(*arguments)
            self._remember()
            return result

        return operation

    def _remember(self) -> None:
        twins: dict[int, Folder] = {}
        tree = _copy(self.tree, twins)
        changes = [
            (_copy(folder, twins), {name: _twin(node, twins) for name, node in entries.items()})
            for folder, entries in self.pending
        ]
        self.moments.append((tree, changes))

    def _folder(self, path: Path) -> Folder:
        node: Folder | bytes = self.tree
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.current[part]
        assert isinstance(node, Folder)
        return node

    def _change(self, folder: Folder, entries: dict[str, Folder | bytes | None]) -> None:
        _apply(folder.current, entries)
        self.pending.append((folder, entries))

    def _write_file(self, path: Path, _chunks: Any) -> None:
        self._change(self._folder(path.parent), {path.name: path.read_bytes()})

    def _link_file(self, _source: Path, target: Path) -> None:
        self._change(self._folder(target.parent), {target.name: target.read_bytes()})

    def _make_dir(self, path: Path) -> None:
        self._change(self._folder(path.parent), {path.name: Folder()})

    def _rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent, "the model knows renames within a folder only"
        folder = self._folder(source.parent)
        self._change(folder, {target.name: folder.current[source.name], source.name: None})

    def _remove_file(self, path: Path) -> None:
        if path.exists():
            self._change(self._folder(path.parent), {path.name: None})

    def _remove_tree(self, path: Path) -> None:
        folder = self._folder(path)
        for name, node in list(folder.current.items()):
            if isinstance(node, Folder):
                self._remove_tree(path / name)
            else:
                self._change(folder, {name: None})
        self._change(self._folder(path.parent), {path.name: None})

    def _fsync_dir(self, path: Path) -> None:
        if self._ignores:
            return
        folder = self._folder(path)
        for owner, entries in self.pending:
            if owner is folder:
                _apply(folder.durable, entries)
        self.pending = [change for change in self.pending if change[0] is not folder]

    def images(self, chance: random.Random, draws: int) -> Iterator[Folder]:
        """Every moment at which the machine may stop, with none, all or some of what was pending.

        Each image is consumed before the next is made.
        """
        for tree, pending in self.moments:
            picks = [[False] * len(pending), [True] * len(pending)]
            picks += [[chance.random() < 0.5 for _ in pending] for _ in range(draws)]
            for pick in picks if pending else picks[:1]:
                twins: dict[int, Folder] = {}
                image = _copy(tree, twins)
                for (folder, entries), kept in zip(pending, pick, strict=True):
                    if kept:
                        moved = {name: _twin(node, twins) for name, node in entries.items()}
                        _apply(_copy(folder, twins).durable, moved)
                yield image


def _apply(entries: dict[str, Folder | bytes], change: dict[str, Folder | bytes | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _scan(path: Path) -> Folder:
    entries: dict[str, Folder | bytes] = {
        p.name: _scan(p) if p.is_dir() else p.read_bytes() for p in path.iterdir()
    }
    return Folder(durable=dict(entries), current=entries)


def _copy(folder: Folder, twins: dict[int, Folder]) -> Folder:
    if id(folder) not in twins:
        twin = twins[id(folder)] = Folder()
        twin.durable = {name: _known(node, twins) for name, node in folder.durable.items()}
        twin.current = {name: _known(node, twins) for name, node in folder.current.items()}
    return twins[id(folder)]


def _known(node: Folder | bytes, twins: dict[int, Folder]) -> Folder | bytes:
    return _copy(node, twins) if isinstance(node, Folder) else node


def _twin(node: Folder | bytes | None, twins: dict[int, Folder]) -> Folder | bytes | None:
    return None if node is None else _known(node, twins)


def lay_out(image: Folder, path: Path) -> None:
    """Write what the disk still has after the crash to a real folder."""
    path.mkdir()
    for name, node in image.durable.items():
        if isinstance(node, Folder):
            lay_out(node, path / name)
        else:
            (path / name).write_bytes(node)

"""HDF5 files that somebody means harm with: links to other files, sizes that lie, damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np


def external(file: h5py.File, folder: Path) -> None:
    """Reads a file of the user as if it were a column."""
    file.create_dataset("rewards", (4,), "f4", external=[(str(folder / "secret"), 0, 16)])


def link(file: h5py.File, folder: Path) -> None:
    file["rewards"] = h5py.ExternalLink(str(folder / "other.hdf5"), "rewards")


def dangling(file: h5py.File, folder: Path) -> None:
    file["rewards"] = h5py.SoftLink("/nothing")


def loop(file: h5py.File, folder: Path) -> None:
    file["rewards"] = h5py.SoftLink("/rewards")


def virtual(file: h5py.File, folder: Path) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource(str(folder / "other.hdf5"), "rewards", shape=(4,))
    file.create_virtual_dataset("rewards", layout)


def endless(file: h5py.File, folder: Path) -> None:
    file.create_dataset("rewards", (10**13,), "f4", chunks=(1024,))


def texts(file: h5py.File, folder: Path) -> None:
    file.create_dataset("rewards", (4,), h5py.string_dtype())


def references(file: h5py.File, folder: Path) -> None:
    file.create_dataset("rewards", (4,), h5py.ref_dtype)


def whole(file: h5py.File, folder: Path) -> None:
    file["rewards"] = np.zeros(4, np.float32)


def make(folder: Path, name: str, rewards: Callable[[h5py.File, Path], None]) -> Path:
    """A file with whole columns, of which one is made by the function."""
    path = folder / f"{name}.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((4, 3), np.float32)
        file["actions"] = np.zeros((4, 1), np.float32)
        file["terminals"] = np.zeros(4, np.bool_)
        rewards(file, folder)
    return path


def hdf5_files(folder: Path, pickled: bytes) -> Iterator[tuple[str, Path]]:
    """Write them and yield their names and places."""
    (folder / "secret").write_bytes(b"s" * 4096)
    data = make(folder, "other", whole).read_bytes()
    for change in (external, link, dangling, loop, virtual, endless, texts, references):
        yield f"hdf5-{change.__name__}", make(folder, f"hdf5-{change.__name__}", change)
    for name, content in {
        "hdf5-truncated": data[: len(data) // 2],
        "hdf5-garbage": data[:600] + bytes(range(256)) * 20,
        "hdf5-pickle": pickled,
    }.items():
        (folder / f"{name}.hdf5").write_bytes(content)
        yield name, folder / f"{name}.hdf5"

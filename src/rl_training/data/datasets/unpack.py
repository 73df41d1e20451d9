"""Columns on disk instead of in memory: unpacked piece by piece into files that are mapped."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import blocks

Array = NDArray[Any]


def unpack(chunks: Iterator[Array], rows: int, target: Path) -> Array:
    """Write pieces of a column one after the other into a `.npy` file, and map it.

    Floats become float32 on the way, as they would when a dataset is made of them.
    """
    mapped: Array | None = None
    done = 0
    for chunk in chunks:
        if mapped is None:
            dtype = np.dtype(np.float32) if chunk.dtype.kind == "f" else chunk.dtype
            shape = (rows, *chunk.shape[1:])
            mapped = np.lib.format.open_memmap(target, mode="w+", dtype=dtype, shape=shape)
        with np.errstate(over="ignore"):  # found and named as infinite afterwards
            mapped[done : done + len(chunk)] = chunk
        done += len(chunk)
    assert mapped is not None
    return mapped


def npz_chunks(path: Path, key: str) -> tuple[Iterator[Array], int] | None:
    """Return the pieces of a member of an npz file and its rows; None if it must be read whole."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as member:
        shape, fortran, dtype = _header(member)
    if fortran or dtype.hasobject or not shape or not all(shape):
        return None
    return _npz_pieces(path, key), shape[0]


def _npz_pieces(path: Path, key: str) -> Iterator[Array]:
    with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as member:
        shape, _, dtype = _header(member)
        row_bytes = int(dtype.itemsize * np.prod(shape[1:], dtype=np.int64))
        for block in blocks(shape[0], row_bytes):
            piece = member.read((block.stop - block.start) * row_bytes)
            yield np.frombuffer(piece, dtype).reshape(-1, *shape[1:])


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    return np.lib.format.read_array_header_2_0(member)

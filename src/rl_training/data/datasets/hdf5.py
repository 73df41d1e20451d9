"""HDF5 files in the layout of D4RL (arXiv:2004.07219).

One dataset per column: `observations, actions, rewards, terminals, timeouts`, and in most files
`next_observations`.  `timeouts` are truncations and never terminals.  At a timeout, D4RL's own
reader takes the first observation of the next episode for the successor; here such rows are
dropped.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rl_training.data.datasets.blocks import MAX_RATIO, column_blocks
from rl_training.data.datasets.columns import RawData, find_keys
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.unpack import unpack
from rl_training.errors import DataError, MissingExtraError

NAMES = {"terminations": "terminals", "truncations": "timeouts"}
"""Columns that D4RL calls otherwise."""


def _library() -> ModuleType:
    try:
        import h5py
    except ImportError:
        raise MissingExtraError(
            'HDF5 files need h5py; run: pip install "rl-training[offline]"'
        ) from None
    module: ModuleType = h5py
    return module


def read_hdf5(path: Path, folder: Path | None = None) -> RawData:
    """Read the columns of an HDF5 file, or unpack them into `folder`; groups are ignored.

    Raises:
        DataError: When the file is damaged or lacks a key.
    """
    h5py, where = _library(), str(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{where}: it is not an HDF5 file, or damaged ({error})") from None
    with file:
        keys = find_keys(_column_names(h5py, file, where), where)
        if "truncations" not in keys and keys["terminations"] == "terminals":
            note = ["it has no timeouts: ends by a time limit have to be found"]
        else:
            note = []
        columns = {name: _read(file, key, where, folder) for name, key in keys.items()}
        env_id = file.attrs.get("env_id")
        provenance = _provenance(file.attrs.get("provenance"))
    return RawData(
        columns=columns,
        keys=keys,
        where=where,
        source=f"hdf5 {where}",
        env_id=env_id if isinstance(env_id, str) else None,
        notes=note,
        provenance=provenance,
        resets_follow_timeouts=True,
    )


def hdf5_provenance(path: Path) -> dict[str, Any]:
    """Return what a file says about how it was made.

    Raises:
        OSError: When it cannot be read.
    """
    with _library().File(path, "r") as file:
        return _provenance(file.attrs.get("provenance"))


def _provenance(text: object) -> dict[str, Any]:
    """Return what a file says about how it was made; nothing where it is not a JSON object."""
    try:
        found = json.loads(text) if isinstance(text, str) else {}
    except (json.JSONDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def hdf5_bytes(path: Path) -> int:
    """Return the size of the unpacked columns; 0 for a file that cannot be read."""
    h5py = _library()
    try:
        with h5py.File(path, "r") as file:
            return sum(int(c.nbytes) for c in file.values() if isinstance(c, h5py.Dataset))
    except (OSError, RuntimeError, KeyError):
        return 0


def _column_names(h5py: ModuleType, file: Any, where: str) -> list[str]:
    """Return the names of the datasets that lie in the file itself.

    Raises:
        DataError: For links to elsewhere: a file could read other files of the user that way.
    """
    try:
        names = list(file)
        for name in names:
            if not isinstance(file.get(name, getlink=True), h5py.HardLink):
                raise DataError(
                    f"{where}: {name} is a link, maybe to another file; store the column itself"
                )
        found = [name for name in names if isinstance(file[name], h5py.Dataset)]
    except (RuntimeError, KeyError, OSError, UnicodeError) as error:
        raise DataError(f"{where}: its list of names cannot be read ({error})") from None
    for name in found:
        if file[name].external or file[name].is_virtual:
            raise DataError(f"{where}: {name} lies in another file; store the column itself")
    return found


def _read(file: Any, key: str, where: str, folder: Path | None) -> Any:
    column = file[key]
    try:
        column.dtype  # noqa: B018 - damaged descriptions raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: {key} cannot be read ({error}); the file is damaged") from None
    if column.dtype.kind not in "fiub":
        raise DataError(f"{where}: {key} holds {column.dtype}, not numbers")
    # What was never written reads as zeros, terabytes of them in a file of some kilobytes.
    if column.nbytes > MAX_RATIO * column.id.get_storage_size() + 4096:
        raise DataError(
            f"{where}: {key} claims {column.nbytes} bytes where {column.id.get_storage_size()} "
            "are stored; the file was not written to its end, or is forged"
        )
    try:
        if folder is None or not column.size:
            return np.asarray(column[()])
        pieces = (np.asarray(column[block]) for block in column_blocks(column))
        return unpack(pieces, len(column), folder / f"{key}.npy")
    except MemoryError as error:
        raise DataError(f"{where}: {key} does not fit into memory ({error})") from None
    except OSError as error:
        raise DataError(f"{where}: {key} cannot be read ({error}); the file is damaged") from None


def write_hdf5(dataset: OfflineDataset, path: Path) -> None:
    """Write a file that D4RL's readers understand."""
    h5py = _library()
    with h5py.File(path, "w") as file:
        for name, column in dataset.columns():
            stored = file.create_dataset(
                NAMES.get(name, name), column.shape, column.dtype, compression="gzip"
            )
            # Piece by piece: a memory-mapped column may be larger than memory.
            for block in column_blocks(column):
                stored[block] = column[block]
        file.attrs["source"] = dataset.source
        if dataset.provenance:
            file.attrs["provenance"] = json.dumps(dict(dataset.provenance))
        if dataset.env_id is not None:
            file.attrs["env_id"] = dataset.env_id

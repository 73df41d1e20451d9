"""Where datasets come from: one function over all kinds of files."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import MAX_RATIO
from rl_training.data.datasets.columns import RawData, assemble, find_keys
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.random import random_dataset
from rl_training.data.datasets.scores import ReferenceScores, scores_in
from rl_training.data.datasets.units import TaskSpec
from rl_training.data.datasets.unpack import npz_chunks, unpack
from rl_training.errors import DataError, MissingExtraError
from rl_training.validation import suggest

Array = NDArray[Any]
DatasetKind = Literal["random", "npz", "npy", "hdf5", "minari"]
KINDS: tuple[str, ...] = get_args(DatasetKind)
DEFAULT_SIZE = 10_000
SUFFIXES = {".npz": "npz", ".hdf5": "hdf5", ".h5": "hdf5"}
META_FILE = "meta.json"
MOST_META = 2**20
"""Characters of a description that are read."""
CONVERT = (
    "make a folder of columns with rl-training data convert SOURCE FOLDER --to npy, and load that "
    "as kind npy"
)
"""What to do where data must be mapped and cannot be."""


def load_transition_dataset(
    kind: str,
    *,
    path: str | Path | None = None,
    dataset_id: str | None = None,
    size: int = DEFAULT_SIZE,
    seed: int = 0,
    env_spec: TaskSpec | None = None,
    memory_map: bool | None = None,
    allow_nan: bool = False,
    mark_ends: bool = True,
    download: bool = True,
    unpack_into: Path | None = None,
) -> OfflineDataset:
    """Load transitions, with actions in the task's own units.

    Args:
        kind: `random` (made up, for tests), `npz`, `npy` (a folder of memory-mapped columns),
            `hdf5` (the layout of D4RL) or `minari`.
        path: File or folder of `npz`, `npy` and `hdf5`.
        dataset_id: Id of a Minari dataset, such as `mujoco/hopper/expert-v0`.
        size: Transitions that `random` makes.
        seed: Seed of `random`.
        env_spec: The task: `random` has its shapes; others end their episodes at its limit, where
            they mark no truncation themselves.
        memory_map: Leave the columns on disk; None does so for `npy`, which alone can.
        allow_nan: Take NaN and infinities instead of refusing them.
        mark_ends: Mark truncations where episodes end without a mark, with a note of how many;
            `minari` and `random` know their episodes.
        download: Fetch a Minari dataset that is not there.
        unpack_into: Existing folder into which the columns of `npz` and `hdf5` are unpacked piece
            by piece and mapped, for files larger than memory.

    Raises:
        DataError: In one sentence: which file, key and row, and what to do.
        MissingExtraError: When a library is missing; names the extra.
    """
    if kind not in KINDS:
        raise DataError(f"dataset kind {kind!r} is not known{suggest(kind, KINDS)}")
    if memory_map and kind != "npy":
        raise DataError(f"a dataset of kind {kind} cannot be memory-mapped; {CONVERT}")
    if kind == "random":
        if env_spec is None:
            raise DataError("a random dataset needs env_spec (on the command line: --env)")
        dataset = random_dataset(env_spec, size, seed)
    elif kind == "minari":
        from rl_training.data.datasets.minari import load_minari

        if dataset_id is None:
            raise DataError("a minari dataset needs an id, such as mujoco/hopper/expert-v0")
        dataset = load_minari(dataset_id, download=download, allow_nan=allow_nan)
    else:
        raw = _read_file(kind, _existing(kind, path), memory_map is not False, unpack_into)
        limit = None if env_spec is None else env_spec.max_episode_steps
        dataset = assemble(raw, allow_nan=allow_nan, mark_ends=mark_ends, limit=limit)
    return dataset


def kind_of(path: Path) -> str:
    """Return the kind of a file by its name, or `npy` for a folder.

    Raises:
        DataError: When the name does not tell.
    """
    if path.is_dir():
        return "npy"
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{path}: the kind cannot be told from the name (known are {', '.join(SUFFIXES)} and "
            "folders of .npy files); say it with --kind"
        )
    return SUFFIXES[path.suffix.lower()]


def require_room(kind: str, path: Path, room: int) -> None:
    """Refuse a file that would not fit into memory, before it is read.

    Raises:
        DataError: With the sizes, and how to map it instead.
    """
    needed = _unpacked_bytes(kind, path.expanduser())
    if needed > room:
        raise DataError(
            f"{path}: it is {needed / 2**30:.1f} GiB unpacked, but {room / 2**30:.1f} GiB of "
            f"memory are free, and kind {kind} cannot be memory-mapped; {CONVERT}"
        )


def _unpacked_bytes(kind: str, path: Path) -> int:
    """Return the size of what a file holds; 0 where it is mapped, or damaged, as reading tells."""
    if kind == "npz" and path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return sum(member.file_size for member in archive.infolist())
    if kind == "hdf5" and path.is_file():
        from rl_training.data.datasets.hdf5 import hdf5_bytes

        return hdf5_bytes(path)
    return 0


def kind_of_source(source: str) -> str:
    """Return the kind of what a user names by one word: a file, a folder, or a Minari id.

    Raises:
        DataError: When the name does not tell.
    """
    from rl_training.data.datasets.minari import ID_FORM

    path = Path(source).expanduser()
    if not path.exists() and path.suffix not in SUFFIXES and ID_FORM.fullmatch(source):
        return "minari"
    return kind_of(path) if path.exists() or path.suffix in SUFFIXES else "npz"


def file_scores(path: Path) -> ReferenceScores | None:
    """Return the reference returns that a file or folder carries, if it is there and does."""
    try:
        kind = kind_of(path)
        raw = RawData(columns={}, keys={}, where=str(path), source="")
        if kind == "npy":
            with (path / META_FILE).open(encoding="utf-8", errors="replace") as file:
                _take_meta(raw, file.read(MOST_META))
        elif kind == "npz":
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
                _take_meta(raw, str(archive["meta"]))
        else:
            from rl_training.data.datasets.hdf5 import hdf5_provenance

            raw.provenance = hdf5_provenance(path)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, MissingExtraError):
        return None
    return scores_in(raw.provenance)


def _existing(kind: str, path: str | Path | None) -> Path:
    if path is None:
        raise DataError(f"a dataset of kind {kind} needs a path")
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(f"{found}: there is no such file or folder")
    if not found.is_dir() and not found.is_file():
        raise DataError(f"{found} is a pipe or a device, but data is read from plain files only")
    if found.is_dir() != (kind == "npy"):
        what, wanted = ("a folder", "a file") if found.is_dir() else ("a file", "a folder")
        raise DataError(f"{found} is {what}, but kind {kind} needs {wanted}")
    return found


def _read_file(kind: str, path: Path, memory_map: bool, folder: Path | None) -> RawData:
    if kind == "hdf5":
        from rl_training.data.datasets.hdf5 import read_hdf5

        return read_hdf5(path, folder)
    return read_npz(path, folder) if kind == "npz" else read_npy(path, memory_map=memory_map)


def read_npz(path: Path, folder: Path | None = None) -> RawData:
    """Read the columns of an npz file, or unpack them into `folder`; no object is unpickled."""
    where = str(path)
    if not zipfile.is_zipfile(path):
        raise DataError(f"{where}: it is not an npz file, which is a zip archive, or is cut short")
    with path.open("rb") as file, _archive(file, where) as archive:
        require_plausible(path)
        keys = find_keys(archive.files, where)
        columns = {
            name: _member(archive, key, where) if folder is None else _unpacked(path, key, folder)
            for name, key in keys.items()
        }
        extra = {
            name: _member(archive, name, where)
            for name in ("meta", "episode_ids")
            if name in archive.files
        }
    raw = RawData(columns=columns, keys=keys, where=where, source=f"npz {where}")
    raw.episode_ids = extra.get("episode_ids")
    if "meta" in extra and extra["meta"].dtype.kind == "U":
        _take_meta(raw, str(extra["meta"]))
    return raw


def _archive(file: BinaryIO, where: str) -> np.lib.npyio.NpzFile:
    try:
        archive: np.lib.npyio.NpzFile = np.load(file, allow_pickle=False)
    except (ValueError, OSError, zipfile.BadZipFile, EOFError, RuntimeError) as error:
        raise DataError(f"{where}: it is not an npz file, or damaged ({error})") from None
    return archive


def require_plausible(path: Path) -> None:
    """Refuse an archive whose members claim to be larger than what they are packed into can be.

    Raises:
        DataError: Naming the member.
    """
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.file_size > MAX_RATIO * member.compress_size + 4096:
                raise DataError(
                    f"{path}: {member.filename} claims {member.file_size} bytes in "
                    f"{member.compress_size} packed ones, which no compression does; the file is "
                    "damaged or forged"
                )


def _member(archive: Mapping[str, Array], key: str, where: str) -> Array:
    try:
        column = archive[key]
    except MemoryError as error:
        raise DataError(f"{where}: {key} does not fit into memory ({error}); {CONVERT}") from None
    except ValueError as error:
        if "allow_pickle" in str(error) or "Object arrays" in str(error):
            raise DataError(
                f"{where}: {key} holds Python objects (dtype object), which are never unpickled; "
                "store a plain numeric array"
            ) from None
        raise DataError(f"{where}: {key} cannot be read ({str(error)[:200]})") from None
    except (OSError, EOFError, zipfile.BadZipFile, RuntimeError, zlib.error) as error:
        raise DataError(f"{where}: {key} cannot be read ({error}); the file is damaged") from None
    if not isinstance(column, np.ndarray):  # what is no .npy file comes as its bytes
        raise DataError(f"{where}: {key} is not an array; store a plain numeric array")
    return column


def _unpacked(path: Path, key: str, folder: Path) -> Array:
    try:
        pieces = npz_chunks(path, key)
        if pieces is not None:
            return unpack(*pieces, folder / f"{key}.npy")
    except (OSError, EOFError, zipfile.BadZipFile, ValueError, zlib.error) as error:
        raise DataError(f"{path}: {key} cannot be read ({error}); the file is damaged") from None
    with np.load(path, allow_pickle=False) as archive:
        return _member(archive, key, str(path))


def read_npy(folder: Path, *, memory_map: bool = True) -> RawData:
    """Open a folder of columns, `observations.npy` and so on, without reading them."""
    where = str(folder)
    files = {file.stem: file for file in sorted(folder.glob("*.npy"))}
    keys = find_keys(list(files), where)
    columns = {name: _column_file(files[key], memory_map) for name, key in keys.items()}
    raw = RawData(columns=columns, keys=keys, where=where, source=f"npy {where}")
    if (folder / META_FILE).is_file():
        with (folder / META_FILE).open(encoding="utf-8", errors="replace") as file:
            _take_meta(raw, file.read(MOST_META))
    return raw


def _column_file(file: Path, memory_map: bool) -> Array:
    if not file.is_file():
        raise DataError(f"{file} is not a plain file; store each column as one")
    try:
        column: Array = np.load(file, mmap_mode="r" if memory_map else None, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        reason = str(error)[:200]
        raise DataError(f"{file}: it is not a plain array, or damaged ({reason})") from None
    return column


def _take_meta(raw: RawData, text: str) -> None:
    """Take the task's name and how it was made out of a description in JSON."""
    try:
        meta = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raw.notes.append("its meta text is not JSON and was ignored")
        return
    if isinstance(meta, dict) and isinstance(meta.get("env"), str):
        raw.env_id = meta["env"]
    if isinstance(meta, dict) and isinstance(meta.get("provenance"), dict):
        raw.provenance = meta["provenance"]

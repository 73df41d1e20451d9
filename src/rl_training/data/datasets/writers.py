"""Writing datasets: whole or not at all, in every format that can be read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.hdf5 import write_hdf5
from rl_training.data.datasets.sources import META_FILE
from rl_training.errors import DataError
from rl_training.output_files import check_replaceable


def save_dataset(dataset: OfflineDataset, path: Path, kind: str, *, force: bool = False) -> None:
    """Write a dataset as a file (`npz`, `hdf5`) or a folder (`npy`).

    It appears under its name only when it is complete.

    Args:
        dataset: With actions in the task's units.
        path: Where to.
        kind: `npz`, `hdf5` or `npy`.
        force: Replace what is there.

    Raises:
        DataError: When something is there already, or it cannot be written.
    """
    assert not dataset.learner_units, "files hold actions in the task's units"
    if path.exists() and not force:
        raise DataError(f"{path} exists already; choose another name, or replace it with --force")
    if path.is_dir() and (kind != "npy" or foreign_files(path)):
        raise DataError(f"{path} is a folder with other things in it; choose another name")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if not path.is_dir():
            check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[kind](dataset, part)
        if path.is_dir():
            shutil.rmtree(path)
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error})") from None
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            with contextlib.suppress(OSError):  # its folder may be none
                part.unlink(missing_ok=True)


def foreign_files(folder: Path) -> list[Path]:
    """Return what is in a folder of columns that does not belong there."""
    return [p for p in folder.iterdir() if p.suffix != ".npy" and p.name != META_FILE]


def _meta(dataset: OfflineDataset) -> str:
    """Return what a written file says of itself, as JSON."""
    meta = {"env": dataset.env_id, "source": dataset.source, "notes": list(dataset.notes)}
    return json.dumps(
        meta | ({"provenance": dict(dataset.provenance)} if dataset.provenance else {})
    )


def _write_npz(dataset: OfflineDataset, path: Path) -> None:
    columns = {name: np.asarray(column) for name, column in dataset.columns()}
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, meta=np.array(_meta(dataset)), **columns)


def _write_npy(dataset: OfflineDataset, folder: Path) -> None:
    folder.mkdir()
    for name, column in dataset.columns():
        np.save(folder / f"{name}.npy", column, allow_pickle=False)
    (folder / META_FILE).write_text(_meta(dataset) + "\n", encoding="utf-8")


WRITERS: dict[str, Callable[[OfflineDataset, Path], None]] = {
    "npz": _write_npz,
    "npy": _write_npy,
    "hdf5": write_hdf5,
}

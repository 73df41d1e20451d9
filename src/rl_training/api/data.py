"""Recorded data as users pass it in Python, turned into settings that a run can keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rl_training.algorithms.spec import Loop
from rl_training.data.datasets.columns import RawData, assemble, find_keys
from rl_training.data.datasets.config import DatasetSettings
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.expert_config import ExpertSettings
from rl_training.data.datasets.sources import kind_of_source, load_transition_dataset
from rl_training.data.datasets.writers import save_dataset
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.registry import get_algorithm_spec

DataLike: TypeAlias = OfflineDataset | Mapping[str, Any] | str | Path | Any
"""A dataset, arrays by name, a file, a folder, a Minari id, or a Minari dataset."""


def settings_for_data(
    algo: str, data: DataLike, output_dir: Path
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Return settings that name the data, and a function that infers the task's spaces from it.

    Data that is only in memory is written beside the runs, so that a run can be resumed.

    Raises:
        ConfigError: When the method does not learn from data.
        DataError: When the data has an unknown form.
    """
    fields = get_algorithm_spec(algo).config_class
    prefix = _prefix(algo)
    if isinstance(data, Mapping):
        data = dataset_from(data)
    if isinstance(data, OfflineDataset):
        # Absolute, so that the run can be resumed from anywhere.
        path = output_dir.absolute() / "datasets" / f"{data.digest()[:16]}.npz"
        if not path.exists():
            save_dataset(data, path, "npz")
        given: dict[str, Any] = {"kind": "npz", "path": str(path)}
    elif isinstance(data, (str, Path)):
        text = str(data)
        kind = kind_of_source(text)
        given = {"kind": kind} | ({"id": text} if kind == "minari" else {"path": text})
    elif hasattr(data, "iterate_episodes") and hasattr(data, "spec"):
        given = {"kind": "minari", "id": data.spec.dataset_id}
    else:
        raise DataError(
            "fit takes an OfflineDataset, a mapping of arrays, a file or folder, or a Minari "
            f"dataset or its id, got {type(data).__name__}"
        )
    names = {"kind": None, "path": None, "id": None} | given
    settings = {f"{prefix}{name}": value for name, value in names.items()}
    assert settings.keys() <= fields.model_fields.keys()

    def spaces() -> dict[str, Any]:
        if isinstance(data, OfflineDataset):
            return spaces_of(data)
        return spaces_of(
            load_transition_dataset(
                given["kind"], path=given.get("path"), dataset_id=given.get("id")
            )
        )

    return settings, spaces


def _prefix(algo: str) -> str:
    spec = get_algorithm_spec(algo)
    if issubclass(spec.config_class, ExpertSettings):
        return "expert_dataset_"
    if issubclass(spec.config_class, DatasetSettings):
        return "dataset_"
    raise ConfigError(
        f"{algo} learns from an environment; call learn, or take a method that learns from data: "
        f"{', '.join(_offline_methods())}"
    )


def _offline_methods() -> list[str]:
    from rl_training.experiment.registry import algorithm_names

    return [name for name in algorithm_names() if get_algorithm_spec(name).loop is Loop.OFFLINE]


def dataset_from(arrays: Mapping[str, Any]) -> OfflineDataset:
    """Return arrays by name as a dataset; successors are taken from the rows that follow.

    Raises:
        DataError: When columns are missing or do not fit together.
    """
    where = "the arrays"
    keys = find_keys({str(name): value for name, value in arrays.items()}, where)
    columns = {name: np.asarray(arrays[key]) for name, key in keys.items()}
    return assemble(RawData(columns=columns, keys=keys, where=where, source="arrays"))


def spaces_of(dataset: OfflineDataset) -> dict[str, Any]:
    """Infer the spaces of a task from its data, for `SpacesOnly`."""
    spaces: dict[str, Any] = {
        "obs_shape": list(dataset.observations.shape[1:]),
        "obs_dtype": str(dataset.observations.dtype),
    }
    if dataset.is_discrete:
        return spaces | {"num_actions": int(dataset.actions.max()) + 1}
    low, high = dataset.actions.min(0), dataset.actions.max(0)
    return spaces | {"action_low": low.tolist(), "action_high": high.tolist()}

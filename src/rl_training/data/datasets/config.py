"""Settings that say which data an offline learner learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.demonstrations import first_episodes
from rl_training.data.datasets.sources import (
    SUFFIXES,
    DatasetKind,
    load_transition_dataset,
    require_room,
)
from rl_training.data.datasets.units import TaskSpec
from rl_training.data.datasets.view import DatasetView, view_of
from rl_training.validation import (
    Number,
    PositiveFloat,
    PositiveInt,
    Seed,
    Settings,
    StrictModel,
    list_to_tuple,
)

DatasetStorage = Literal["auto", "device", "mapped"]
MOST_SOURCES = 1_000
"""Sources of a mix."""


class DatasetSource(StrictModel):
    """One source of a mix."""

    kind: DatasetKind
    """Format of the data; told from `path` or `id` if left out."""
    path: str | None = None
    """File or folder (`npz`, `npy`, `hdf5`)."""
    id: str | None = None
    """Id of a Minari dataset."""
    weight: PositiveFloat = 1.0
    """Share of the batches, relative to the other sources and whatever their sizes."""

    @model_validator(mode="before")
    @classmethod
    def _kind_from_name(cls, values: Any) -> Any:
        return with_kind("", values)

    @model_validator(mode="after")
    def _names_its_data(self) -> DatasetSource:
        check_names("", self.kind, self.path, self.id)
        return self


Sources = Annotated[
    tuple[DatasetSource, ...],
    Field(max_length=MOST_SOURCES),
    BeforeValidator(
        list_to_tuple,
        json_schema_input_type=Annotated[list[DatasetSource], Field(max_length=MOST_SOURCES)],
    ),
]


class DatasetSettings(Settings):
    """Which data to learn from, and what to do with it before learning."""

    dataset_kind: DatasetKind = "random"
    """Format of the data, inferred from `dataset_path` or `dataset_id` by default; `random` is
    made up and for tests only."""
    dataset_path: str | None = None
    """File of `npz` and `hdf5` (layout of D4RL), or folder of `npy` files."""
    dataset_id: str | None = None
    """Id of a Minari dataset, which is downloaded if it is not there."""
    dataset_size: PositiveInt = 10_000
    """Transitions of `random`; files are read whole."""
    dataset_seed: Seed = 0
    """Seed of `random`."""
    dataset_trajectories: PositiveInt | None = None
    """Take this many episodes of a source, the first ones; null takes all."""
    dataset_mix: Sources = ()
    """Several sources `{kind, path, id, weight}`; a batch draws a source by weight, then a row."""
    dataset_storage: DatasetStorage = "auto"
    """`device` copies the rows there, `mapped` reads each batch from a folder of `npy` files.

    `auto` takes `device` when the rows fit into four fifths of its free memory."""
    reward_scale: Number = 1.0
    """Factor on every reward."""
    reward_shift: Number = 0.0
    """Added to every reward after scaling."""
    normalize_rewards: bool = False
    """Multiply rewards by 1000 / (largest - smallest episode return) first, as IQL does."""
    normalize_dataset_actions: bool = False
    """Clip actions outside the action box, with a message, instead of refusing them."""
    normalize_observations: bool = False
    """Standardise observations by the dataset's mean and deviation."""

    @model_validator(mode="before")
    @classmethod
    def _kind_from_name(cls, values: Any) -> Any:
        return with_kind("dataset_", values)

    @model_validator(mode="after")
    def _names_its_data(self) -> DatasetSettings:
        if self.dataset_mix:
            if self.dataset_path is not None or self.dataset_id is not None:
                raise ValueError("give either dataset_mix, or dataset_path or dataset_id, not both")
        else:
            check_names("dataset_", self.dataset_kind, self.dataset_path, self.dataset_id)
        return self


def with_kind(prefix: str, values: Any) -> Any:
    """Return settings with the kind of the data that they name, unless they say another.

    `random` does not count as another: presets for tests have it, and nobody names data in order
    not to use it.
    """
    if not isinstance(values, Mapping) or values.get(f"{prefix}kind", "random") != "random":
        return values
    path, dataset_id = (values.get(f"{prefix}{name}") for name in ("path", "id"))
    if dataset_id is not None and path is None:
        return {**values, f"{prefix}kind": "minari"}
    if not isinstance(path, (str, Path)) or dataset_id is not None:
        return values
    return {**values, f"{prefix}kind": _kind_of(f"{prefix}path", f"{prefix}kind", Path(path))}


def _kind_of(key: str, kind_key: str, path: Path) -> str:
    """Return the kind of a file by its name, which need not exist here: a run may be elsewhere."""
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    if suffix == "" or path.is_dir():
        return "npy"
    raise ValueError(
        f"{key} is {str(path)!r}, whose name does not tell its kind (known are "
        f"{', '.join(SUFFIXES)} and folders of .npy files); give {kind_key} too"
    )


def check_names(prefix: str, kind: str, path: str | None, dataset_id: str | None) -> None:
    """Check that a source names what its kind needs and nothing else."""
    needed = {"random": None, "minari": "id"}.get(kind, "path")
    for name, value in (("path", path), ("id", dataset_id)):
        if name == needed and value is None:
            raise ValueError(f"{prefix}{name} is required with {prefix}kind {kind}")
        if name != needed and value is not None:
            raise ValueError(
                f"{prefix}{name} is {value!r}, but {prefix}kind {kind} does not use it; change "
                f"{prefix}kind or remove {prefix}{name}"
            )


def open_configured(
    settings: DatasetSettings, env_spec: TaskSpec, *, room: int | None = None
) -> DatasetView:
    """Open the data that settings name, without copying what lies in files.

    Actions are in learner units, rewards as asked for, sources mixed by weight.  Observations are
    left as they are: learners standardise them.

    Args:
        settings: What to load and what to do with it.
        env_spec: The task.
        room: Bytes into which a file that cannot be mapped must fit.

    Raises:
        DataError: When the data cannot be read or does not fit the task or the room.
    """
    sources: Sequence[DatasetSource] = settings.dataset_mix or (
        DatasetSource(
            kind=settings.dataset_kind, path=settings.dataset_path, id=settings.dataset_id
        ),
    )
    loaded = []
    for index, source in enumerate(sources):
        if room is not None and source.path is not None:
            require_room(source.kind, Path(source.path), room)
        dataset = load_transition_dataset(
            source.kind,
            path=source.path,
            dataset_id=source.id,
            size=settings.dataset_size,
            # Two random sources of one mix must differ.
            seed=settings.dataset_seed + index,
            env_spec=env_spec,
        )
        if settings.dataset_trajectories is not None:
            wanted = settings.dataset_trajectories
            dataset = first_episodes(dataset, wanted, "dataset_trajectories")
        loaded.append(dataset)
    view = view_of(
        loaded,
        env_spec,
        clip=settings.normalize_dataset_actions,
        weights=[source.weight for source in sources] if settings.dataset_mix else None,
    )
    if settings.normalize_rewards:
        view = view.with_normalized_rewards()
    return view.scaled(settings.reward_scale, settings.reward_shift)


def load_configured(settings: DatasetSettings, env_spec: TaskSpec) -> OfflineDataset:
    """Load the data that settings name, as `open_configured`, with changed columns in memory.

    Raises:
        DataError: When the data cannot be read or does not fit the task.
    """
    return open_configured(settings, env_spec).to_dataset()

"""Minari datasets (https://minari.farama.org), read and written by Minari itself.

Its ids are looked up in the folder `MINARI_DATASETS_PATH`, or `~/.minari/datasets`, and downloaded
when they are not there.

Shapes: T steps of an episode.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import COLUMNS
from rl_training.data.datasets.columns import RawData, assemble
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.scores import ReferenceScores
from rl_training.data.datasets.units import any_in_row
from rl_training.errors import DataError, MissingExtraError, SpecMismatch
from rl_training.spaces import action_sizes, observation_spec

Array = NDArray[Any]
ID_FORM = re.compile(r"[-_\w/]+-v\d+")


def _library() -> ModuleType:
    try:
        import h5py  # noqa: F401
        import minari
    except ImportError:
        raise MissingExtraError(
            'Minari datasets need minari; run: pip install "rl-training[offline]"'
        ) from None
    module: ModuleType = minari
    return module


def check_id(dataset_id: str) -> None:
    """Check the form of an id.

    Raises:
        DataError: When it is not `name-v0`, or `folder/name-v0`.
    """
    if not ID_FORM.fullmatch(dataset_id):
        raise DataError(
            f"Minari id {dataset_id!r} must look like mujoco/hopper/expert-v0: words, slashes and "
            "a version at the end"
        )


def load_minari(
    dataset_id: str, *, download: bool = True, allow_nan: bool = False
) -> OfflineDataset:
    """Read all episodes of a Minari dataset, downloading it if it is not there.

    Raises:
        DataError: When it is not there and cannot be downloaded, or holds spaces no learner takes.
        MissingExtraError: Without Minari.
    """
    check_id(dataset_id)
    minari, where = _library(), f"minari {dataset_id}"
    try:
        # Minari reports its download on stdout, where our own output goes.
        with contextlib.redirect_stdout(io.StringIO()):
            stored = minari.load_dataset(dataset_id, download=download)
    except FileNotFoundError:
        raise DataError(
            f"{where}: it is not in the local folder of Minari datasets, which "
            "MINARI_DATASETS_PATH names (on the command line, --kind minari downloads it)"
        ) from None
    except Exception as error:
        raise DataError(
            f"{where}: it is not usable locally and could not be downloaded "
            f"({type(error).__name__}: {error}); check the id and the network, or copy it into the "
            "folder that MINARI_DATASETS_PATH names"
        ) from None
    raw = _read(stored, where)
    # Minari stores each episode by itself, so nobody looks for ends.
    return assemble(raw, allow_nan=allow_nan, mark_ends=False)


def carried_scores(dataset_id: str) -> ReferenceScores | None:
    """Return the reference returns that a Minari dataset on this machine carries, if it does."""
    try:
        stored = _library().load_dataset(dataset_id, download=False)
        low, high = (float(stored.storage.metadata[f"ref_{name}_score"]) for name in ("min", "max"))
    except (MissingExtraError, OSError, KeyError, TypeError, ValueError):
        return None
    return ReferenceScores(low, high) if math.isfinite(low) and low < high < math.inf else None


def _read(stored: Any, where: str) -> RawData:
    pieces: dict[str, list[Array]] = {name: [] for name in COLUMNS}
    open_ends = 0
    for episode in stored.iterate_episodes():
        if not len(episode.rewards):
            continue
        spaces_of = stored.observation_space, stored.action_space
        obs = flat_observations(*spaces_of, episode.observations, where)
        if len(obs) != len(episode.rewards) + 1:
            raise DataError(
                f"{where}: episode {episode.id} has {len(obs)} observations and "
                f"{len(episode.rewards)} rewards; Minari stores one observation more than rewards"
            )
        truncations = np.array(episode.truncations, np.bool_)
        if not (episode.terminations[-1] or truncations[-1]):
            truncations[-1] = True
            open_ends += 1
        columns = (
            obs[:-1],
            _flat_actions(stored.action_space, episode.actions, where),
            np.asarray(episode.rewards),
            obs[1:],
            np.asarray(episode.terminations),
            truncations,
        )
        for name, column in zip(COLUMNS, columns, strict=True):
            pieces[name].append(column)
    if not pieces["rewards"]:
        raise DataError(f"{where}: it holds no transitions")
    notes = [f"{open_ends} episodes have no end and were marked truncated"] if open_ends else []
    return RawData(
        columns={name: np.concatenate(rows) for name, rows in pieces.items()},
        keys={name: name for name in COLUMNS},
        where=where,
        source=where,
        env_id=None if stored.spec.env_spec is None else stored.spec.env_spec.id,
        notes=notes,
    )


def flat_observations(
    space: spaces.Space[Any], actions: spaces.Space[Any], values: Any, where: str
) -> Array:
    """Return observations `[T + 1, ...]` as the environment layer gives them.

    A Box as it is, everything else as rows.  What the mask of actions after the last step allows is
    of no account, and it may allow nothing.
    """
    if isinstance(space, spaces.Box):
        return np.asarray(values)
    try:
        return observation_spec(space, where, action_sizes(actions)).pack(values, 1, ended=True)
    except SpecMismatch as error:
        raise DataError(str(error).removeprefix("environment ")) from None
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _flat_actions(space: spaces.Space[Any], values: Any, where: str) -> Array:
    if isinstance(space, spaces.Discrete):
        return np.asarray(values, np.int64)
    if isinstance(space, spaces.Box):
        actions = np.asarray(values, np.float32)
        return actions.reshape(len(actions), math.prod(space.shape))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return np.asarray(values, np.float32).reshape(len(values), -1)
    raise DataError(
        f"{where}: action space {space} cannot be used; allowed are Box, Discrete, MultiDiscrete "
        "and MultiBinary"
    )


def write_minari(
    dataset: OfflineDataset,
    dataset_id: str,
    *,
    env: gym.Env[Any, Any] | None = None,
    algorithm: str | None = None,
) -> None:
    """Write a dataset into the local folder of Minari datasets.

    Args:
        dataset: With actions in the task's units.
        dataset_id: Id of the new dataset; it must not exist yet.
        env: The task, made as it was when the data was gathered; None describes the spaces by the
            data alone.
        algorithm: What gathered the data.

    Raises:
        DataError: When the id is taken, or a successor is not the next row's observation, which
            Minari's layout cannot hold.
    """
    check_id(dataset_id)
    minari = _library()
    if dataset_id in minari.list_local_datasets():
        raise DataError(
            f"minari {dataset_id}: it exists already; choose another version, or remove it with "
            f"minari delete {dataset_id}"
        )
    # Images would be stored as JPEG, which changes them.
    options = {"jpeg_encoding": False} if dataset.observations.dtype == np.uint8 else {}
    with warnings.catch_warnings():
        # It asks for the names of authors, which we do not know.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"minari\..*")
        minari.create_dataset_from_buffers(
            dataset_id=dataset_id,
            buffer=list(_episodes(dataset, None if env is None else env.action_space.shape)),
            env=_Described(env) if env is not None and env.spec is not None else None,
            observation_space=env.observation_space if env else _box_of(dataset.observations),
            action_space=env.action_space if env else _action_space(dataset),
            algorithm_name=algorithm,
            description=f"{dataset.source}; written by rl-training",
            **options,
        )


class _Described(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose description leaves out wrappers that could not be made again."""

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # a property in Wrapper too
        """The description, with its time limit."""
        found = self.env.spec
        if found is None:
            return None
        kept = tuple(part for part in found.additional_wrappers if part.kwargs is not None)
        return replace(found, additional_wrappers=kept)


def _episodes(dataset: OfflineDataset, action_shape: tuple[int, ...] | None) -> Iterator[Any]:
    from minari.data_collector.episode_buffer import EpisodeBuffer

    bounds = zip(dataset.episode_starts.tolist(), dataset.episode_stops.tolist(), strict=True)
    for number, (start, stop) in enumerate(bounds):
        obs, successors = dataset.observations[start:stop], dataset.next_observations[start:stop]
        actions = np.asarray(dataset.actions[start:stop])
        broken = np.flatnonzero(any_in_row(obs[1:] != successors[:-1]))
        if len(broken):
            row = start + int(broken[0])
            raise DataError(
                f"{dataset.name}: the successor of row {row} is not the observation of row "
                f"{row + 1}, which Minari's layout cannot hold; convert to npz or hdf5, or mend "
                "the data (rl-training data check)"
            )
        yield EpisodeBuffer(
            id=number,
            observations=np.concatenate([obs, successors[-1:]]),
            actions=actions if action_shape is None else actions.reshape(-1, *action_shape),
            rewards=list(dataset.rewards[start:stop]),
            terminations=list(dataset.terminations[start:stop]),
            truncations=list(dataset.truncations[start:stop]),
        )


def _box_of(rows: Array) -> spaces.Box:
    if rows.dtype == np.uint8:
        return spaces.Box(0, 255, rows.shape[1:], np.uint8)
    return spaces.Box(-np.inf, np.inf, rows.shape[1:], np.float32)


def _action_space(dataset: OfflineDataset) -> spaces.Space[Any]:
    if dataset.is_discrete:
        start = min(0, int(dataset.actions.min()))
        return spaces.Discrete(int(dataset.actions.max()) - start + 1, start=start)
    return _box_of(dataset.actions)

"""Settings that say which demonstrations an imitating learner is given beside its environment."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from rl_training.data.datasets.config import (
    DatasetSettings,
    check_names,
    load_configured,
    with_kind,
)
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.demonstrations import first_episodes, thinned, with_shuffled_actions
from rl_training.data.datasets.sources import DatasetKind
from rl_training.data.datasets.units import TaskSpec
from rl_training.validation import PositiveInt, Seed, Settings


class ExpertSettings(Settings):
    """Which demonstrations to imitate."""

    expert_dataset_kind: DatasetKind = "random"
    """Format of the demonstrations, inferred from `expert_dataset_path` or `expert_dataset_id`
    by default; `random` is made up and for tests only."""
    expert_dataset_path: str | None = None
    """File of `npz` and `hdf5` (layout of D4RL), or folder of `npy` files."""
    expert_dataset_id: str | None = None
    """Id of a Minari dataset, which is downloaded if it is not there."""
    expert_dataset_size: PositiveInt = 5_000
    """Transitions of `random`; files are read whole."""
    expert_dataset_seed: Seed = 0
    """Seed of `random`, of the thinning and of the shuffling."""
    expert_trajectories: PositiveInt | None = None
    """Take this many episodes, the first ones; null takes all."""
    expert_subsample: PositiveInt = 1
    """Take every k-th row of an episode, from a random start per episode; 1 takes all."""
    expert_shuffle_actions: bool = False
    """A control: give each state the action of another one, so that nothing is demonstrated."""
    expert_clip_actions: bool = False
    """Clip actions outside the action box, with a message, instead of refusing them."""

    @model_validator(mode="before")
    @classmethod
    def _kind_from_name(cls, values: Any) -> Any:
        return with_kind("expert_dataset_", values)

    @model_validator(mode="after")
    def _names_its_demonstrations(self) -> ExpertSettings:
        check_names(
            "expert_dataset_",
            self.expert_dataset_kind,
            self.expert_dataset_path,
            self.expert_dataset_id,
        )
        return self


def load_expert(settings: ExpertSettings, env_spec: TaskSpec) -> OfflineDataset:
    """Load the demonstrations that settings name, in learner units.

    Raises:
        DataError: When they cannot be read, do not fit the task, or are too few.
    """
    source = DatasetSettings(
        dataset_kind=settings.expert_dataset_kind,
        dataset_path=settings.expert_dataset_path,
        dataset_id=settings.expert_dataset_id,
        dataset_size=settings.expert_dataset_size,
        dataset_seed=settings.expert_dataset_seed,
        normalize_dataset_actions=settings.expert_clip_actions,
    )
    dataset = load_configured(source, env_spec)
    if settings.expert_trajectories is not None:
        dataset = first_episodes(dataset, settings.expert_trajectories, "expert_trajectories")
    dataset = thinned(dataset, settings.expert_subsample, settings.expert_dataset_seed)
    if settings.expert_shuffle_actions:
        dataset = with_shuffled_actions(dataset, settings.expert_dataset_seed)
    return dataset

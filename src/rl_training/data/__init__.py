"""Batches, replay buffers, recorded datasets and the input normaliser.

Nothing here knows an environment, a network or a loss.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_training.data.batch import RolloutBatch, TransitionBatch
    from rl_training.data.datasets.config import DatasetSettings, load_configured
    from rl_training.data.datasets.dataset import OfflineDataset
    from rl_training.data.datasets.sources import load_transition_dataset
    from rl_training.data.replay.frames import FrameReplayBuffer, PrioritizedFrameReplayBuffer
    from rl_training.data.replay.prioritized import PrioritizedReplayBuffer
    from rl_training.data.replay.sequences import RecurrentReplayBuffer
    from rl_training.data.replay.storage import ReplayBuffer

__all__ = [
    "DatasetSettings",
    "FrameReplayBuffer",
    "OfflineDataset",
    "PrioritizedFrameReplayBuffer",
    "PrioritizedReplayBuffer",
    "RecurrentReplayBuffer",
    "ReplayBuffer",
    "RolloutBatch",
    "TransitionBatch",
    "load_configured",
    "load_transition_dataset",
]

# Loaded when first used, so that commands that only read runs start without PyTorch.
_ROOMS = {
    "batch": ("RolloutBatch", "TransitionBatch"),
    "datasets.config": ("DatasetSettings", "load_configured"),
    "datasets.dataset": ("OfflineDataset",),
    "datasets.sources": ("load_transition_dataset",),
    "replay.frames": ("FrameReplayBuffer", "PrioritizedFrameReplayBuffer"),
    "replay.prioritized": ("PrioritizedReplayBuffer",),
    "replay.sequences": ("RecurrentReplayBuffer",),
    "replay.storage": ("ReplayBuffer",),
}
_LATER = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

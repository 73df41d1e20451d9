"""Batches, replay buffers, recorded datasets and the input normaliser.

Nothing here knows an environment, a network or a loss.
"""

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

"""Batches, replay buffers, offline datasets and normalisers."""

from rl_training.data.batch import RolloutBatch, TransitionBatch
from rl_training.data.dataset_config import DatasetSettings, load_configured
from rl_training.data.dataset_sources import load_transition_dataset
from rl_training.data.frame_replay import FrameReplayBuffer, PrioritizedFrameReplayBuffer
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.prioritized_replay import PrioritizedReplayBuffer
from rl_training.data.recurrent_replay import RecurrentReplayBuffer
from rl_training.data.replay_buffer import ReplayBuffer

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

"""Batches, replay buffers and normalisers."""

from rl_training.data.batch import RolloutBatch, TransitionBatch
from rl_training.data.prioritized_replay import PrioritizedReplayBuffer
from rl_training.data.replay_buffer import ReplayBuffer

__all__ = ["PrioritizedReplayBuffer", "ReplayBuffer", "RolloutBatch", "TransitionBatch"]

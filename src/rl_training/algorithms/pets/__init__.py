"""PETS: the learner, and the planners it holds.

The ensemble that is planned through is `algorithms.dynamics`; nothing here trains a policy.
"""

from rl_training.algorithms.pets.learner import PETS, SPEC, pets_loss

__all__ = ["PETS", "SPEC", "pets_loss"]

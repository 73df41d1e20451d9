"""Dreamer: the learner, its losses, imagination and belief.

The networks of the world model are in `models`; nothing here steps an environment.
"""

from rl_training.algorithms.dreamer.learner import SPEC, Dreamer

__all__ = ["SPEC", "Dreamer"]

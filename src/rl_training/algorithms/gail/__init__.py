"""GAIL: the learner, its discriminator and the demonstrations it imitates.

The policy is PPO's and lives in `algorithms.ppo`.
"""

from rl_training.algorithms.gail.learner import GAIL, SPEC, gail_loss

__all__ = ["GAIL", "SPEC", "gail_loss"]

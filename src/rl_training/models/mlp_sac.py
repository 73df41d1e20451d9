"""The networks of SAC, in `actor_with_critics`; this name is public."""

from rl_training.models.actor_with_critics import MLPSACModel as MLPSACModel

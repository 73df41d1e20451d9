"""The networks of IQL, in `actor_with_critics`; this name is public."""

from rl_training.models.actor_with_critics import MLPIQLModel as MLPIQLModel

"""Networks: stacked layers, heads, and the named compositions that algorithms are built with."""

from rl_training.models.mlp_actor_critic import MLPActorCriticModel
from rl_training.models.mlp_iql import MLPIQLModel
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.models.mlp_sac import MLPSACModel

__all__ = [
    "MLPActorCriticModel",
    "MLPIQLModel",
    "MLPMOPOEnsembleModel",
    "MLPQNetwork",
    "MLPSACModel",
]

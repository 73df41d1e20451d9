"""Networks: stacked layers, heads, encoders, and the compositions that algorithms are built with.

No loss and no optimizer lives here.
"""

from rl_training.models.actor_with_critics import MLPIQLModel, MLPSACModel
from rl_training.models.encoders import MLPEncoder, PixelEncoder, make_encoder
from rl_training.models.mlp_actor_critic import ActorCriticModel, MLPActorCriticModel
from rl_training.models.mlp_fqf_network import MLPFQFNetwork
from rl_training.models.mlp_gail_discriminator import MLPGAILDiscriminator
from rl_training.models.mlp_iqn_network import MLPIQNNetwork
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_policy import MLPPolicyModel
from rl_training.models.mlp_q_network import MLPQNetwork, QNetwork
from rl_training.models.mlp_qr_dqn_network import MLPQRDQNNetwork

__all__ = [
    "ActorCriticModel",
    "MLPActorCriticModel",
    "MLPEncoder",
    "MLPFQFNetwork",
    "MLPGAILDiscriminator",
    "MLPIQLModel",
    "MLPIQNNetwork",
    "MLPMOPOEnsembleModel",
    "MLPPolicyModel",
    "MLPQNetwork",
    "MLPQRDQNNetwork",
    "MLPSACModel",
    "PixelEncoder",
    "QNetwork",
    "make_encoder",
]

# Written by scripts/update_stubs.py; do not edit.
# ruff: noqa: N811, F401
from rl_training._version import __version__ as __version__
from rl_training.algorithms.cql import CQL as CQLAlgorithm
from rl_training.algorithms.discrete_cql import DiscreteCQL as DiscreteCQLAlgorithm
from rl_training.algorithms.dqn import DQN as DQNAlgorithm
from rl_training.algorithms.fqf import FQF as FQFAlgorithm
from rl_training.algorithms.iql import IQL as IQLAlgorithm
from rl_training.algorithms.iqn import IQN as IQNAlgorithm
from rl_training.algorithms.ppo import PPO as PPOAlgorithm
from rl_training.algorithms.qr_dqn import QRDQN as QRDQNAlgorithm
from rl_training.algorithms.rlpd import RLPD as RLPDAlgorithm
from rl_training.algorithms.sac import SAC as SACAlgorithm
from rl_training.algorithms.td3_bc import TD3BC as TD3BCAlgorithm
from rl_training.api.algorithms import CQL as CQL
from rl_training.api.algorithms import DQN as DQN
from rl_training.api.algorithms import FQF as FQF
from rl_training.api.algorithms import IQL as IQL
from rl_training.api.algorithms import IQN as IQN
from rl_training.api.algorithms import PPO as PPO
from rl_training.api.algorithms import QRDQN as QRDQN
from rl_training.api.algorithms import RLPD as RLPD
from rl_training.api.algorithms import SAC as SAC
from rl_training.api.algorithms import TD3BC as TD3BC
from rl_training.api.algorithms import DiscreteCQL as DiscreteCQL
from rl_training.experiment.config import TrainConfig as TrainConfig

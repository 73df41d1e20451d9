# Written by scripts/update_stubs.py; do not edit.
# ruff: noqa: N811, F401
from rl_training._version import __version__ as __version__
from rl_training.algorithms.bc import BC as BCAlgorithm
from rl_training.algorithms.cql import CQL as CQLAlgorithm
from rl_training.algorithms.discrete_cql import DiscreteCQL as DiscreteCQLAlgorithm
from rl_training.algorithms.dqn import DQN as DQNAlgorithm
from rl_training.algorithms.dreamer import Dreamer as DreamerAlgorithm
from rl_training.algorithms.fqf import FQF as FQFAlgorithm
from rl_training.algorithms.gail import GAIL as GAILAlgorithm
from rl_training.algorithms.iql import IQL as IQLAlgorithm
from rl_training.algorithms.iqn import IQN as IQNAlgorithm
from rl_training.algorithms.mbpo import MBPO as MBPOAlgorithm
from rl_training.algorithms.mopo import MOPO as MOPOAlgorithm
from rl_training.algorithms.pets import PETS as PETSAlgorithm
from rl_training.algorithms.ppo import PPO as PPOAlgorithm
from rl_training.algorithms.qr_dqn import QRDQN as QRDQNAlgorithm
from rl_training.algorithms.rlpd import RLPD as RLPDAlgorithm
from rl_training.algorithms.sac import SAC as SACAlgorithm
from rl_training.algorithms.td3 import TD3 as TD3Algorithm
from rl_training.algorithms.td3_bc import TD3BC as TD3BCAlgorithm
from rl_training.api.algorithms import BC as BC
from rl_training.api.algorithms import CQL as CQL
from rl_training.api.algorithms import DQN as DQN
from rl_training.api.algorithms import FQF as FQF
from rl_training.api.algorithms import GAIL as GAIL
from rl_training.api.algorithms import IQL as IQL
from rl_training.api.algorithms import IQN as IQN
from rl_training.api.algorithms import MBPO as MBPO
from rl_training.api.algorithms import MOPO as MOPO
from rl_training.api.algorithms import PETS as PETS
from rl_training.api.algorithms import PPO as PPO
from rl_training.api.algorithms import QRDQN as QRDQN
from rl_training.api.algorithms import RLPD as RLPD
from rl_training.api.algorithms import SAC as SAC
from rl_training.api.algorithms import TD3 as TD3
from rl_training.api.algorithms import TD3BC as TD3BC
from rl_training.api.algorithms import DiscreteCQL as DiscreteCQL
from rl_training.api.algorithms import Dreamer as Dreamer
from rl_training.data import OfflineDataset as OfflineDataset
from rl_training.experiment.config import TrainConfig as TrainConfig
from rl_training.runtime.callbacks import Callback as Callback
from rl_training.runtime.callbacks import PruneTrial as PruneTrial
from rl_training.runtime.callbacks import SaveEvery as SaveEvery
from rl_training.runtime.callbacks import StopOnReturn as StopOnReturn
from rl_training.runtime.callbacks import TrainerState as TrainerState

TOP_LEVEL: dict[str, str]

# Written by scripts/update_stubs.py; do not edit.
from rl_training.api.agent import Agent as Agent
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
from rl_training.api.algorithms import TD3BC as TD3BC
from rl_training.api.algorithms import DiscreteCQL as DiscreteCQL

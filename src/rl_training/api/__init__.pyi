# Written by scripts/update_stubs.py; do not edit.
from rl_training.api.agent import Agent as Agent
from rl_training.api.algorithms import DQN as DQN
from rl_training.api.algorithms import PPO as PPO
from rl_training.api.algorithms import SAC as SAC

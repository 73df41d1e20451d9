"""Train PPO: the shared loop bound to the `ppo` spec."""

from rl_training.runtime.train import trainer_for

train_ppo = trainer_for("ppo")

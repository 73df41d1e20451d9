"""Train DQN: the shared loop bound to the `dqn` spec."""

from rl_training.runtime.train import trainer_for

train_dqn = trainer_for("dqn")

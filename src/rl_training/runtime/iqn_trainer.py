"""Train IQN: the shared loop bound to the `iqn` spec."""

from rl_training.runtime.train import trainer_for

train_iqn = trainer_for("iqn")

"""Train IQL: the shared loop bound to the `iql` spec."""

from rl_training.runtime.train import trainer_for

train_iql = trainer_for("iql")

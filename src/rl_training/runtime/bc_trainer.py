"""Train behaviour cloning: the shared loop bound to the `bc` spec."""

from rl_training.runtime.train import trainer_for

train_bc = trainer_for("bc")

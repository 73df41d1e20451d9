"""Train GAIL: the shared loop bound to the `gail` spec."""

from rl_training.runtime.train import trainer_for

train_gail = trainer_for("gail")

"""Train SAC: the shared loop bound to the `sac` spec."""

from rl_training.runtime.train import trainer_for

train_sac = trainer_for("sac")

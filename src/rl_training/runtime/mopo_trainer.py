"""Train MOPO: the shared loop bound to the `mopo` spec."""

from rl_training.runtime.train import trainer_for

train_mopo = trainer_for("mopo")

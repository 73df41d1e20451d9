"""Train FQF: the shared loop bound to the `fqf` spec."""

from rl_training.runtime.train import trainer_for

train_fqf = trainer_for("fqf")

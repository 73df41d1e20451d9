"""Train RLPD: the shared loop bound to the `rlpd` spec."""

from rl_training.runtime.train import trainer_for

train_rlpd = trainer_for("rlpd")

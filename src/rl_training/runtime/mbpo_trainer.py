"""Train MBPO: the shared loop bound to the `mbpo` spec."""

from rl_training.runtime.train import trainer_for

train_mbpo = trainer_for("mbpo")

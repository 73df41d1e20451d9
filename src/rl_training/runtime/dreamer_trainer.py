"""Train Dreamer: the shared loop bound to the `dreamer` spec."""

from rl_training.runtime.train import trainer_for

train_dreamer = trainer_for("dreamer")

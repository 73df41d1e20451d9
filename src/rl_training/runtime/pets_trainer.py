"""Train PETS: the shared loop bound to the `pets` spec."""

from rl_training.runtime.train import trainer_for

train_pets = trainer_for("pets")

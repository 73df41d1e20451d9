"""Train TD3+BC: the shared loop bound to the `td3_bc` spec."""

from rl_training.runtime.train import trainer_for

train_td3_bc = trainer_for("td3_bc")

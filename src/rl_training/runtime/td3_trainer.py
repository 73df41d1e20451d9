"""Train TD3: the shared loop bound to the `td3` spec."""

from rl_training.runtime.train import trainer_for

train_td3 = trainer_for("td3")

"""Train QR-DQN: the shared loop bound to the `qr_dqn` spec."""

from rl_training.runtime.train import trainer_for

train_qr_dqn = trainer_for("qr_dqn")

"""Train CQL: the shared loop bound to the `cql` spec."""

from rl_training.runtime.train import trainer_for

train_cql = trainer_for("cql")

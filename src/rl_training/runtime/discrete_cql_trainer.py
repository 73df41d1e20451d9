"""Train discrete CQL: the shared loop bound to the `discrete_cql` spec."""

from rl_training.runtime.train import trainer_for

train_discrete_cql = trainer_for("discrete_cql")

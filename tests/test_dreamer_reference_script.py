"""The reference example of dreamer."""

from helpers.smoke import reference_script_test

test_dreamer_reference_script_runs = reference_script_test(
    "dreamer",
    "algo_kwargs.batch_size=4",
    "algo_kwargs.batch_length=8",
    "algo_kwargs.learning_starts=500",
    "algo_kwargs.imagination_horizon=3",
)

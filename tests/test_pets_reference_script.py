"""The reference example of pets."""

from helpers.smoke import reference_script_test

test_pets_reference_script_runs = reference_script_test(
    "pets",
    "algo_kwargs.planning_horizon=4",
    "algo_kwargs.planning_candidates=10",
    "algo_kwargs.planning_topk=4",
    "algo_kwargs.planning_iterations=2",
    "algo_kwargs.planning_particles=5",
    "algo_kwargs.model_updates_per_step=5",
)

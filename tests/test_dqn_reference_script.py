"""The reference example of dqn."""

from helpers.smoke import reference_script_test

test_dqn_reference_script_runs = reference_script_test("dqn")

"""The reference example of ppo."""

from helpers.smoke import reference_script_test

test_ppo_reference_script_runs = reference_script_test("ppo")

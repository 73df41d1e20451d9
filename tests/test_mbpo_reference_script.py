"""The reference example of mbpo."""

from helpers.smoke import reference_script_test

test_mbpo_reference_script_runs = reference_script_test("mbpo")

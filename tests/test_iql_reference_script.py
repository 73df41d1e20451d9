"""The reference example of iql."""

from helpers.smoke import reference_script_test

test_iql_reference_script_runs = reference_script_test("iql")

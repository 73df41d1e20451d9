"""The reference example of bc."""

from helpers.smoke import reference_script_test

test_bc_reference_script_runs = reference_script_test("bc")

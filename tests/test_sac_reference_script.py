"""The reference example of sac."""

from helpers.smoke import reference_script_test

test_sac_reference_script_runs = reference_script_test("sac")

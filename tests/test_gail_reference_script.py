"""The reference example of gail."""

from helpers.smoke import reference_script_test

test_gail_reference_script_runs = reference_script_test("gail")

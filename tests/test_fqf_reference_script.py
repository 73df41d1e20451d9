"""The reference example of fqf."""

from helpers.smoke import reference_script_test

test_fqf_reference_script_runs = reference_script_test("fqf")

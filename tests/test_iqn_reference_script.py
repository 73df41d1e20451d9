"""The reference example of iqn."""

from helpers.smoke import reference_script_test

test_iqn_reference_script_runs = reference_script_test("iqn")

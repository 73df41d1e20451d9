"""The reference example of td3_bc."""

from helpers.smoke import reference_script_test

test_td3_bc_reference_script_runs = reference_script_test("td3_bc")

"""The reference example of td3."""

from helpers.smoke import reference_script_test

test_td3_reference_script_runs = reference_script_test("td3")

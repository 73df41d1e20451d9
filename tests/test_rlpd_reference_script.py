"""The reference example of rlpd."""

from helpers.smoke import reference_script_test

test_rlpd_reference_script_runs = reference_script_test("rlpd")

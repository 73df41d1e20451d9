"""The reference example of qr_dqn."""

from helpers.smoke import reference_script_test

test_qr_dqn_reference_script_runs = reference_script_test("qr_dqn")

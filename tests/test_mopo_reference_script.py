"""The reference example of mopo."""

from helpers.smoke import reference_script_test

test_mopo_reference_script_runs = reference_script_test("mopo")

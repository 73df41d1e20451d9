"""The reference example of cql."""

from helpers.smoke import reference_script_test

test_cql_reference_script_runs = reference_script_test("cql")

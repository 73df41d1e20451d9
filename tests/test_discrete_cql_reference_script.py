"""The reference example of discrete_cql."""

from helpers.smoke import reference_script_test

test_discrete_cql_reference_script_runs = reference_script_test("discrete_cql")

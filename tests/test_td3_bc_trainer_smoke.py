"""`train_td3_bc` end to end."""

from helpers.smoke import trainer_test

test_td3_bc_trains_and_says_where_the_run_is = trainer_test("td3_bc")

"""`train_iqn` end to end."""

from helpers.smoke import trainer_test

test_iqn_trains_and_says_where_the_run_is = trainer_test("iqn")

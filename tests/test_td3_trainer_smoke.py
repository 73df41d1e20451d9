"""`train_td3` end to end."""

from helpers.smoke import trainer_test

test_td3_trains_and_says_where_the_run_is = trainer_test("td3")

"""`train_sac` end to end."""

from helpers.smoke import trainer_test

test_sac_trains_and_says_where_the_run_is = trainer_test("sac")

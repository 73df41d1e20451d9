"""`train_mopo` end to end."""

from helpers.smoke import trainer_test

test_mopo_trains_and_says_where_the_run_is = trainer_test("mopo")

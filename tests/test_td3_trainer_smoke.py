"""`train_td3` end to end."""

from __future__ import annotations

from pathlib import Path

from helpers.smoke import check_trainer


def test_td3_trains_and_says_where_the_run_is(tmp_path: Path) -> None:
    check_trainer("td3", tmp_path)

"""The reference example of dreamer."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.smoke import check_reference_script

SMALL = ("batch_size=4", "batch_length=8", "learning_starts=500", "imagination_horizon=3")


@pytest.mark.matrix
def test_dreamer_reference_script_runs(tmp_path: Path) -> None:
    settings = [f"--set=algo_kwargs.{setting}" for setting in SMALL]
    check_reference_script("dreamer", tmp_path, *settings, "--set=eval_episodes=2", "--episodes=2")

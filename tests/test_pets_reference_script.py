"""The reference example of pets."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.smoke import check_reference_script

SMALL = ("horizon=4", "candidates=10", "topk=4", "iterations=2", "particles=5")


@pytest.mark.matrix
def test_pets_reference_script_runs(tmp_path: Path) -> None:
    sizes = [f"--set=algo_kwargs.planning_{size}" for size in SMALL]
    rest = ["--set=algo_kwargs.model_updates_per_step=5", "--set=eval_episodes=1"]
    check_reference_script("pets", tmp_path, *sizes, *rest, "--episodes=1")

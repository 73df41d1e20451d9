"""The reference example of ppo."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.smoke import check_reference_script


@pytest.mark.matrix
def test_ppo_reference_script_runs(tmp_path: Path) -> None:
    check_reference_script("ppo", tmp_path)

"""The reference example of mbpo."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.smoke import check_reference_script


@pytest.mark.matrix
def test_mbpo_reference_script_runs(tmp_path: Path) -> None:
    check_reference_script("mbpo", tmp_path)

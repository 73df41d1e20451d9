"""The reference example of td3."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.smoke import check_reference_script


@pytest.mark.matrix
def test_td3_reference_script_runs(tmp_path: Path) -> None:
    check_reference_script("td3", tmp_path)

"""The reference example of td3_bc."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.smoke import check_reference_script


@pytest.mark.matrix
def test_td3_bc_reference_script_runs(tmp_path: Path) -> None:
    check_reference_script("td3_bc", tmp_path)

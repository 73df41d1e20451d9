"""The reference example of qr_dqn."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.smoke import check_reference_script


@pytest.mark.matrix
def test_qr_dqn_reference_script_runs(tmp_path: Path) -> None:
    check_reference_script("qr_dqn", tmp_path)

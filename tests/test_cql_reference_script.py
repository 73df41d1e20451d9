"""The reference example of cql."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.smoke import check_reference_script


@pytest.mark.matrix
def test_cql_reference_script_runs(tmp_path: Path) -> None:
    check_reference_script("cql", tmp_path)

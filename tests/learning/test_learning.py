"""Proof that the presets learn: three seeds, the last checkpoint, twenty fresh episodes.

`make learn` runs this, the quick gates of `bench/evidence/gates.py`; `make evidence` runs all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.evidence.__main__ import told
from bench.evidence.gates import DATA_VARIABLE, Gate, quick_gates
from bench.evidence.record import measure


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gate", quick_gates(), ids=lambda gate: gate.preset)
def test_three_seeds_reach_the_bar(gate: Gate, tmp_path: Path) -> None:
    named = os.environ.get(DATA_VARIABLE)
    data = Path(named).expanduser() if named else None
    reason = gate.missing(data)
    if reason is not None:
        pytest.skip(reason)
    record = measure(gate, tmp_path, data=data)
    print(told(gate, record))
    assert record.met, told(gate, record)

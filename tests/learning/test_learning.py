"""Proof that the presets learn: three of the ten reported seeds, the last checkpoint, 100 episodes.

`make learn` runs this, the quick gates of `bench/evidence/gates.py`, against the bar of the worst
seed.  Three seeds say little about an interquartile mean, so its bar is left to `make evidence`,
which runs all gates on all seeds.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from bench.evidence.__main__ import told
from bench.evidence.gates import DATA_VARIABLE, NUM_QUICK_SEEDS, Gate, quick_gates
from bench.evidence.record import measure


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gate", quick_gates(), ids=lambda gate: gate.preset)
def test_three_seeds_reach_the_bar_of_the_worst(gate: Gate, tmp_path: Path) -> None:
    named = os.environ.get(DATA_VARIABLE)
    data = Path(named).expanduser() if named else None
    reason = gate.missing(data)
    if reason is not None:
        pytest.skip(reason)
    # One thread each: two gates at a time keep two cores busier than one gate on both.
    three = replace(gate, seeds=gate.seeds[:NUM_QUICK_SEEDS])
    record = measure(three, tmp_path, data=data, circumstances=("threads=1",))
    print(told(record))
    assert all(seed.mean >= gate.bar for seed in record.seeds), told(record)

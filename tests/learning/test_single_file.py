"""Proof that the teaching scripts learn: three seeds each, to the bar of their methods' gates."""

from __future__ import annotations

import pytest
from bench.evidence.gates import QUICK_SEEDS
from bench.evidence.single_file import PRESETS, gate_of, returns_of


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("script", PRESETS)
def test_three_seeds_of_a_script_reach_the_bar_of_the_worst(script: str) -> None:
    gate = gate_of(script)
    means = [returns_of(script, seed, gate.episodes)[0] for seed in QUICK_SEEDS]
    assert min(means) >= gate.bar, f"{script}.py: {means}, and {gate.preset} demands {gate.bar}"

"""What fault tests share: settings of the long form, the table they print, states of runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_training.experiment.checkpointing import load_checkpoint, resolve_checkpoint

PROPERTY = "fault table"
Tried = Callable[[str, str, int, int], None]
"""Enter a line into the table: test, algorithm, count tried, failures."""


def setting(name: str, default: int) -> int:
    """A number of the long form, from the environment."""
    return int(os.environ.get(f"RL_FAULTS_{name}", default))


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Tried:
    """Enter what was tried, before asserting that nothing failed."""

    def enter(test: str, algo: str, count: int, failures: int) -> None:
        record_property(PROPERTY, [test, algo, count, failures])

    return enter


def final_state(run: Path) -> dict[str, Any]:
    """All that the newest checkpoint holds, rows of the replay included."""
    loaded = load_checkpoint(resolve_checkpoint(run))
    rows = {
        f"{table.name} rows": [dict(part) for _, part in loaded.read_segments(table.name)]
        for table in loaded.manifest.segments
    }
    return {**loaded.states, **rows}


def log_lines(run: Path) -> list[dict[str, Any]]:
    """The metrics without what is measured by the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a state that is no mapping and no list."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*path, key))]
    if isinstance(tree, list):
        return [leaf for i, value in enumerate(tree) for leaf in leaves(value, (*path, i))]
    return [path]

"""Files of records: CSV with one number a row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rl_training.output_files import written_beside

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """Return the rows of a file of records; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a file of records, whole or not at all."""
    with written_beside(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without its empty columns; bars in cells are kept as text."""
    full = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    chosen = [[line[place] for place in full] for line in (columns, *rows)]
    lines = [chosen[0], ["---"] * len(full), *chosen[1:]]
    escaped = [[" ".join(cell.split()).replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)

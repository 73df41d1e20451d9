"""The sourcebook names every method, and says of their observations what they declare."""

from __future__ import annotations

import re

import pytest

from helpers.tiny import ROOT
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec

TEXT = (ROOT / "docs/sourcebook.md").read_text()
TABLE = [line for line in TEXT.splitlines() if re.match(r"\| (19|20)\d\d", line)]


def rows_of(method: str) -> list[str]:
    """Return the rows whose method is this one, not those that are a setting of it."""
    link = re.compile(rf"implemented(, \[page\]| as \[).*\(algorithms/{method}\.md\)")
    return [row for row in TABLE if link.search(row)]


@pytest.mark.parametrize("method", algorithm_names())
def test_every_method_has_its_row_with_its_paper_and_what_it_observes(method: str) -> None:
    rows = rows_of(method)
    assert rows, f"docs/sourcebook.md has no row of {method}"
    spec = get_algorithm_spec(method)
    if (
        method != "recurrent_ppo"
    ):  # a study's, where the method is listed; PPO's, where it is declared
        assert any(spec.paper.partition(":")[2] in row for row in rows), spec.paper
    for row in rows:
        takes_images = "image" in spec.leaf_kinds
        if "vectors" in row:
            assert ("dictionaries" in row) == takes_images, row
            assert ("images" in row) == (3 in spec.obs_ndims), row


def test_every_year_has_its_words_and_rows_are_in_order() -> None:
    years = re.findall(r"^### (\d{4})$", TEXT, re.MULTILINE)
    assert years == [str(year) for year in range(2013, 2027)]
    first = [int(row[2:6]) for row in TABLE]
    assert first == sorted(first)


def test_what_was_promised_stands_under_its_wave() -> None:
    assert any(row.startswith("| 2018 | PETS (the planning wave) |") for row in TABLE)
    assert any(row.startswith("| 2022-23 | RLPD ") for row in TABLE)


def test_a_link_to_a_paper_shows_its_own_number() -> None:
    links = re.findall(r"\[arXiv:(\d{4}\.\d{4,5})\]\(https://arxiv\.org/abs/([\d.]+)\)", TEXT)
    assert len(links) > 60
    assert all(shown == target for shown, target in links)
    assert not re.search(r"AX\d", TEXT)

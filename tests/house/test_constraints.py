"""The pinned versions: one for each package on each Python that we support."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.tiny import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line]


def pins_on(python: str) -> dict[str, str]:
    """The versions that are pinned on a Python, by canonical name."""
    pins: dict[str, str] = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            name = canonicalize_name(pin.name)
            assert name not in pins, f"{name} is pinned twice on Python {python}"
            pins[name] = str(pin.specifier).removeprefix("==")
    return pins


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_within_its_bounds(python: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    pins = pins_on(python)
    for line in re.findall(r'"([^"]+)"', block[1]):
        needed = Requirement(line)
        assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), line


def test_supported_pythons_are_said_the_same_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"Python :: (3\.\d+)", text) == list(PYTHONS)
    assert f'requires-python = ">={PYTHONS[0]}"' in text
    assert f'target-version = "py{PYTHONS[0].replace(".", "")}"' in text
    for page in ("README.md", "docs/quickstart.md"):
        assert f"Python {PYTHONS[0]} or newer" in (ROOT / page).read_text()

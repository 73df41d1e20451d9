"""Which page is in which part of the navigation.

Parts are filled from folders, so a new page needs no entry: its title is its first heading, and a
page that no list below names comes after those that are named, by its title.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.cli.tables import FAMILIES, method_kind

METHODS = "algorithms"
GUIDES = "guides"
REFERENCE = "reference"

START = ("index", "quickstart", "python", "from_sb3", "from_d3rlpy", "from_cleanrl")
HOW_TO = (
    "environments",
    "spaces",
    "callbacks",
    "goals",
    "datasets",
    "offline_to_online",
    "offline_evaluation",
    "seeds",
    "sweeps",
    "checkpoints",
    "reports",
    "trackers",
    "deployment",
    "zoo",
)
"""Pages beside the folder of guides that belong to them; unknown pages of `docs/` join them."""
FIRST_GUIDES = (
    "own_environment",
    "custom_networks",
    "images_and_dictionaries",
    "atari",
    "many_seeds",
    "offline_from_your_data",
    "imitation",
    "model_based",
    "gpu_speed",
    "compiled_updates",
    "ray_cluster",
    "preemption",
    "reading_the_report",
    "adding_a_method",
)
EVIDENCE = ("results", "benchmarks", "performance", "reliability", "sourcebook")
REFERENCE_FIRST = ("configuration", "methods")
INSIDE = ("architecture", "contributing", "releasing", "security", "changelog")
PLACED = {*START, *HOW_TO, *EVIDENCE, *REFERENCE_FIRST, *INSIDE}

OTHERS = "Others"
"""Methods of no family that we name."""


@dataclass(frozen=True)
class Entry:
    """One line of the navigation: a page, or a part with entries of its own."""

    title: str
    target: str | tuple[Entry, ...]

    def toml(self) -> str:
        """Write it as the generator reads it."""
        return f"{{ {json.dumps(self.title)} = {_value(self.target)} }}"


def _value(target: str | tuple[Entry, ...]) -> str:
    if isinstance(target, str):
        return json.dumps(target)
    return f"[{', '.join(entry.toml() for entry in target)}]"


def toml(entries: Iterable[Entry]) -> str:
    """Write the navigation as the value of the generator's `nav`."""
    return _value(tuple(entries))


def pages_of(entries: Iterable[Entry]) -> list[str]:
    """Return the pages of a navigation, in its order."""
    pages = []
    for entry in entries:
        pages += [entry.target] if isinstance(entry.target, str) else pages_of(entry.target)
    return pages


def navigation(folder: Path, generated: Sequence[str], summaries: Mapping[str, str]) -> list[Entry]:
    """Return the navigation of the pages in a folder.

    Args:
        folder: Where the pages are staged.
        generated: The pages among them that were made from the code, in their order.
        summaries: What each method says of itself, by name.
    """
    top = {page.stem for page in folder.glob("*.md")}
    reference = tuple(_entry(folder, page) for page in generated if page.startswith(REFERENCE))
    parts = [
        Entry("Start", _named(folder, START, top)),
        Entry("Guides", _guides(folder, top)),
        Entry("Methods", _methods(folder, summaries)),
        Entry("Evidence", _named(folder, EVIDENCE, top)),
        Entry("Reference", _named(folder, REFERENCE_FIRST, top) + reference),
        Entry("Inside", _named(folder, INSIDE, top)),
    ]
    return [part for part in parts if part.target]


def family_of(summary: str) -> str:
    """Return the family of a method by its summary."""
    return FAMILIES.get(method_kind(summary), OTHERS)


def title_of(page: Path) -> str:
    """Return the first heading of a page, as plain text.

    Raises:
        ValueError: When there is none.
    """
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if heading is None:
        raise ValueError(f"{page} has no heading; its first line must be `# Title`")
    return re.sub(r"[`*]", "", heading[1]).strip()


def _named(folder: Path, names: Iterable[str], there: set[str]) -> tuple[Entry, ...]:
    return tuple(_entry(folder, f"{name}.md") for name in names if name in there)


def _entry(folder: Path, page: str) -> Entry:
    return Entry("Home" if page == "index.md" else title_of(folder / page), page)


def _guides(folder: Path, top: set[str]) -> tuple[Entry, ...]:
    guides = {page.stem for page in (folder / GUIDES).glob("*.md")}
    first = [f"{GUIDES}/{name}.md" for name in FIRST_GUIDES if name in guides]
    others = [f"{GUIDES}/{name}.md" for name in guides.difference(FIRST_GUIDES)]
    others += [f"{name}.md" for name in top - PLACED]
    listed = [_entry(folder, page) for page in first]
    listed += sorted((_entry(folder, page) for page in others), key=lambda entry: entry.title)
    return tuple(listed) + _named(folder, HOW_TO, top)


def _methods(folder: Path, summaries: Mapping[str, str]) -> tuple[Entry, ...]:
    families: dict[str, list[Entry]] = {name: [] for name in (*FAMILIES.values(), OTHERS)}
    for page in sorted((folder / METHODS).glob("*.md")):
        if page.stem != "index":
            entry = _entry(folder, f"{METHODS}/{page.name}")
            families[family_of(summaries.get(page.stem, ""))].append(entry)
    parts = [Entry(name, tuple(entries)) for name, entries in families.items() if entries]
    return (_entry(folder, f"{METHODS}/index.md"), *parts)

"""All pages of the site as Markdown in one folder: from `docs/`, and from the code."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from scripts.docs_site import layout
from scripts.docs_site.commands_reference import commands_page
from scripts.docs_site.markdown import Links, with_bars, with_mathml
from scripts.docs_site.methods_reference import classes_page, overview_page
from scripts.docs_site.public_names import PAGES
from scripts.docs_site.reference import index_page, page_text
from scripts.docs_site.settings_reference import run_page, settings_page

from rl_training.experiment.registry import algorithm_summaries

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOP_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages at the top of the repository, by their places on the site."""
CONFIG = "zensical.toml"
ADDRESSES = {"Repository": "repo_url", "Documentation": "site_url"}
"""Names in `[project.urls]` of `pyproject.toml`, by the generator's settings."""
RECORDS = ("*.json", "*.jsonl")
"""Files beside the pages that only programs read."""


def stage(target: Path) -> list[layout.Entry]:
    """Write everything that the generator reads, and return the navigation.

    Args:
        target: A folder, which is emptied first.

    Raises:
        ValueError: When a page has no heading, or links to a file that is not there.
    """
    shutil.rmtree(target, ignore_errors=True)
    pages = target / "pages"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns(*RECORDS))
    shutil.copytree(HERE / "assets", pages / "assets", dirs_exist_ok=True)
    shutil.copytree(HERE / "theme", target / "theme")
    for source, page in TOP_PAGES.items():
        shutil.copy(ROOT / source, pages / page)
    _write_for_the_site(pages)
    generated = generated_pages()
    for name, text in generated.items():
        if not (pages / name).exists():
            _write(pages / name, with_bars(text))
    summaries = {one.name: one.summary for one in algorithm_summaries()}
    navigation = layout.navigation(pages, list(generated), summaries)
    _write(target / CONFIG, config_text(navigation))
    return navigation


def _write_for_the_site(pages: Path) -> None:
    """Write formulas and links of the pages in a folder as the site needs them."""
    staged = {path.relative_to(pages).as_posix() for path in pages.rglob("*") if path.is_file()}
    links = Links(ROOT, staged, TOP_PAGES)
    sources = {page: source for source, page in TOP_PAGES.items()}
    for path in pages.rglob("*.md"):
        page = path.relative_to(pages).as_posix()
        source = sources.get(page, f"docs/{page}")
        text = links.rewritten(path.read_text(encoding="utf-8"), source, page)
        _write(path, with_bars(with_mathml(text)))


def generated_pages() -> dict[str, str]:
    """Return the pages made from the code, those of the reference in their order."""
    reference = {
        "train_config": run_page(),
        "settings": settings_page(),
        "command_line": commands_page(),
        "index": index_page(PAGES),
        "methods": classes_page(),
    }
    reference |= {page.name: page_text(page) for page in PAGES}
    named = {f"{layout.REFERENCE}/{name}.md": text for name, text in reference.items()}
    return named | {f"{layout.METHODS}/index.md": overview_page()}


def config_text(navigation: list[layout.Entry]) -> str:
    """Return the generator's configuration with the navigation and what `pyproject.toml` says."""
    lines = [f"nav = {layout.toml(navigation)}"]
    urls = project().get("urls", {})
    lines += [
        f"{key} = {json.dumps(urls[name])}" for name, key in ADDRESSES.items() if name in urls
    ]
    return (HERE / CONFIG).read_text(encoding="utf-8").replace("# nav", "\n".join(lines), 1)


def project() -> dict[str, Any]:
    """Return the project's table of `pyproject.toml`."""
    table: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return table["project"]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

"""The documentation site: every page is in it, and links that leave it become names."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType
from typing import Any

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import get_files
from mkdocs.structure.pages import Page

from helpers.tiny import ROOT
from rl_training.experiment.registry import algorithm_names


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts/docs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site() -> tuple[Any, Any]:
    """Configuration and files as a build has them; the hooks are named in the configuration."""
    config: Any = load_config(str(ROOT / "mkdocs.yml"))
    config = config.plugins.on_config(config)
    return config, config.plugins.on_files(get_files(config), config=config)


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_every_page_stands_in_the_navigation_once(site: tuple[Any, Any]) -> None:
    config, files = site
    listed = pages_of(config.nav)
    assert len(set(listed)) == len(listed)
    assert {f"algorithms/{name}.md" for name in algorithm_names()} <= set(listed)
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == there | {"contributing.md", "changelog.md", "api.md"}
    assert all(files.get_file_from_path(page) for page in listed)


def test_links_that_leave_the_site_become_names(hooks: ModuleType, site: tuple[Any, Any]) -> None:
    config, files = site
    page = Page(None, files.get_file_from_path("algorithms/sac.md"), config)
    text = (
        "[a](../seeds.md#grids) [sac.py](../../src/rl_training/algorithms/sac.py) "
        "[b](https://x.y) [how](../../CONTRIBUTING.md)\n```\n[c](../../src)\n```\n"
    )
    assert hooks.on_page_markdown(text, page, config, files) == (
        "[a](../seeds.md#grids) `sac.py` [b](https://x.y) [how](../contributing.md)\n"
        "```\n[c](../../src)\n```\n"
    )


def test_the_api_page_describes_what_people_call(hooks: ModuleType) -> None:
    page = hooks.api_page()
    for name in ("Agent", "train", "load_agent", "export_agent", "interquartile_mean"):
        assert f"## `{name}`" in page
    assert "- `path`: Where it is; `hf://user/name` is on the Hugging Face Hub." in page
    assert not re.search(r"0x[0-9a-f]{6}", page)


def test_nothing_comes_from_the_network(site: tuple[Any, Any]) -> None:
    config, _ = site
    assert not config.extra_javascript
    assert config.theme["font"] is False


def test_formulas_become_mathml(hooks: ModuleType) -> None:
    text = 'a <span class="arithmatex">\\(x &lt; 1\\)</span> b'
    made = hooks.on_page_content(text, page=None, config=None, files=None)
    assert made.startswith("a <math ")
    assert made.endswith("</math> b")
    assert "<mi>x</mi><mo>&#x0003C;</mo><mn>1</mn>" in made

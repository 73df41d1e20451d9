"""The documentation site: every page is in it, and it needs nothing but itself."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
from html import unescape
from pathlib import Path

import pytest
from scripts.docs_site import layout, stage
from scripts.docs_site.__main__ import build
from scripts.docs_site.check import mistakes
from scripts.docs_site.docstrings import as_markdown
from scripts.docs_site.layout import Entry, pages_of
from scripts.docs_site.markdown import Links, with_bars, with_mathml
from scripts.docs_site.reference import code_of
from scripts.docs_site.settings_reference import bounds, settings_classes

import rl_training
from helpers.browser import find_browser
from helpers.tiny import ROOT
from rl_training import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec

PACKAGES = (
    "rl_training",
    "rl_training.data",
    "rl_training.envs",
    "rl_training.experiment.checkpointing",
    "rl_training.models",
    "rl_training.runtime",
)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Entry]]:
    """The staged pages and their navigation."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    return folder, stage.stage(folder)


def headings(page: Path) -> set[str]:
    return set(re.findall(r"^#+ `([\w.]+)`$", page.read_text(), re.MULTILINE))


def keys(text: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_every_page_is_in_the_navigation_once(staged: tuple[Path, list[Entry]]) -> None:
    folder, navigation = staged
    pages = folder / "pages"
    listed = pages_of(navigation)
    assert len(set(listed)) == len(listed)
    assert set(listed) == {page.relative_to(pages).as_posix() for page in pages.rglob("*.md")}
    assert {f"algorithms/{name}.md" for name in algorithm_names()} < set(listed)
    titles = [entry.title for entry in navigation]
    assert titles == ["Start", "Guides", "Methods", "Evidence", "Reference", "Inside"]


def test_a_new_page_needs_no_entry(tmp_path: Path) -> None:
    for name in ("index", "seeds", "surprise", "guides/your_method", "guides/own_environment"):
        page = tmp_path / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"# The `title` of {page.stem}\n")
    (tmp_path / "algorithms").mkdir()
    for name in ("index", "new"):
        (tmp_path / f"algorithms/{name}.md").write_text(f"# {name.upper()}\n")
    start, guides, methods, *_ = layout.navigation(tmp_path, [], {"new": "offline; a try"})
    assert pages_of([start]) == ["index.md"]
    assert pages_of([guides]) == [
        *("guides/own_environment.md", "surprise.md", "guides/your_method.md", "seeds.md"),
    ]
    assert guides.target[1] == Entry("The title of surprise", "surprise.md")
    assert methods.target == (
        Entry("INDEX", "algorithms/index.md"),
        Entry("From recorded data", (Entry("NEW", "algorithms/new.md"),)),
    )


def test_a_page_without_a_heading_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("## Too deep\n")
    with pytest.raises(ValueError, match=r"page.md has no heading; its first line must be"):
        layout.title_of(page)


def test_every_method_has_a_family() -> None:
    spoken_for = {get_algorithm_spec(name).summary for name in algorithm_names()}
    assert "Others" not in {layout.family_of(summary) for summary in spoken_for}
    assert layout.family_of(get_algorithm_spec("mopo").summary) == "Learned dynamics"


def test_links_stay_in_the_site_or_become_names() -> None:
    pages = {"seeds.md", "algorithms/sac.md", "contributing.md", "evidence/a.svg"}
    links = Links(ROOT, pages, {"CONTRIBUTING.md": "contributing.md"})
    text = (
        "[a](../seeds.md#grids) [`sac.py`](../../src/rl_training/algorithms/sac.py) "
        "[the zoo](../../zoo/README.md) [examples/plugin](../../examples/plugin) "
        "[b](https://x.y) ![c](../evidence/a.svg) [how](../../CONTRIBUTING.md#x) `[d](e)`\n"
        "```\n[f](../../src)\n```\n"
    )
    assert links.rewritten(text, "docs/algorithms/sac.md", "algorithms/sac.md") == (
        "[a](../seeds.md#grids) `sac.py` the zoo `examples/plugin` "
        "[b](https://x.y) ![c](../evidence/a.svg) [how](../contributing.md#x) `[d](e)`\n"
        "```\n[f](../../src)\n```\n"
    )
    moved = links.rewritten("[a](docs/seeds.md)", "CONTRIBUTING.md", "contributing.md")
    assert moved == "[a](seeds.md)"
    with pytest.raises(ValueError, match=r"links to docs/none.md, which is not there"):
        links.rewritten("[a](none.md)", "docs/seeds.md", "seeds.md")


def test_formulas_become_mathml() -> None:
    made = with_mathml("for $x < 1$, but `$x$`:\n\n$$a_1 * b$$\n\n```\n$x$\n```\n")
    assert made.startswith("for <span><math ")
    assert "<mi>x</mi><mo>&#x0003C;</mo><mn>1</mn>" in made
    assert "but `$x$`:\n\n<math " in made
    assert 'display="block"' in made
    assert not re.search(r"[*_]", made), "Markdown would read these as emphasis"
    assert made.endswith("\n\n```\n$x$\n```\n")


def test_bars_in_code_in_tables_have_no_backslash() -> None:
    row = r"| `int \| None` | a \| b |"
    assert with_bars(f"{row}\n`a \\| b`\n") == r"| `int | None` | a \| b |" + "\n`a \\| b`\n"


def test_money_and_shell_variables_are_no_formulas() -> None:
    text = "between $5 and $10, in $HOME and $PATH"
    assert with_mathml(text) == text


def test_every_public_name_has_a_section(staged: tuple[Path, list[Entry]]) -> None:
    pages = staged[0] / "pages" / "reference"
    there = set().union(*(headings(page) for page in pages.glob("*.md")))
    for package in PACKAGES:
        names = importlib.import_module(package).__all__
        missing = {name for name in names if not name.startswith("__")} - there - {"TrainConfig"}
        assert not missing, f"{package}: {sorted(missing)}"
    methods = (pages / "methods.md").read_text()
    for name in dir(rl_training):
        public = not name.startswith("_") and inspect.isclass(getattr(rl_training, name))
        assert not public or name in there or f"`{name}`" in methods or name == "TrainConfig", name


def test_a_section_has_signature_types_and_lists(staged: tuple[Path, list[Entry]]) -> None:
    text = (staged[0] / "pages/reference/runs.md").read_text()
    section = text[text.index("## `load_agent`") : text.index("## `LoadedAgent`")]
    assert "from rl_training.runtime.workflows import load_agent" in section
    assert "Source: `src/rl_training/runtime/workflows.py`" in section
    assert '    device: str = "auto",\n' in section
    assert ") -> LoadedAgent\n" in section
    assert "**Args**\n\n- `path`: Where it is; `hf://user/name` is on the Hugging Face" in section
    assert "**Raises**\n\n- `CheckpointError`: " in section
    for page in (staged[0] / "pages/reference").glob("*.md"):
        assert not re.search(r"0x[0-9a-f]{6}|<factory>|<class ", page.read_text()), page


def test_every_setting_is_on_the_pages_with_its_bounds(staged: tuple[Path, list[Entry]]) -> None:
    pages = staged[0] / "pages" / "reference"
    run = (pages / "train_config.md").read_text()
    assert set(TrainConfig.model_fields) <= keys(run)
    settings = (pages / "settings.md").read_text()
    for name in algorithm_names():
        config_class = get_algorithm_spec(name).config_class
        assert set(config_class.model_fields) <= keys(settings)
        assert f"`{config_class.__name__}`" in settings
    assert {model.__name__ for model in settings_classes()} == headings(pages / "settings.md")
    assert "| `gamma` | float | `0.99` | `>= 0`, `<= 1` | Discount per environment" in settings
    assert bounds(TrainConfig.model_fields["threads"]) == "`>= 0`, `<= 1024`"
    assert bounds(TrainConfig.model_fields["checkpoint_minutes"]) == "`> 0`"


def test_every_command_is_on_the_page(staged: tuple[Path, list[Entry]]) -> None:
    text = (staged[0] / "pages/reference/command_line.md").read_text()
    commands = set(re.findall(r"^## `([\w -]+)`$", text, re.MULTILINE))
    assert {"train", "resume", "eval", "data make", "zoo eval"} <= commands
    assert "rl-training resume [OPTIONS] [RUN]" in text
    assert "| `--set KEY=VALUE`, `-s KEY=VALUE` |" in text


def test_docstrings_keep_what_markdown_would_change() -> None:
    """The line under this one is a list in Markdown."""

    def example(first: int, *, second: str = "a", **others: object) -> None: ...

    text = "Do *args* of <b>.\n\nArgs:\n    first: One\n        more.\n    **others: Rest.\n"
    assert as_markdown(text) == (
        r"Do \*args* of &lt;b>."
        + "\n\n\n**Args**\n\n- `first`: One\n    more.\n- `**others`: Rest."
    )
    assert code_of("f", example) == (
        'f(first: int, *, second: str = "a", **others: object) -> None'
    )


def test_addresses_come_from_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = [Entry('A "title"', "index.md")]
    text = stage.config_text(entry)
    assert 'nav = [{ "A \\"title\\"" = "index.md" }]' in text
    assert "repo_url" not in text, "no address of the repository is known"
    urls = {"Repository": "https://host/rl", "Documentation": "https://docs/rl"}
    monkeypatch.setattr(stage, "project", lambda: {"urls": urls})
    text = stage.config_text(entry)
    assert 'repo_url = "https://host/rl"\nsite_url = "https://docs/rl"\n' in text


GOOD = (
    '<link rel="canonical" href="https://x.y"><h1 id="top">1. T</h1><a href="#top">1. T</a>'
    "<p><b>1. Say</b> a - b\n<code>- [x](y)</code> of $5</p>"
)
WRONG = {
    '<a href="none.html">a</a>': "links to none.html, which is not there",
    '<a href="page.html#none">a</a>': "links to page.html#none, which has no such heading",
    '<a href="">a</a>': "links to nothing",
    '<img src="none.png">': "links to none.png, which is not there",
    '<script src="https://cdn/x.js"></script>': "loads https://cdn/x.js",
    '<link rel="stylesheet" href="//cdn/x.css">': "loads //cdn/x.css",
    '<img src="http://cdn/x.png">': "loads http://cdn/x.png",
    "<style>@import 'https://cdn/x.css';</style>": "loads https://cdn/x.css",
    '<p style="background: url(https://cdn/x.png)">a</p>': "loads https://cdn/x.png",
    '<pre class="mermaid">a</pre>': "has mermaid, for which the theme fetches something",
    '<source srcset="none.png 2x, https://cdn/x.png">': "loads https://cdn/x.png",
    "<p>text\n- one\n- two</p>": "shows Markdown: - one",
    "<p>see [a](b.md)</p>": "shows Markdown: ](b.md)",
    r"<p>with $\alpha</p>": r"shows Markdown: $\alpha",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_built_page_is_found(wrong: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(GOOD)
    assert mistakes(tmp_path) == []
    page.write_text(GOOD + wrong)
    assert f"page.html: {WRONG[wrong]}" in mistakes(tmp_path)


def test_stylesheets_load_nothing_either(tmp_path: Path) -> None:
    sheet = tmp_path / "site.css"
    sheet.write_text("a { background: url('data:image/svg+xml,<svg xmlns=\"http://w3\"/>') }")
    assert mistakes(tmp_path) == []
    sheet.write_text("@font-face { src: url(https://fonts/x.woff2) }")
    assert mistakes(tmp_path) == ["site.css: loads https://fonts/x.woff2"]


@pytest.fixture
def small_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a repository with a few pages; a site built now is made of these."""
    (tmp_path / "docs" / "algorithms").mkdir(parents=True)
    (tmp_path / "docs/index.md").write_text("# Home\n\n[SAC](algorithms/sac.md#idea): $x^2$.\n")
    (tmp_path / "docs/algorithms/sac.md").write_text("# SAC\n\n## Idea\n\nA `code` word.\n")
    for name in stage.TOP_PAGES:
        (tmp_path / name).write_text(f"# {name}\n\n[home](docs/index.md)\n")
    urls = {"Repository": "https://github.com/someone/rl"}
    pages = {"algorithms/index.md": "# All methods\n", "reference/index.md": "# API\n"}
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    monkeypatch.setattr(stage, "project", lambda: {"urls": urls})
    monkeypatch.setattr(stage, "generated_pages", lambda: pages)
    return tmp_path


def test_a_site_is_built_and_a_dead_link_stops_it(
    small_site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site = small_site / "site"
    assert build(small_site / "staged", site) == 0, capfd.readouterr().err
    home = (site / "index.html").read_text()
    assert "<math " in home
    assert re.search(r'href="(\./)?algorithms/sac\.html#idea"', home)
    assert "slate" in home, "there is a dark mode"
    assert 'href="https://github.com/someone/rl"' in home

    page = small_site / "docs/index.md"
    page.write_text(page.read_text().replace("#idea", "#ideas"))
    assert build(small_site / "staged", site) != 0
    assert "anchor does not exist" in capfd.readouterr().err
    assert (site / "index.html").read_text() == home, "a site that works stays"


CATCH = """<head><meta http-equiv="Content-Security-Policy"
  content="default-src file: data: 'unsafe-inline'"><script>
window.refused = [];
addEventListener("securitypolicyviolation", (e) => refused.push(e.blockedURI));
</script>"""
ASK = """<img src="https://elsewhere.invalid/probe.png"><script src="search.js"></script><script>
addEventListener("load", () => {
  const worker = new Worker("assets/javascripts/workers/%s");
  worker.onmessage = (e) => {
    document.documentElement.dataset.answer = JSON.stringify([e.data, refused]);
  };
  worker.postMessage({ type: 0, data: __index });
});
</script></body>"""
"""Gives the index to the theme's search, which answers with a message of type 1."""


@pytest.mark.matrix
def test_pages_on_disk_can_be_searched_without_the_network(small_site: Path) -> None:
    site = small_site / "site"
    assert build(small_site / "staged", site) == 0
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.js")
    home = site / "index.html"
    text = home.read_text().replace("<head>", CATCH, 1)
    home.write_text(text.replace("</body>", ASK % worker.name, 1))
    command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={small_site / 'profile'}", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, home.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    found = re.search(r'data-answer="([^"]*)"', done.stdout)
    assert found is not None, "the search did not answer"
    message, refused = json.loads(unescape(found[1]))
    assert message == {"type": 1}
    assert refused == ["https://elsewhere.invalid/probe.png"], "the page wants only the probe's"

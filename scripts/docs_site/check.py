"""What must hold of the built site: no dead link, nothing from the network, no Markdown left over.

The generator checks links between pages; this checks what a browser will load and follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "img": ("src",),
    "input": ("src",),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src",),
    "track": ("src",),
    "video": ("src", "poster"),
}
"""Attributes by which a page loads something, by element."""
NOT_LOADED = ("alternate", "canonical", "next", "prev")
"""What a `link` may be without loading anything."""
FETCHING = ("mermaid", "glightbox", "pyodide", "md-component-source")
"""Classes for which the theme's script fetches a library."""
SKIP = "#__skip"
"""The theme's link past the navigation, which a page without headings cannot have."""
_ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_CSS = re.compile(r"@import\s+(?:url\()?\s*[\"']?([^\"')\s;]+)|url\(\s*[\"']?([^\"')\s]+)")
_LEFT_OVER = re.compile(
    r"(?<=\n)(?:[-*] |1\. |\| ?-|#{1,6} |> )|```|\]\([\w./#-]+\)|\$[^$\n]*\\[a-z]+"
)
"""In a paragraph: a list, table, heading, quotation or block that is not one; a link; a formula."""


def mistakes(site: Path) -> list[str]:
    """Return a sentence for everything that is wrong in a built site."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        wrong = [*_from_the_network(page), *_left_over(page)]
        wrong += [problem for link in page.links if (problem := _dead(link, path, site, pages))]
        found += [f"{name}: {sentence}" for sentence in wrong]
    for path in sorted(site.rglob("*.css")):
        loads = _loads_of(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site).as_posix()}: loads {url}" for url in loads]
    return found


@dataclass
class _Page(HTMLParser):
    """What a page loads, links to and can be linked at."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in an element."""
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        self.classes |= set(values.get("class", "").split())
        self.styles.append(values.get("style", ""))
        if values.get("data-md-component") == "source":  # asks a host for figures
            self.classes.add("md-component-source")
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and set(values.get("rel", "").split()) & set(NOT_LOADED):
            self.links.append(values.get("href", ""))
        else:
            urls = [values[key] for key in LOADED.get(tag, ()) if key in values]
            urls += [
                part.split()[0] for part in values.get("srcset", "").split(",") if part.split()
            ]
            self.loads += urls
            self.links += urls
        if tag in ("code", "math", "p", "pre", "script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        if tag in self.inside:
            self.inside.remove(tag)

    def handle_data(self, data: str) -> None:
        """Take in text of paragraphs, and styles."""
        if "style" in self.inside:
            self.styles.append(data)
        elif self.inside[-1:] == ["p"]:
            self.texts.append(data)


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _from_the_network(page: _Page) -> list[str]:
    loads = [url for url in page.loads if _ELSEWHERE.match(url)]
    loads += [url for style in page.styles for url in _loads_of(style)]
    fetching = sorted(page.classes & set(FETCHING))
    return [f"loads {url}" for url in loads] + [
        f"has {name}, for which the theme fetches something" for name in fetching
    ]


def _loads_of(css: str) -> list[str]:
    urls = (match[1] or match[2] for match in _CSS.finditer(css))
    return [url for url in urls if _ELSEWHERE.match(url)]


def _left_over(page: _Page) -> list[str]:
    """Return what Markdown did not take as what it was meant to be."""
    places = ((text, match.start()) for text in page.texts for match in _LEFT_OVER.finditer(text))
    lines = dict.fromkeys(text[place:].split("\n")[0] for text, place in places)
    return [f"shows Markdown: {line[:80]}" for line in lines]


def _dead(link: str, path: Path, site: Path, pages: dict[Path, _Page]) -> str | None:
    """Return what is wrong with a link, or None."""
    if re.match(r"[a-z]+:|//", link) or link == SKIP:
        return None
    if not link:
        return "links to nothing"
    target, _, anchor = link.partition("#")
    target = unquote(target.partition("?")[0])
    # The page of a missing address has links from the top of the server.
    place = site / target.lstrip("/") if target.startswith("/") else path.parent / target
    file = path if not target else place.resolve()
    if not file.is_file():  # a folder neither: read from disk, it has no page of its own
        return f"links to {link}, which is not there"
    if anchor and file in pages and unquote(anchor) not in pages[file].anchors:
        return f"links to {link}, which has no such heading"
    return None

"""What a staged page has that its source has not: formulas as MathML, links that stay in the site.

Sources are written for a reader of the repository: they link to files of the code, and write
formulas in TeX.  On the site such links become plain names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import latex2mathml.converter

_CODE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^[ \t]*(?P=fence)[ \t]*$"
    r"|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)",
    re.DOTALL | re.MULTILINE,
)
_HIDDEN = re.compile(r"\ue000(\d+)\ue001")
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_SPAN = re.compile(r"`[^`]+`")
_LINK = re.compile(
    r"(?P<image>!?)\[(?P<label>[^\[\]]+)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)"
)
_BLOCK = re.compile(r"^\$\$(.+?)\$\$(?P<after>[^\n]*)$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<![\\$])\$(?!\s)((?:\\.|[^\\$])+?)(?<!\s)\$(?![\d$])")

_FUNCTION = re.compile(
    r"<mi>(?P<name>arg|cos|exp|ln|log|sin|tanh)</mi>"
    r"(?P<open><mo stretchy=\"false\">&#x00028;</mo>)?"
)
_PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change the text of a page, but not its blocks and spans of code."""
    hidden: list[str] = []

    def hide(code: re.Match[str]) -> str:
        hidden.append(code[0])
        return f"\ue000{len(hidden) - 1}\ue001"

    changed = change(_CODE.sub(hide, text))
    return _HIDDEN.sub(lambda place: hidden[int(place[1])], changed)


def escaped(text: str) -> str:
    """Keep what Markdown would take for a tag or for emphasis; for text outside code."""
    return re.sub(r"(?<!\*)\*(?=\w)", r"\\*", text.replace("<", "&lt;"))


def with_bars(text: str) -> str:
    """Write bars in code in tables as they are shown; a code host needs a backslash before them."""
    return _ROW.sub(lambda row: _SPAN.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), text)


def with_mathml(text: str) -> str:
    """Write formulas as MathML, which browsers show by themselves."""

    def change(plain: str) -> str:
        blocks = _BLOCK.sub(lambda tex: f"{_mathml(tex[1], 'block')}{tex['after']}", plain)
        # In a span a formula may begin a line without beginning a block.
        return _INLINE.sub(lambda tex: f"<span>{_mathml(tex[1], 'inline')}</span>", blocks)

    return outside_code(text, change)


def _mathml(tex: str, display: str) -> str:
    mathml = str(latex2mathml.converter.convert(tex.strip(), display=display))
    spaced = _FUNCTION.sub(_operator, mathml)
    # A raised prime is too small to see in fonts that are not made for formulas.
    primed = _PRIME.sub(r"<mrow>\1<mo lspace='0' rspace='0'>&#x02032;</mo></mrow>", spaced)
    # Markdown would read these as emphasis.
    return primed.replace("*", "&#42;").replace("_", "&#95;")


def _operator(name: re.Match[str]) -> str:
    """Write the name of a function as an operator, which has space around it."""
    after = "0" if name["open"] else "0.17em"
    return f"<mo lspace='0.17em' rspace='{after}'>{name['name']}</mo>{name['open'] or ''}"


@dataclass(frozen=True)
class Links:
    """Writes the links of a page so that they hold on the site."""

    root: Path
    """The repository."""
    staged: Collection[str]
    """Everything that is on the site, seen from its top."""
    moved: dict[str, str] = field(default_factory=dict)
    """Pages that are elsewhere in the repository than on the site: the one by the other."""

    def rewritten(self, text: str, source: str, page: str) -> str:
        """Return a page with links that hold.

        Args:
            text: The page's Markdown.
            source: Where it is in the repository.
            page: Where it is on the site.
        """

        def change(link: re.Match[str]) -> str:
            target = link["target"]
            if not target or re.match(r"[a-z]+:", target):
                return link[0]
            there = os.path.normpath(Path(source).parent / target)
            place = self._on_site(there)
            if place is not None:
                path = os.path.relpath(place, Path(page).parent)
                return f"{link['image']}[{link['label']}]({path}{link['anchor'] or ''})"
            return self._name(link["label"], there)

        return outside_code(text, lambda plain: _LINK.sub(change, plain))

    def _on_site(self, path: str) -> str | None:
        place = self.moved.get(path, path.removeprefix("docs/"))
        is_page = path in self.moved or path.startswith("docs/")
        return place if is_page and place in self.staged else None

    def _name(self, label: str, path: str) -> str:
        """Return a label as plain text, as code where it names a file.

        Raises:
            ValueError: When there is no such file.
        """
        if not (self.root / path).exists():
            raise ValueError(f"a page links to {path}, which is not there")
        is_file_name = re.fullmatch(r"[\w/-]+(\.\w+)?/?", label) and label.strip("/") in path
        return f"`{label}`" if is_file_name else label

"""Docstrings, and the strings under attributes, as Markdown."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

from scripts.docs_site.markdown import escaped, outside_code

_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes):")
_ITEM = re.compile(r" {4}(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)")


def as_markdown(text: str | None) -> str:
    """Return a docstring with its sections as lists."""
    lines: list[str] = []
    in_section = False
    for line in inspect.cleandoc(text or "").splitlines():
        if section := _SECTION.fullmatch(line):
            in_section = True
            lines += ["", f"**{section[1]}**", ""]
        elif line and not line.startswith(" "):
            in_section = False
            lines.append(line)
        elif not in_section:
            lines.append(line)
        elif item := _ITEM.fullmatch(line):
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            is_continued = line and lines[-1].startswith(("- ", "    "))
            lines.append(f"    {line.strip()}" if is_continued else line.strip())
    return outside_code("\n".join(lines).strip(), escaped)


def first_sentence(text: str | None) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join(as_markdown(text).split("\n\n", 1)[0].split())


@cache
def attribute_docs(owner: type | ModuleType) -> dict[str, str]:
    """Return the strings under the attributes of a class or module, by name."""
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):  # made while running, so it has no source
        return {}
    tree = ast.parse(source)
    body = tree.body
    if inspect.isclass(owner):
        (node,) = tree.body
        assert isinstance(node, ast.ClassDef)
        body = node.body
    pairs = pairwise(body)
    found = {name: _text(after) for before, after in pairs for name in _names(before)}
    return {name: text for name, text in found.items() if text is not None}


def _names(node: ast.stmt) -> list[str]:
    targets: list[Any] = []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Assign):
        targets = node.targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _text(node: ast.stmt) -> str | None:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return None
    value = node.value.value
    return inspect.cleandoc(value) if isinstance(value, str) else None

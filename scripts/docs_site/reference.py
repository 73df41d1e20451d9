"""Pages about the public names of the package: signatures, docstrings, fields, source files."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from pydantic import BaseModel
from scripts.docs_site.docstrings import as_markdown, attribute_docs, first_sentence
from scripts.docs_site.public_names import Page
from scripts.docs_site.settings_reference import fields_table, own_fields
from scripts.docs_site.tables import table

WIDTH = 88
"""Characters of a signature that fit on one line."""

_STARS: Mapping[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def index_page(pages: Sequence[Page]) -> str:
    """Return the page that lists the others with their names."""
    rows = [
        (f"[{page.title}]({page.name}.md)", ", ".join(f"`{name}`" for name in shown_names(page)))
        for page in pages
    ]
    rows.insert(
        0, ("[Classes of methods](methods.md)", "`SAC`, `PPO`, `CQL` and all other methods")
    )
    return "\n".join(
        [
            "# Python API",
            "",
            "What people call from Python. Names that are on no page may change without notice.",
            "",
            table(("page", "names"), rows),
            "",
        ]
    )


def page_text(page: Page) -> str:
    """Return a page: each public name with its signature, its docstring and where it is."""
    lines = [f"# {page.title}", "", page.text, ""]
    for source in page.sources:
        for name, value in source.members().items():
            lines += [f"## `{name}`", "", *_described(name, value, source.module), ""]
    return "\n".join(lines)


def shown_names(page: Page) -> list[str]:
    """Return the names that a page shows."""
    return [name for source in page.sources for name in source.members()]


def _described(name: str, value: Any, module: str) -> Iterator[str]:
    top = importlib.import_module("rl_training").__all__
    shortest = "rl_training" if name in top else module
    yield from ["```python", f"from {shortest} import {name}", "```", ""]
    if inspect.isclass(value):
        yield from _class(name, value)
    elif inspect.isfunction(inspect.unwrap(value)):
        yield from _function(name, value)
    else:
        documented = attribute_docs(importlib.import_module(module)).get(name)
        yield from ["```python", f"{name} = {repr(value).replace('typing.', '')}", "```", ""]
        yield as_markdown(documented)


def _function(name: str, function: FunctionType) -> Iterator[str]:
    yield from [source_of(function), "", *_code(name, function), ""]
    yield as_markdown(inspect.getdoc(function))


def _class(name: str, value: type) -> Iterator[str]:
    bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__ if base is not object)
    yield from [source_of(value) + (f", a kind of {bases}" if bases else ""), ""]
    has_settings = issubclass(value, BaseModel)
    if not issubclass(value, (BaseModel, Exception, enum.Enum)):
        yield from [*_code(name, value), ""]
    yield from [as_markdown(inspect.getdoc(value)), ""]
    if has_settings:
        yield from [fields_table(own_fields(value)), ""]
    elif issubclass(value, enum.Enum):
        members = [(f"`{member.name}`", f"`{_value(member.value)}`") for member in value]
        yield from [table(("member", "value"), members), ""]
    else:
        yield from _attributes(value)
    yield from _methods(name, value)


def _attributes(value: type) -> Iterator[str]:
    """Yield a table of what instances hold, as far as the class says."""
    documents = attribute_docs(value)
    names = [field.name for field in _fields(value)]
    rows = [
        (f"`{name}`", f"`{_annotation(value, name)}`", _inline(documents.get(name, "")))
        for name in [*names, *(name for name in documents if name not in names)]
        if not name.startswith("_")
    ]
    rows += [
        (f"`{name}`", f"`{_returned(getter)}`", first_sentence(getter.__doc__))
        for name, getter in _getters(value)
        if not name.startswith("_")
    ]
    if rows:
        yield from [table(("attribute", "type", "meaning"), rows), ""]


def _getters(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the properties of a class with the functions behind them."""
    for name, member in vars(value).items():
        if isinstance(member, property):
            yield name, member.fget
        elif isinstance(member, functools.cached_property):
            yield name, member.func


def _fields(value: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def _annotation(value: type, name: str) -> str:
    for owner in value.__mro__:
        if name in vars(owner).get("__annotations__", {}):
            return _plain(_written(owner.__annotations__[name]))
    return type(getattr(value, name, None)).__name__


def _returned(function: Any) -> str:
    return _plain(_written(function.__annotations__.get("return", "")))


def _written(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _inline(text: str) -> str:
    return " ".join(as_markdown(text).split())


def _methods(name: str, value: type) -> Iterator[str]:
    for key, member in vars(value).items():
        function = getattr(member, "__func__", member)
        if key.startswith("_") or not inspect.isfunction(function):
            continue
        if function.__module__.startswith("rl_training"):
            yield from [f"### `{name}.{key}`", "", *_code(key, function), ""]
            yield from [as_markdown(inspect.getdoc(function)), ""]


def source_of(value: Any) -> str:
    """Return the sentence that names a file."""
    import rl_training

    root = Path(rl_training.__file__).resolve().parents[2]
    file = Path(inspect.getfile(inspect.unwrap(value))).resolve()
    return f"Source: `{file.relative_to(root).as_posix()}`"


def _code(name: str, value: Any) -> list[str]:
    """Return a signature as a block, with a line for each parameter where it is long."""
    parts, arrow = _signature(value)
    whole = code_of(name, value)
    if len(whole) <= WIDTH:
        return ["```python", whole, "```"]
    return ["```python", f"{name}(", *(f"    {part}," for part in parts), f"){arrow}", "```"]


def code_of(name: str, value: Any) -> str:
    """Return a signature in one line."""
    parts, arrow = _signature(value)
    return f"{name}({', '.join(parts)}){arrow}"


def _signature(value: Any) -> tuple[list[str], str]:
    """Return the parameters of a function or class, and what follows them."""
    signature = inspect.signature(value)
    returned = signature.return_annotation
    is_said = returned is not signature.empty and not inspect.isclass(value)
    arrow = f" -> {_plain(_written(returned))}" if is_said else ""
    return _parameters(list(signature.parameters.values())), arrow


def _parameters(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Return parameters as they are written, and the `*` or `/` between kinds."""
    parts: list[str] = []
    for place, parameter in enumerate(parameters):
        before = parameters[place - 1] if place else None
        first_keyword = parameter.kind is parameter.KEYWORD_ONLY and (
            before is None or before.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        )
        if before is not None and parameter.kind > before.kind is before.POSITIONAL_ONLY:
            parts.append("/")
        if first_keyword:
            parts.append("*")
        if place or parameter.name not in ("self", "cls"):
            parts.append(_parameter(parameter))
    return parts


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{_STARS.get(parameter.kind, '')}{parameter.name}"
    is_typed = parameter.annotation is not parameter.empty
    if is_typed:
        text += f": {_plain(_written(parameter.annotation))}"
    if parameter.default is parameter.empty:
        return text
    equals = " = " if is_typed else "="
    return f"{text}{equals}{_value(parameter.default)}"


def _value(default: object) -> str:
    if inspect.isfunction(default) or inspect.isclass(default):
        return default.__name__
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if isinstance(default, str):
        return json.dumps(default)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(default))
    return "..." if text == "<factory>" else text


def _plain(annotation: str) -> str:
    """Leave out of an annotation what says nothing: quotes of forward references, modules."""
    modules = r"\b(?:rl_training|typing|collections|pathlib)(?:\.[a-z_]\w*)*\.(?=[A-Z])"
    return re.sub(modules, "", annotation.strip("'\""))

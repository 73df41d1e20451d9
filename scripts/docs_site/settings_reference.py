"""Pages about settings: every field of every class with its type, default, bounds and meaning."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from scripts.docs_site.docstrings import as_markdown
from scripts.docs_site.tables import table

from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.validation import LARGEST_FLOAT, LARGEST_INT, Settings, StrictModel, field_rule

_ENDS = (LARGEST_INT, LARGEST_FLOAT, 2**63)
"""Bounds that every number has; a table does not repeat them."""


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that a class declares itself, overridden defaults among them."""
    own = vars(model).get("__annotations__", {})
    return {name: field for name, field in model.model_fields.items() if name in own}


def fields_table(fields: Mapping[str, FieldInfo]) -> str:
    """Return a table of fields."""
    rows = [
        (f"`{name}`", field_rule(field.annotation), _default(field), bounds(field), _meaning(field))
        for name, field in fields.items()
    ]
    return table(("key", "type", "default", "bounds", "meaning"), rows)


def bounds(field: FieldInfo) -> str:
    """Return what a field's numbers or lists must keep to, such as `> 0`, or nothing."""
    metadata = [*field.metadata, *_metadata(field.annotation)]
    rules = dict.fromkeys(rule for item in metadata for rule in _rules(item))
    return ", ".join(f"`{rule}`" for rule in rules)


def _metadata(annotation: Any) -> list[Any]:
    """Return the metadata of an annotation and of its parts."""
    found: list[Any] = []
    if get_origin(annotation) is Annotated:
        for item in annotation.__metadata__:
            found += item.metadata if isinstance(item, FieldInfo) else [item]
    parts = () if get_origin(annotation) is typing.Literal else get_args(annotation)
    for part in parts:
        found += _metadata(part)
    return found


def _rules(item: Any) -> list[str]:
    signs: tuple[tuple[type, str, str], ...] = (
        (annotated_types.Gt, "gt", ">"),
        (annotated_types.Ge, "ge", ">="),
        (annotated_types.Lt, "lt", "<"),
        (annotated_types.Le, "le", "<="),
    )
    for kind, name, sign in signs:
        if isinstance(item, kind):
            end = getattr(item, name)
            return [] if abs(end) in _ENDS else [f"{sign} {end:g}"]
    if isinstance(item, annotated_types.MaxLen):
        return [f"at most {item.max_length} entries"]
    if isinstance(item, annotated_types.MinLen):
        return [f"at least {item.min_length} entries"]
    return []


def _default(field: FieldInfo) -> str:
    """Write a default as YAML does; one that is settings shows what it changes in them."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        changed = value.model_dump(mode="json", exclude_defaults=True)
        value = {"type": value.type} | changed if hasattr(value, "type") else changed
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return f"`{text.removesuffix('...' + chr(10)).strip()}`"


def _meaning(field: FieldInfo) -> str:
    return " ".join(as_markdown(field.description).split())


def run_page() -> str:
    """Return the page about the fields of a run's configuration."""
    nested = _nested(model for name in algorithm_names() for model in _classes_of(name))
    lines = [
        "# TrainConfig",
        "",
        "Everything that describes a run: a file of YAML, keywords in Python, or `--set` on the "
        "command line. [Configuration](../configuration.md) explains the rules; `algo_kwargs` "
        "holds the [settings of the method](settings.md).",
        "",
        "```python",
        "from rl_training import TrainConfig",
        "```",
        "",
        "Source: `src/rl_training/experiment/config.py`",
        "",
        "## Fields",
        "",
        fields_table(TrainConfig.model_fields),
        "",
    ]
    for model in nested:
        lines += [*_section(model), ""]
    return "\n".join(lines)


def settings_page() -> str:
    """Return the page about the settings of methods."""
    lines = [
        "# Settings of methods",
        "",
        "`algo_kwargs` is one flat mapping. The settings of a method are put together from "
        "classes, and each table below has the fields that one of them declares. Where two "
        "classes declare a field, the one further left in the first table holds. The page of a "
        "method shows all its settings in one table.",
        "",
        table(("method", "class", "put together from"), [_row(n) for n in algorithm_names()]),
        "",
    ]
    for model in settings_classes():
        lines += [*_section(model), ""]
    return "\n".join(lines)


def settings_classes() -> list[type[BaseModel]]:
    """Return the classes that declare settings of methods, the most shared ones first."""
    users: dict[type[BaseModel], int] = {}
    for name in algorithm_names():
        for model in _classes_of(name):
            users[model] = users.get(model, 0) + 1
    return sorted(users, key=lambda model: (-users[model], model.__name__))


def _classes_of(name: str) -> list[type[BaseModel]]:
    """Return the classes that declare fields of a method's settings, its own first."""
    line = get_algorithm_spec(name).config_class.__mro__
    bases = [base for base in line if issubclass(base, BaseModel) and own_fields(base)]
    return [base for base in bases if base not in (BaseModel, Settings, StrictModel)]


def _nested(models: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    """Return the classes that fields hold, such as that of `early_stopping`."""
    found: dict[type[BaseModel], None] = {}
    for model in models:
        for field in own_fields(model).values():
            found |= dict.fromkeys(_models_in(field.annotation))
    return sorted(found, key=lambda model: model.__name__)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _row(name: str) -> tuple[str, str, str]:
    links = [f"[`{m.__name__}`](#{m.__name__.lower()})" for m in _classes_of(name)]
    own = f"`{get_algorithm_spec(name).config_class.__name__}`"
    return f"[`{name}`](../algorithms/{name}.md)", own, ", ".join(links)


def _section(model: type[BaseModel]) -> list[str]:
    file = model.__module__.replace(".", "/")
    return [
        f"## `{model.__name__}`",
        "",
        f"Source: `src/{file}.py`",
        "",
        as_markdown(model.__doc__),
        "",
        fields_table(own_fields(model)),
    ]

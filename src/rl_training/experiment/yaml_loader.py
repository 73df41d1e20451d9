"""Strict YAML: plain data only, line numbers kept, no surprises.

Compared with PyYAML's defaults: `3e-4` is a number, `yes`/`on` are text, `00143` is text (YAML 1.1
reads it as octal), a key given twice is an error, and nothing but plain data can be built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_training.errors import ConfigError

Path_ = tuple[str, ...]
_MAX_DEPTH = 20


class _Loader(yaml.SafeLoader):
    """Resolvers of YAML 1.2's core schema in place of 1.1's."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9_]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:null",
    re.compile(r"^$"),
    [""],
)


@dataclass(frozen=True)
class Document:
    """Data of a YAML file and the line each key stands on."""

    data: dict[str, Any]
    lines: dict[Path_, int] = field(default_factory=dict)


def load_yaml(path: Path) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: Naming file, line and what is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text, so not a YAML file") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Document:
    """Parse YAML text; `name` stands for the file in messages."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(error, name)) from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}: must hold keys and values at its top level")
    lines: dict[Path_, int] = {}
    data = _build(node, name, (), lines, 0)
    return Document(data, lines)


def parse_scalar(text: str) -> Any:
    """Parse the value of `--set key=value`: a number, true/false, null, text, or a `[list]`."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _build(node, "--set", (), {}, 0)
    except yaml.YAMLError:
        return text


def _syntax_message(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark else name
    return f"{where}: is not valid YAML ({getattr(error, 'problem', None) or error})"


def _build(node: yaml.Node, name: str, path: Path_, lines: dict[Path_, int], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{name}: is nested too deeply")
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node, name, path, lines, depth)
    if isinstance(node, yaml.SequenceNode):
        return [
            _build(child, name, (*path, str(i)), lines, depth + 1)
            for i, child in enumerate(node.value)
        ]
    known = {"str", "int", "float", "bool", "null"}
    if node.tag.removeprefix("tag:yaml.org,2002:") not in known:
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: tag {node.tag} is not allowed")
    return _Loader("").construct_object(node)


def _build_mapping(
    node: yaml.MappingNode, name: str, path: Path_, lines: dict[Path_, int], depth: int
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{name}:{line}: a key must be a word")
        key = str(key_node.value)
        if key in result:
            raise ConfigError(f"{name}:{line}: {'.'.join((*path, key))} is given twice; keep one")
        lines[(*path, key)] = line
        result[key] = _build(value_node, name, (*path, key), lines, depth + 1)
    return result

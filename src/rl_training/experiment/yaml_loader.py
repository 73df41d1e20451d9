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
_MAX_BYTES = 256 * 1024
"""Composing YAML takes seconds per megabyte; the largest configuration has a few kilobytes."""
_MAX_SHOWN = 80
_MAX_NODES = 10_000
_SCALARS = {"str": "text", "int": "an integer", "float": "a number", "bool": "true or false"}
_TAGS = {
    yaml.MappingNode: {"map"},
    yaml.SequenceNode: {"seq"},
    yaml.ScalarNode: {*_SCALARS, "null"},
}


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
    """Data of a YAML file and the line of each key."""

    data: dict[str, Any]
    lines: dict[Path_, int] = field(default_factory=dict)


def load_yaml(path: Path) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: Naming file, line and what is wrong.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path}: is larger than {_MAX_BYTES // 1024} KiB, too large for a configuration"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text, so not a YAML file") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Document:
    """Parse YAML text; `name` stands for the file in messages."""
    builder = _Builder(name)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(error, name)) from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}: must hold keys and values at its top level")
    return Document(builder.build(node), builder.lines)


def parse_scalar(text: str, name: str = "--set") -> Any:
    """Parse the value of `--set key=value`: a number, true/false, null, text, or a `[list]`."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None
    return None if node is None else _Builder(name, numbered=False).build(node)


def _syntax_message(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark else name
    parts = [getattr(error, part, None) for part in ("context", "problem")]
    # An unreadable character has neither; the first line of its text says what it is.
    problem = ", ".join(part for part in parts if part) or str(error).splitlines()[0]
    return f"{where}: is not valid YAML ({problem})"


class _Builder:
    """Builds plain data from nodes and notes the line of each key."""

    def __init__(self, name: str, *, numbered: bool = True) -> None:
        self.name, self.numbered = name, numbered
        self.lines: dict[Path_, int] = {}
        self.nodes = 0

    def build(self, node: yaml.Node, path: Path_ = ()) -> Any:
        self.nodes += 1
        if len(path) > _MAX_DEPTH:
            raise ConfigError(f"{self.name}: is nested too deeply")
        # Aliases of aliases can stand for more data than any memory holds.
        if self.nodes > _MAX_NODES:
            raise ConfigError(f"{self.name}: holds more than {_MAX_NODES:,} values")
        kind = self._check_tag(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, str(i))) for i, child in enumerate(node.value)]
        try:
            return _Loader("").construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError):
            rule = _SCALARS.get(kind, kind)
            shown = repr(node.value[:_MAX_SHOWN]) + "..." * (len(node.value) > _MAX_SHOWN)
            raise ConfigError(f"{self._at(node)}: {shown} is not {rule}") from None

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self._at(key_node)}: a key must be a word")
            self._check_tag(key_node)
            key = str(key_node.value)
            if key in result:
                twice = ".".join((*path, key))
                raise ConfigError(f"{self._at(key_node)}: {twice} is given twice; keep one")
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, (*path, key))
        return result

    def _check_tag(self, node: yaml.Node) -> str:
        """Return the kind of a node; anything but plain data is refused."""
        kind: str = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in _TAGS[type(node)]:
            raise ConfigError(f"{self._at(node)}: tag {node.tag} is not allowed; give plain data")
        return kind

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.numbered else self.name

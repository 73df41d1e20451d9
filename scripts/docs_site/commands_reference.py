"""The page about the command line: every command with its arguments and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from scripts.docs_site.markdown import escaped, outside_code
from scripts.docs_site.tables import table

from rl_training.cli.commands import app

PROGRAM = "rl-training"


def commands_page() -> str:
    """Return the page."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        f"`{PROGRAM} --help` and `{PROGRAM} COMMAND --help` say the same; `python -m rl_training` "
        f"is the same as `{PROGRAM}`.",
        "",
        *_options(group),
        "",
    ]
    for name, command in _leaves(group, PROGRAM):
        lines += [f"## `{name.removeprefix(PROGRAM + ' ')}`", "", _plain(command.help), ""]
        lines += ["```bash", _usage(name, command), "```", "", *_options(command), ""]
    return "\n".join(lines)


def _leaves(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{name} {key}")
        else:
            yield f"{name} {key}", command


def _usage(name: str, command: Any) -> str:
    arguments = [
        _argument(parameter)
        for parameter in command.params
        if parameter.param_type_name != "option"
    ]
    options = len(arguments) < len(command.params)
    return " ".join([name, *(["[OPTIONS]"] if options else []), *arguments])


def _argument(parameter: Any) -> str:
    word = (parameter.metavar or parameter.name.rstrip("_").upper()) + (
        "..." * (parameter.nargs < 0)
    )
    return word if parameter.required else f"[{word.strip('[]')}]"


def _options(command: Any) -> list[str]:
    rows = [_row(p) for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    return [table(("argument or option", "default", "meaning"), rows)] if rows else []


def _row(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "option":
        names = [*parameter.opts, *parameter.secondary_opts]
        value = "" if parameter.is_flag else f" {parameter.metavar or _value_of(parameter)}"
        written = ", ".join(f"`{name}{value}`" for name in names)
    else:
        written = f"`{_argument(parameter)}`"
    default = parameter.default
    is_said = default not in (None, False, (), []) and not callable(default)
    said = "required" if parameter.required else f"`{default}`" if is_said else ""
    return written, said, _plain(parameter.help)


def _value_of(parameter: Any) -> str:
    kind = getattr(parameter.type_descriptor, "annotation", str)
    return {int: "NUMBER", float: "NUMBER"}.get(kind, "PATH" if "Path" in str(kind) else "TEXT")


def _plain(text: str | None) -> str:
    """Return help without the markup of the terminal."""
    joined = re.sub(r"\\(\[)", r"\1", text or "").replace("\b", "")
    paragraphs = [" ".join(paragraph.split()) for paragraph in joined.split("\n\n")]
    return outside_code("\n\n".join(paragraphs), escaped)

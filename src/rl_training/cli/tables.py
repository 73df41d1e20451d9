"""What `list` and `describe` show; the docs pages use the same facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_training.experiment.registry import algorithm_names, get_algorithm_spec, installed_plugins
from rl_training.resources import preset_names
from rl_training.validation import field_rule


def list_rows(what: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return column names and rows of a listing: algos, presets or envs."""
    if what == "algos":
        specs = [get_algorithm_spec(name) for name in (*algorithm_names(), *installed_plugins())]
        rows: list[tuple[str, ...]] = [
            (s.name, " / ".join(s.action_kinds), s.title, s.summary) for s in specs
        ]
        return ("name", "actions", "title", "summary"), rows
    if what == "presets":
        return ("preset", "command"), [
            (name, f"rl-training train --config {name}") for name in preset_names()
        ]
    import gymnasium

    return ("environment", "steps"), [
        (env_id, str(spec.max_episode_steps or ""))
        for env_id, spec in sorted(gymnasium.registry.items())
    ]


def print_rows(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a plain table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def algorithm_facts(name: str) -> dict[str, Any]:
    """Return everything the declaration of an algorithm says, as plain data."""
    spec = get_algorithm_spec(name)
    fields = [
        {
            "key": key,
            "type": field_rule(info.annotation),
            "default": _default(info.default),
            "meaning": info.description or "",
        }
        for key, info in spec.config_class.model_fields.items()
    ]
    return {
        "name": spec.name,
        "title": spec.title,
        "paper": spec.paper,
        "summary": spec.summary,
        "loop": spec.loop.value,
        "actions": list(spec.action_kinds),
        "presets": [preset for preset in preset_names() if preset.split("/")[0] == name],
        "settings": fields,
        "may_vary": spec.config_class.may_vary(),
        "metrics": [{"name": key, "meaning": text} for key, text in spec.metrics.items()],
    }


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    if hasattr(value, "model_dump"):
        return f"{{type: {value.type}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_facts(console: Console, facts: dict[str, Any]) -> None:
    """Print the facts of an algorithm for a person."""
    console.print(f"[bold]{facts['title']}[/] ({facts['name']}, {facts['paper']})", highlight=False)
    console.print(f"{facts['summary']}; {facts['loop'].replace('_', '-')} loop", highlight=False)
    console.print("presets: " + (", ".join(facts["presets"]) or "none"), highlight=False)
    console.print("grid: " + ", ".join(facts["may_vary"]), highlight=False)
    console.print("\n[bold]algo_kwargs[/]")
    rows = [(f["key"], f["type"], f["default"], f["meaning"]) for f in facts["settings"]]
    _wide_table(console, ("key", "type", "default", "meaning"), rows)
    console.print("\n[bold]metrics[/]")
    _wide_table(console, ("name", "meaning"), [(m["name"], m["meaning"]) for m in facts["metrics"]])


def _wide_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in ("key", "name"), overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=False)

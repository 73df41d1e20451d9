"""What `list` and `describe` show; the docs pages use the same facts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rl_training.cli.styles import STRONG
from rl_training.experiment.presets import Measured, PresetFacts, preset_facts
from rl_training.experiment.registry import algorithm_summaries, get_algorithm_spec
from rl_training.resources import preset_names
from rl_training.validation import field_rule

Row = dict[str, Any]
EXTRA_OF_FAMILY = {"mujoco": ("mujoco", "mujoco"), "box2d": ("Box2D", "box2d")}
"""Families of Gymnasium's tasks that need a module, and our extra that brings it."""
FAMILIES = {
    "off-policy": "Off-policy actor-critics",
    "value-based": "Value-based",
    "on-policy": "On-policy",
    "offline": "From recorded data",
    "imitation": "Imitation",
    "model-based": "Learned dynamics",
    "world model": "World models",
}
"""Kinds of methods, by how their summaries begin, and what pages call them."""
HIDDEN_FAMILIES = ("phys2d", "tabular")
"""Gymnasium's tasks in JAX, for which we have no extra."""
_ID = re.compile(r"^(?P<name>.*)-v(?P<version>\d+)$")


def list_rows(what: str) -> list[Row]:
    """Return the rows of a listing as plain data: algos, presets or envs."""
    if what == "algos":
        return [
            {
                "name": s.name,
                "actions": " / ".join(s.action_kinds),
                "title": s.title,
                "summary": s.summary,
            }
            for s in algorithm_summaries()
        ]
    if what == "presets":
        return [_preset_row(facts) for facts in preset_facts()]
    return list(_env_rows())


def print_list(console: Console, what: str) -> None:
    """Print a listing that fits into 80 columns, and what its figures mean."""
    rows = list_rows(what)
    if what == "algos":
        cells = [
            (r["name"], method_kind(r["summary"]), _actions(r["actions"]), r["title"]) for r in rows
        ]
        print_rows(console, ("name", "kind", "actions", "method"), cells)
        note = METHOD_NOTE
    elif what == "presets":
        figures = [_preset_cells(facts) for facts in preset_facts()]
        columns = ("preset", "task", "steps", "return", "time")
        print_rows(console, columns, figures, numbers=("steps", "return", "time"))
        note = PRESET_NOTE
    else:
        shown = [(r["environment"], r["steps"], _needs(r["extra"])) for r in rows]
        print_rows(console, ("environment", "steps", "needs"), shown, numbers=("steps",))
        note = ENV_NOTE.format(
            "are there" if _has("ale_py") else "need the extra atari",
            "are there" if _has("ogbench") else "need the extra ogbench",
        )
    console.print(f"\n{note}", markup=False, highlight=False, soft_wrap=False)


METHOD_NOTE = (
    "rl-training describe NAME shows a method's settings, metrics and presets; rl-training train "
    "--algo NAME --env ID trains it. Offline and imitation methods, and rlpd, learn from recorded "
    "data: rl-training data --help."
)
PRESET_NOTE = (
    "rl-training train --config PRESET starts one. return: as measured, the interquartile mean "
    "over seeds; time: of all seeds side by side, see docs/results.md for the machine; - was not "
    "measured. (*): with recorded data, at the steps of docs/results.md; as it is, the preset "
    "learns from made-up data, which shows that it runs and nothing more: give "
    "-s dataset_path=FILE (GAIL: expert_dataset_path), made with rl-training data collect."
)
ENV_NOTE = (
    "ALE/Breakout-v5 and other Atari games {}; cube-single-singletask-v0 and OGBench's other tasks "
    "{}; module:Class names an environment of your own. Ids that Gymnasium keeps for older "
    "versions are left out."
)


def method_kind(summary: str) -> str:
    """Return the words with which a summary begins, as far as they name a kind of method."""
    match = re.match(r"offline|imitation|o\w+-policy|value-based|world model|model-based", summary)
    return "" if match is None else match[0]


def _actions(kinds: str) -> str:
    return "both" if "/" in kinds else kinds


def _needs(extra: str | None) -> str:
    return "" if extra is None else f'pip install "rl-training\\[{extra}]"'


def _preset_row(facts: PresetFacts) -> Row:
    measured = facts.measured
    return {
        "preset": facts.name,
        "task": facts.env_id,
        "steps": facts.steps,
        "made_up_data": facts.made_up,
        "measured_return": None if measured is None else measured.value,
        "measured_seconds": None if measured is None else measured.seconds,
        "measured_steps": None if measured is None else measured.steps,
        "measured_with_real_data": measured is not None and measured.real_data,
        "command": f"rl-training train --config {facts.name}",
    }


def _preset_cells(facts: PresetFacts) -> tuple[str, ...]:
    value, seconds = _figures(facts.measured)
    mark = " (*)" if facts.made_up else ""
    return facts.name, facts.env_id, f"{facts.steps:,}", f"{value}{mark}", seconds


def _figures(measured: Measured | None) -> tuple[str, str]:
    if measured is None:
        return "-", "-"
    value = f"{measured.value:.0f}" if abs(measured.value) >= 10 else f"{measured.value:.2f}"
    minutes = measured.seconds / 60
    return value, f"{minutes:.0f} min" if minutes >= 1 else f"{measured.seconds:.0f} s"


def _env_rows() -> Iterator[Row]:
    """Yield the tasks that can be made here, or could be with an extra; the newest of each name."""
    import gymnasium

    from rl_training.envs.tasks.games import register_games
    from rl_training.envs.tasks.spaces_only import SPACES_ONLY

    register_games()
    newest: dict[str, int] = {}
    live = {key: spec for key, spec in gymnasium.registry.items() if _is_live(spec.entry_point)}
    live.pop(SPACES_ONLY, None)  # a stand-in for a task that is not there
    for env_id in live:
        name, version = _split_id(env_id)
        newest[name] = max(version, newest.get(name, 0))
    for env_id, spec in sorted(live.items()):
        name, version = _split_id(env_id)
        if version == newest[name]:
            yield {
                "environment": env_id,
                "steps": str(spec.max_episode_steps or ""),
                "extra": _missing_extra(str(spec.entry_point)),
            }


def _split_id(env_id: str) -> tuple[str, int]:
    match = _ID.match(env_id)
    return (env_id, 0) if match is None else (match["name"], int(match["version"]))


def _is_live(entry_point: object) -> bool:
    """Whether something can be made of an id: not of those that only raise an error."""
    if callable(entry_point):
        return not getattr(entry_point, "__name__", "").startswith("_raise")
    return not any(f"gymnasium.envs.{family}." in str(entry_point) for family in HIDDEN_FAMILIES)


def _missing_extra(entry_point: str) -> str | None:
    for family, (module, extra) in EXTRA_OF_FAMILY.items():
        if f"gymnasium.envs.{family}." in entry_point:
            return None if _has(module) else extra
    return None


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def print_rows(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
) -> None:
    """Print a plain table; columns of numbers are set to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        side: Any = "right" if column in numbers else "left"
        table.add_column(column, justify=side, no_wrap=column == columns[0], overflow="fold")
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
        told = {"type": value.type} | value.model_dump(exclude_defaults=True)
        return "{" + ", ".join(f"{name}: {_default(each)}" for name, each in told.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_facts(console: Console, facts: dict[str, Any]) -> None:
    """Print the facts of an algorithm for a person: each setting with its meaning below it."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=False)

    say(f"[bold]{facts['title']}[/] ({facts['name']}, {facts['paper']})")
    say(f"{facts['summary']}; {facts['loop'].replace('_', '-')} loop")
    say(f"presets: {', '.join(facts['presets']) or 'none'}")
    say(f"grid: {', '.join(facts['may_vary'])}")
    say("\n[bold]settings[/], for `-s key=value` or algo_kwargs of a YAML file")
    for field in facts["settings"]:
        head = Text.assemble((field["key"], STRONG), f" = {field['default']}  ({field['type']})")
        _print_entry(console, head, field["meaning"])
    say("\n[bold]metrics[/]")
    for metric in facts["metrics"]:
        _print_entry(console, Text(metric["name"], STRONG), metric["meaning"])


def _print_entry(console: Console, head: Text, meaning: str) -> None:
    console.print(head, soft_wrap=False)
    console.print(Padding(Text(meaning), (0, 0, 0, 4)), highlight=False, soft_wrap=False)

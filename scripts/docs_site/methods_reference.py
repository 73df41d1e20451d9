"""Pages about the methods: the list of them by family, and the classes of each."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from scripts.docs_site.docstrings import as_markdown, first_sentence
from scripts.docs_site.layout import OTHERS, family_of
from scripts.docs_site.reference import code_of, source_of
from scripts.docs_site.tables import table

from rl_training.cli.tables import FAMILIES
from rl_training.experiment.registry import (
    AlgorithmSummary,
    algorithm_names,
    algorithm_summaries,
    get_algorithm_spec,
)

_ACTIONS = re.compile(r"; (?:discrete|continuous|discrete and continuous) actions$")


def overview_page() -> str:
    """Return the list of all methods by family."""
    families: dict[str, list[AlgorithmSummary]] = {
        family: [] for family in (*FAMILIES.values(), OTHERS)
    }
    for summary in algorithm_summaries():
        if summary.name in algorithm_names():
            families[family_of(summary.summary)].append(summary)
    lines = ["# All methods", "", "Every method trains, resumes, evaluates and predicts alike.", ""]
    for family, summaries in families.items():
        if summaries:
            rows = [_overview_row(summary) for summary in summaries]
            columns = ("name", "method", "actions", "in one line")
            lines += [f"## {family}", "", table(columns, rows), ""]
    return "\n".join(lines)


def _overview_row(summary: AlgorithmSummary) -> tuple[str, ...]:
    actions = ", ".join(kind.replace("_", "-") for kind in summary.action_kinds)
    link = f"[{summary.title}]({summary.name}.md)"
    return f"`{summary.name}`", link, actions, _idea(summary.summary)


def _idea(summary: str) -> str:
    """Return a summary without what the other columns say."""
    return _ACTIONS.sub("", summary)


def classes_page() -> str:
    """Return the page about the classes of every method."""
    rows = [_classes_row(name) for name in algorithm_names()]
    lines = [
        "# Classes of methods",
        "",
        "Each method has a managed class, which makes environments, trains, saves and loads, and a "
        "learner, which computes updates on batches and knows nothing of a run. All managed "
        "classes have the methods of [`Agent`](agents.md); all learners those of "
        "[`Learner`](learners.md). Both are imported from `rl_training`.",
        "",
        table(("managed class", "learner", "settings", "method"), rows),
        "",
    ]
    for name in algorithm_names():
        lines += [*_method(name), ""]
    return "\n".join(lines)


def _classes_row(name: str) -> tuple[str, ...]:
    spec = get_algorithm_spec(name)
    managed = spec.learner.__name__
    return (
        f"`{managed}`",
        f"[`{managed}Algorithm`](#{managed.lower()}algorithm)",
        f"[`{spec.config_class.__name__}`](settings.md)",
        f"[{spec.title}](../algorithms/{name}.md)",
    )


def _method(name: str) -> Iterator[str]:
    spec = get_algorithm_spec(name)
    managed = spec.learner.__name__
    bases = ", ".join(f"`{base.__name__}`" for base in spec.learner.__bases__)
    yield from [f"## `{managed}Algorithm`", ""]
    yield from ["```python", f"from rl_training import {managed}, {managed}Algorithm", "```", ""]
    yield from [f"{source_of(spec.learner)}, a kind of {bases}", ""]
    yield from [as_markdown(inspect.getdoc(spec.learner)), ""]
    for key, member in vars(spec.learner).items():
        if not key.startswith("_") and inspect.isfunction(member):
            meaning = first_sentence(inspect.getdoc(member))
            yield f"- `{code_of(key, member)}`{': ' if meaning else ''}{meaning}"
    functions = _functions_beside(spec.learner)
    if functions:
        module = spec.learner.__module__
        yield from ["", f"Functions of `{module}`:", "", *functions]


def _functions_beside(learner: type) -> list[str]:
    """Return the public functions of a learner's module, such as its losses."""
    module = importlib.import_module(learner.__module__)
    return [
        f"- `{code_of(name, value)}`: {first_sentence(inspect.getdoc(value))}"
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == module.__name__
    ]

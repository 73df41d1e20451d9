"""Keeps the generated parts of the documentation, and presets as they resolve, equal to the code.

`python scripts/update_docs.py` rewrites them; with `--check` it changes nothing and exits with 1
when one is stale.  A generated part is between `<!-- generated: NAME -->` and
`<!-- end generated -->`; the rest of a page is written by hand.  `<!-- generated: code
algorithms.sac.SAC.td_target -->` shows that method's lines; several may be named.  Parts with
other names are left to the programs that write them.  A method without a page gets a new one.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType

import yaml

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec, paper_address
from rl_training.cli.tables import FAMILIES, algorithm_facts, method_kind
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.presets import RESOLVED
from rl_training.experiment.registry import algorithm_names, class_names, get_algorithm_spec
from rl_training.resources import preset_names
from rl_training.validation import field_rule

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Path(rl_training.__file__).resolve().parents[1]
_PART = re.compile(
    r"(<!-- generated: ([\w-]+)((?: [\w.]+)*) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL
)


def pages() -> list[Path]:
    """Return every page with generated parts, those of all algorithms among them."""
    fixed = [ROOT / "README.md"]
    fixed += [
        ROOT / f"docs/{name}.md"
        for name in ("index", "methods", "configuration", "spaces", "single_file")
    ]
    fixed.append(ROOT / "src/rl_training/assets" / RESOLVED)
    return fixed + [ROOT / f"docs/algorithms/{name}.md" for name in algorithm_names()]


def rendered(page: Path) -> str:
    """Return the text a page should have."""
    if page.name == RESOLVED:
        return _resolved_presets()
    text = page.read_text(encoding="utf-8") if page.is_file() else _new_page(page.stem)

    def fill(match: re.Match[str]) -> str:
        if match[2] == "code":
            up = "../" * len(page.relative_to(ROOT).parent.parts)
            part = "\n\n".join(_code(name, up) for name in match[3].split())
        elif match[2] in PARTS:
            part = PARTS[match[2]](page)
        else:
            return match[0]
        return f"{match[1]}{part}\n{match[5]}"

    return _PART.sub(fill, text)


def _resolved_presets() -> str:
    """Return the defaults of every method, and what each preset sets beside them."""
    methods = {
        name: get_algorithm_spec(name).config_class().model_dump(mode="json")
        for name in algorithm_names()
    }
    run = TrainConfig(algo="sac", env_id="").model_dump(mode="json")
    presets = {}
    for name in preset_names():
        full = load_config(name).resolved()
        keys = ("algo", "env_id", *(k for k, v in full.items() if v != run[k]))
        usual = methods[full["algo"]]
        own = {k: v for k, v in full["algo_kwargs"].items() if v != usual[k]}
        presets[name] = {key: full[key] for key in keys} | {"algo_kwargs": own}
    return json.dumps({"run": run, "methods": methods, "presets": presets}, indent=1) + "\n"


SECTIONS = (
    "Idea",
    "When to use it, and when not",
    "What is implemented",
    "Deviations, and why",
    "Limits",
    "Results",
    "Settings",
    "Metrics",
    "Citation",
)
"""Sections of a method's page, in this order."""
_HINTS = {
    "Idea": "Three sentences: the problem, the idea, why it works.",
    "When to use it, and when not": "Compared with which other methods here, by what was measured.",
    "What is implemented": "Equations, and the two or three functions that are them.",
}


def _new_page(name: str) -> str:
    """Return a page with every section, what is generated and what the author must write."""
    filled = {title: f"*{hint}*" for title, hint in _HINTS.items()}
    filled |= {title: _empty(title.lower()) for title in ("Results", "Settings", "Metrics")}
    learner = get_algorithm_spec(name).learner
    module = learner.__module__.removeprefix("rl_training.")
    filled["What is implemented"] += f"\n\n{_empty(f'code {module}.{learner.__name__}.step')}"
    filled["Citation"] = f"```bibtex\n{algorithm_facts(name)['paper']}\n```"
    sections = (f"## {title}\n\n{filled.get(title, '')}".rstrip() for title in SECTIONS)
    return "\n\n".join([f"# {algorithm_facts(name)['title']}", _empty("facts"), *sections]) + "\n"


def _empty(part: str) -> str:
    return f"<!-- generated: {part} -->\n<!-- end generated -->"


def _code(name: str, up: str = "../../") -> str:
    """Return the lines of a function or method, without its docstring.

    Args:
        name: Seen from `rl_training`, such as `algorithms.sac.SAC.td_target`, or that of an
            example, such as `examples.single_file.sac.SAC.critic_loss`.
        up: The way from the page's folder to the repository's.
    """
    is_example = name.startswith("examples.")
    value = pkgutil.resolve_name(name if is_example else f"rl_training.{name}")
    function: FunctionType = inspect.unwrap(getattr(value, "fget", value))
    source = textwrap.dedent(inspect.getsource(function))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef), f"{name} is not a function"
    lines = source.rstrip().splitlines()
    if ast.get_docstring(node) is not None:
        del lines[node.body[0].lineno - 1 : node.body[0].end_lineno]
    file = Path(inspect.getfile(function)).relative_to(SOURCES.parent).as_posix()
    link = f"[`{file.removeprefix('src/rl_training/')}`]({up}{file})"
    return "\n".join([f"`{function.__qualname__}` in {link}:", "", "```python", *lines, "```"])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    escaped = [[" ".join(cell.split()).replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _link(paper: str) -> str:
    address = paper_address(paper)
    return f"[{paper}]({address})" if address else paper


def _facts(page: Path) -> str:
    facts = algorithm_facts(page.stem)
    rows = [
        ("paper", _link(facts["paper"])),
        ("actions", ", ".join(facts["actions"])),
        ("observations", observations(get_algorithm_spec(page.stem))),
        ("loop", f"`{facts['loop']}`"),
        ("presets", ", ".join(f"`{preset}`" for preset in facts["presets"])),
        ("[grid](../seeds.md#grids)", ", ".join(f"`{name}`" for name in facts["may_vary"])),
    ]
    return _table(("name", f"`{facts['name']}`"), rows)


def observations(spec: AlgorithmSpec) -> str:
    """Say which observations a method takes, as its declaration has it."""
    if 3 in spec.obs_ndims:
        taken = ["vectors", "images", "dictionaries and tuples of both"]
    elif "image" in spec.leaf_kinds:
        taken = ["vectors", "dictionaries and tuples, images among their parts"]
    else:
        taken = ["vectors", "dictionaries and tuples of vectors"]
    if "mask" in spec.leaf_kinds and spec.action_kinds != ("continuous",):
        taken.append("masks of actions")
    return "; ".join(taken)


def _settings(page: Path) -> str:
    rows = [
        (f"`{field['key']}`", field["type"], f"`{field['default']}`", field["meaning"])
        for field in algorithm_facts(page.stem)["settings"]
    ]
    return _table(("key of `algo_kwargs`", "type", "default", "meaning"), rows)


def _metrics(page: Path) -> str:
    rows = [(f"`{m['name']}`", m["meaning"]) for m in algorithm_facts(page.stem)["metrics"]]
    return _table(("name", "meaning"), rows)


def _algorithms(page: Path) -> str:
    folder = "docs/algorithms" if page.parent == ROOT else "algorithms"
    rows = []
    for name in algorithm_names():
        facts = algorithm_facts(name)
        presets = ", ".join(f"`{preset}`" for preset in facts["presets"])
        title = f"[{facts['title']}]({folder}/{name}.md)"
        actions = ", ".join(facts["actions"])
        rows.append((f"`{name}`", title, actions, _link(facts["paper"]), presets))
    return _table(("name", "method", "actions", "paper", "presets"), rows)


def _families(page: Path) -> str:
    folder = "docs/algorithms" if page.parent == ROOT else "algorithms"
    classes = {spec: name for name, spec in class_names().items()}
    members: dict[str, list[str]] = {kind: [] for kind in FAMILIES}
    for name in algorithm_names():
        kind = method_kind(get_algorithm_spec(name).summary)
        members[kind].append(f"[{classes[name]}]({folder}/{name}.md)")
    rows = [(title, ", ".join(members[kind])) for kind, title in FAMILIES.items()]
    return _table(("family", "methods"), rows)


def _spaces(_: Path) -> str:
    """Say which methods take which spaces; methods that take the same share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in algorithm_names():
        spaces = get_algorithm_spec(name).spaces
        actions = " or ".join(
            f"`{kind}`" for kind in ("Discrete", "MultiDiscrete", "Box") if spaces[kind]
        )
        kinds = ("parts", "many values", "image among parts", "image", "mask")
        row = (actions, *("yes" if spaces[kind] else "no" for kind in kinds))
        groups.setdefault(row, []).append(f"`{name}`")
    columns = (
        *("methods", "actions", "parts: numbers, flags, few values", "many values"),
        *("images among parts", "an image alone", "masks"),
    )
    return _table(columns, [(", ".join(names), *row) for row, names in groups.items()])


def _train_config(_: Path) -> str:
    rows = []
    for key, info in TrainConfig.model_fields.items():
        value = info.get_default(call_default_factory=True)
        default = "required" if info.is_required() else f"`{_default(value)}`"
        rows.append((f"`{key}`", field_rule(info.annotation), default, info.description or ""))
    return _table(("key", "type", "default", "meaning"), rows)


def _default(value: object) -> str:
    """Write a default as YAML does."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


PARTS: dict[str, Callable[[Path], str]] = {
    "facts": _facts,
    "settings": _settings,
    "metrics": _metrics,
    "algorithms": _algorithms,
    "families": _families,
    "spaces": _spaces,
    "train-config": _train_config,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the generated parts, or say which are stale; returns the exit code."""
    parser = argparse.ArgumentParser(description="Regenerate the generated parts of the docs.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when stale")
    check = parser.parse_args(arguments).check
    if str(SOURCES.parent) not in sys.path:
        sys.path.insert(0, str(SOURCES.parent))  # of examples
    stale = [
        page
        for page in pages()
        if not page.is_file() or page.read_text(encoding="utf-8") != rendered(page)
    ]
    for page in stale:
        print(f"{'stale' if check else 'updated'}: {page.relative_to(ROOT)}")
        if not check:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(rendered(page), encoding="utf-8")
    if check and stale:
        print("run: python scripts/update_docs.py")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())

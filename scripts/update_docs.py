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
from rl_training.cli.tables import algorithm_facts
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.presets import RESOLVED
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.resources import preset_names
from rl_training.validation import field_rule

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Path(rl_training.__file__).resolve().parents[1]
_PART = re.compile(
    r"(<!-- generated: ([\w-]+)((?: [\w.]+)*) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL
)


def pages() -> list[Path]:
    """Return every page with generated parts, those of all algorithms among them."""
    fixed = [ROOT / "README.md", ROOT / "docs/index.md", ROOT / "docs/configuration.md"]
    fixed += [ROOT / "docs/single_file.md", ROOT / "src/rl_training/assets" / RESOLVED]
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


def _new_page(name: str) -> str:
    parts = "\n\n".join(
        f"## {title}\n\n<!-- generated: {part} -->\n<!-- end generated -->"
        for title, part in (("Settings", "settings"), ("Metrics", "metrics"))
    )
    facts = "<!-- generated: facts -->\n<!-- end generated -->"
    results = "<!-- generated: results -->\n<!-- end generated -->"
    title = algorithm_facts(name)["title"]
    return (
        f"# {title}\n\n{facts}\n\n## Idea\n\n## Equations and code\n\n"
        f"## Deviations, and why\n\n## When to use it\n\n## Limits\n\n"
        f"## Results\n\n{results}\n\n{parts}\n\n## Citation\n"
    )


def _code(name: str, up: str = "../../") -> str:
    """Return the lines of a function or method, without its docstring.

    Args:
        name: Seen from `rl_training`, such as `algorithms.sac.SAC.td_target`, or that of an
            example, such as `examples.single_file.sac.SAC.critic_loss`.
        up: The way from the page's folder to the repository's.
    """
    is_example = name.startswith("examples.")
    value = pkgutil.resolve_name(name if is_example else f"rl_training.{name}")
    function: FunctionType = getattr(value, "fget", value)
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
    kind, _, number = paper.partition(":")
    site = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}.get(kind)
    return f"[{paper}]({site}{number})" if site else paper


def _facts(page: Path) -> str:
    facts = algorithm_facts(page.stem)
    rows = [
        ("paper", _link(facts["paper"])),
        ("actions", ", ".join(facts["actions"])),
        ("loop", f"`{facts['loop']}`"),
        ("presets", ", ".join(f"`{preset}`" for preset in facts["presets"])),
        ("[grid](../seeds.md#grids)", ", ".join(f"`{name}`" for name in facts["may_vary"])),
    ]
    return _table(("name", f"`{facts['name']}`"), rows)


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

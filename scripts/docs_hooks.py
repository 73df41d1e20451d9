"""Hooks of the documentation site (`make docs`): what the pages alone do not say.

Pages link to source files, which a reader of the repository follows; on the site such links become
plain names.  The files at the top of the repository and an index of the public API become pages,
and the list of methods is that of their pages, so that a new method needs no entry anywhere.
"""

from __future__ import annotations

import html
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
TOP_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
API = {
    "rl_training.api.agent": ("Agent",),
    "rl_training.experiment.config": ("TrainConfig", "load_config"),
    "rl_training.runtime.train": ("train",),
    "rl_training.runtime.results": ("TrainResult", "EvalResult"),
    "rl_training.runtime.callbacks": ("Callback",),
    "rl_training.runtime.workflows": (
        "load_agent",
        "evaluate_checkpoint",
        "evaluate_group",
        "predict_from_checkpoint",
        "resume_training",
    ),
    "rl_training.tools.video": ("record_agent",),
    "rl_training.tools.export": ("export_agent",),
    "rl_training.reporting.gather": ("gather",),
    "rl_training.reporting.page": ("write_report",),
    "rl_training.experiment.statistics": (
        "interquartile_mean",
        "bootstrap_interval",
        "probability_of_improvement",
        "improvement_interval",
    ),
}
"""Module by module, what the page of the API shows."""
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the section of methods, and add the pages made here."""
    pages = sorted((ROOT / "docs" / "algorithms").glob("*.md"))
    for section in config.nav or []:
        if "Methods" in section:
            section["Methods"] = [{_title(page): f"algorithms/{page.name}"} for page in pages]
        if "Inside" in section:
            section["Inside"] += [
                {"Contributing": "contributing.md"},
                {"Python API": "api.md"},
                {"Changelog": "changelog.md"},
            ]
    return config


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`."""
    for source, target in TOP_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        # Seen from the top, pages of the documentation lie one folder down.
        files.append(File.generated(config, target, content=text.replace("](docs/", "](")))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_content(text: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers show by themselves."""
    return _FORMULA.sub(_as_mathml, text)


def _as_mathml(found: re.Match[str]) -> str:
    block = found.group(1) == "div"
    tex = html.unescape(found.group(2)).strip()[2:-2]
    return str(latex2mathml.converter.convert(tex, display="block" if block else "inline"))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave the site into names, and those to pages made here into links."""
    folder = Path(config.docs_dir, page.file.src_uri).parent
    if page.file.src_uri in TOP_PAGES.values():
        folder = ROOT

    def replaced(found: re.Match[str]) -> str:
        label, target = found[2], found[3]
        if re.match(r"[a-z]+:", target) or files.get_file_from_path(
            _inside(folder, target, config)
        ):
            return found[0]
        name = Path(target).name
        if name in TOP_PAGES:
            return f"[{label}]({'../' * page.file.src_uri.count('/')}{TOP_PAGES[name]})"
        if name == "README.md":
            return label
        return label if "`" in label else f"`{label}`"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(p if p.startswith("```") else _LINK.sub(replaced, p) for p in parts)


def _inside(folder: Path, target: str, config: MkDocsConfig) -> str:
    """Return the place of a link's target in `docs/`, or something that is no page."""
    path = (folder / target).resolve()
    docs = Path(config.docs_dir).resolve()
    if folder == ROOT:  # a page from the top: its links to docs/ have been shortened
        path = docs / target
    return path.relative_to(docs).as_posix() if path.is_relative_to(docs) else ".."


def api_page() -> str:
    """Return an index of what people call from Python, from its docstrings."""
    sys.path.insert(0, str(ROOT / "src"))
    from rl_training.experiment.registry import class_names

    classes = ", ".join(f"`{name}`" for name in sorted(class_names()))
    lines = ["# Python API", "", f"Every method is a class of `rl_training`: {classes}.", ""]
    lines += ["All have the methods of `Agent` below.", ""]
    for module_name, names in API.items():
        module = importlib.import_module(module_name)
        for name in names:
            lines += [f"## `{name}`", "", f"`from {module_name} import {name}`", ""]
            lines += [*_described(name, getattr(module, name)), ""]
    return "\n".join(lines)


def _described(name: str, value: Any) -> list[str]:
    lines = []
    if not hasattr(value, "model_fields"):  # settings have a page of their own
        lines += ["```python", f"{name}{_signature(value)}", "```", ""]
    lines += [_plain(inspect.getdoc(value)), ""]
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                first = _plain(inspect.getdoc(function)).split("\n", 1)[0]
                lines.append(f"- `{method}{_signature(function)}`: {first}")
    return lines


def _signature(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)).replace("'", ""))


def _plain(text: str | None) -> str:
    """Return a docstring with its sections as lists."""
    lines = []
    for line in (text or "").splitlines():
        if re.fullmatch(r"(Args|Returns|Raises):", line):
            lines += ["", f"**{line.rstrip(':')}**", ""]
        elif found := re.match(r" {4}(\S[^:]*): (.*)", line):
            lines.append(f"- `{found[1]}`: {found[2]}")
        else:
            lines.append(line.strip() if line.startswith("    ") else line)
    return "\n".join(lines)

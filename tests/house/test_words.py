"""One word per idea: words that a native engineer would not use here, and those to use instead.

Read are the pages, and in the package docstrings, comments and messages; names of variables too.
Files written before a word was in the table have a number of it that may only fall.
"""

from __future__ import annotations

import ast
import io
import re
import token
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted((ROOT / "src/rl_training").rglob("*.py"))
HISTORY = ROOT / "CHANGELOG.md"
"""What was written at the time stays as it was."""


class Word(NamedTuple):
    """A pattern that is not ours, and what is."""

    pattern: str
    instead: str
    allowed: str = r"(?!)"
    """What may follow or surround it, with a reason beside the table."""


WORDS = {
    "bits": Word(r"\bto the bit\b|\bbit (?:for|by) bit\b", "bit-exact, bit-exactly"),
    "stands": Word(
        r"\b(?:stands?|stood)\b",
        "is in, is, see",
        # A symbol stands for something, a figure stands out, a search stands still; `stand-in`.
        r"\bstands? (?:for|out|still)\b|\bstand-in|\bas (?:it|they) stands?\b",
    ),
    "anew": Word(r"\banew\b", "again, from scratch"),
    "is no": Word(
        r"\b(?:is|are|was|were) no [a-z]+",
        "is not a",
        # `there is no X` and comparisons are plain English.
        r"\b(?:there|where|here) (?:is|are|was|were) no |(?:is|are|was|were) no "
        r"(?:longer|more|less|fewer|better|worse|larger|smaller|other|different|way|faster|slower)\b",
    ),
    "shall": Word(r"\bshall\b", "must"),
    "by rights": Word(r"\bby rights\b", "should"),
    "film": Word(r"\bfilm(?:s|ed)?\b", "video, record"),
    "roll-out": Word(r"\broll-outs?\b", "rollout"),
    "step size": Word(r"\bstep[- ]sizes?\b", "learning rate"),
    "go on": Word(r"\b(?:go|goes|going|gone|went) on\b", "continue"),
    "taken up": Word(
        r"\b(?:take|takes|taken|took) up\b(?= (?:again|where|an?|the) |\W|$)", "resume"
    ),
    "to be had": Word(r"\bto be had\b", "available, allowed"),
    "for ever": Word(r"\bfor ever\b", "forever"),
}
NAMES = frozenset({"found", "made", "seen", "goes", "goes_on", "gone"})
"""Names of variables that do not say what they hold."""

STILL_THERE: dict[str, int] = {
    "docs/environments.md": 4,
    "docs/seeds.md": 2,
    "docs/sweeps.md": 2,
}
"""Words of the table in files that were not rewritten yet; a number may only fall."""
VAGUE_STILL_THERE: dict[str, int] = {
    "src/rl_training/cli/data.py": 3,
    "src/rl_training/cli/deploying.py": 1,
    "src/rl_training/cli/doctor.py": 1,
    "src/rl_training/cli/making.py": 2,
    "src/rl_training/cli/ope.py": 2,
    "src/rl_training/cli/outcome.py": 1,
    "src/rl_training/cli/zoo.py": 1,
    "src/rl_training/data/datasets/blocks.py": 3,
    "src/rl_training/data/datasets/check.py": 2,
    "src/rl_training/data/datasets/columns.py": 1,
    "src/rl_training/data/datasets/dataset.py": 2,
    "src/rl_training/data/datasets/hdf5.py": 2,
    "src/rl_training/data/datasets/minari.py": 1,
    "src/rl_training/data/datasets/rewards.py": 2,
    "src/rl_training/data/datasets/sources.py": 1,
    "src/rl_training/data/datasets/summary.py": 1,
    "src/rl_training/data/datasets/units.py": 2,
    "src/rl_training/data/datasets/view.py": 2,
    "src/rl_training/data/replay/frames.py": 2,
    "src/rl_training/envs/given.py": 2,
    "src/rl_training/envs/goal_rewards.py": 1,
    "src/rl_training/envs/ogbench.py": 1,
    "src/rl_training/envs/options.py": 3,
    "src/rl_training/envs/snapshot.py": 1,
    "src/rl_training/envs/tasks/goals.py": 2,
    "src/rl_training/envs/tasks/memory.py": 2,
    "src/rl_training/envs/tasks/rewards.py": 1,
    "src/rl_training/experiment/checkpoint/codec.py": 3,
    "src/rl_training/experiment/checkpoint/files.py": 2,
    "src/rl_training/experiment/checkpoint/load.py": 3,
    "src/rl_training/experiment/hub.py": 1,
    "src/rl_training/experiment/trackers.py": 1,
    "src/rl_training/experiment/zoo.py": 2,
    "src/rl_training/models/layers.py": 2,
    "src/rl_training/models/scan.py": 5,
    "src/rl_training/ope/estimate.py": 1,
    "src/rl_training/ope/value.py": 1,
    "src/rl_training/reporting/beside.py": 1,
    "src/rl_training/reporting/figures.py": 1,
    "src/rl_training/reporting/gather.py": 2,
    "src/rl_training/reporting/page.py": 1,
    "src/rl_training/reporting/recorded.py": 1,
    "src/rl_training/runtime/checkpoints/resume.py": 1,
    "src/rl_training/runtime/checkpoints/warm_start.py": 2,
    "src/rl_training/runtime/collector.py": 1,
    "src/rl_training/runtime/compile/cache.py": 4,
    "src/rl_training/runtime/compile/cuda_graph.py": 4,
    "src/rl_training/runtime/compile/programs.py": 1,
    "src/rl_training/runtime/compile/runner.py": 4,
    "src/rl_training/runtime/compile/trace.py": 5,
    "src/rl_training/runtime/compile/worker.py": 1,
    "src/rl_training/runtime/evaluator.py": 1,
    "src/rl_training/runtime/loops.py": 2,
    "src/rl_training/runtime/recorder.py": 1,
    "src/rl_training/runtime/session.py": 1,
    "src/rl_training/sweeps/ray_runner.py": 1,
    "src/rl_training/sweeps/runners.py": 1,
    "src/rl_training/sweeps/search.py": 1,
    "src/rl_training/sweeps/tuning.py": 2,
    "src/rl_training/testing/test_contract_accelerate.py": 3,
    "src/rl_training/tools/export.py": 3,
    "src/rl_training/tools/recipes/locomotion.py": 3,
    "src/rl_training/tools/recipes/ogbench.py": 6,
    "src/rl_training/tools/recipes/ogbench_sets.py": 5,
    "src/rl_training/tools/zoo.py": 2,
}
"""Bindings of vague names in modules that were not gone through yet; a number may only fall."""


def prose_of(path: Path) -> str:
    """Return the text of a page without its code, or the comments and strings of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    kinds = {token.STRING, token.COMMENT, getattr(token, "FSTRING_MIDDLE", token.STRING)}
    parts = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type in kinds]
    return " ".join(re.sub(r"""^#|^\w{0,2}["']+|["']+$""", "", part.string) for part in parts)


def faults(text: str) -> Counter[str]:
    """Count what is not ours, across line breaks."""
    plain = re.sub(r"\s*\n\s*(?:#\s*)?", " ", text)
    counts: Counter[str] = Counter()
    for name, word in WORDS.items():
        rest = re.sub(word.allowed, " ", plain, flags=re.IGNORECASE)
        counts[name] = len(re.findall(word.pattern, rest, re.IGNORECASE))
    return +counts


def vague_names(source: str) -> int:
    """Count where a vague name is bound: assigned, looped over, or taken as an argument."""
    bound = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound += node.id in NAMES
        elif isinstance(node, ast.arg):
            bound += node.arg in NAMES
    return bound


def texts() -> list[Path]:
    return [path for path in (*PAGES, *SOURCES) if path != HISTORY]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_text_has_more_of_the_words_that_are_not_ours() -> None:
    problems = []
    for path in texts():
        counts = faults(prose_of(path))
        if sum(counts.values()) > STILL_THERE.get(named(path), 0):
            problems += [f"{named(path)}: {word}; write {WORDS[word].instead}" for word in counts]
    assert problems == []


def test_no_module_binds_more_names_that_do_not_say_what_they_hold() -> None:
    bound = {named(path): vague_names(path.read_text(encoding="utf-8")) for path in SOURCES}
    more = {name for name, count in bound.items() if count > VAGUE_STILL_THERE.get(name, 0)}
    assert more == set(), f"name what they hold, instead of {', '.join(sorted(NAMES))}"


def test_words_are_recognised_in_pages_and_modules(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("The run goes\non, and is no resume; there is no other.\n```\nshall\n```\n")
    module.write_text(
        '"""A film."""\n# It shall\n# stand there.\nx = f"to the bit {1}"\nfilm = 2\n'
    )
    assert faults(prose_of(page)) == Counter({"go on": 1, "is no": 1})
    expected = {"film": 1, "shall": 1, "stands": 1, "bits": 1}
    assert faults(prose_of(module)) == Counter(expected)


def test_what_stands_for_something_may(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("S stands for seeds; there is no more; it is no longer than that.\n")
    assert faults(prose_of(page)) == Counter()


def test_vague_names_are_those_that_are_bound() -> None:
    assert vague_names("found = f(made=1)\nfor seen in found: print(seen)\n") == 2
    assert vague_names("def f(made): return made.found\n") == 1

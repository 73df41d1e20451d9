"""Writes the type stubs of the managed classes, which are made from the registry at run time.

`python scripts/update_stubs.py` writes them; `--check` exits with 1 when they are stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rl_training import TOP_LEVEL
from rl_training.experiment.registry import class_names

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "rl_training"
HEADER = "# Written by scripts/update_stubs.py; do not edit.\n"


def stubs() -> dict[Path, str]:
    """Return the text of every stub."""
    names = class_names()
    classes = "\n".join(f"class {name}(Agent): ..." for name in names)
    # Acronyms before words, as the linter sorts imports.
    ordered = sorted(names, key=lambda name: (not name.isupper(), name))
    managed = "\n".join(
        f"from rl_training.api.algorithms import {name} as {name}" for name in ordered
    )
    learners = "\n".join(
        f"from rl_training.algorithms.{module} import {name} as {name}Algorithm"
        for name, module in names.items()
    )
    others = "\n".join(
        f"from {module} import {name} as {name}"
        for name, module in sorted(TOP_LEVEL.items(), key=lambda pair: (pair[1], pair[0]))
    )
    return {
        PACKAGE / "api" / "algorithms.pyi": (
            f"{HEADER}from rl_training.api.agent import Agent as Agent\n\n"
            f"def managed_class(name: str) -> type[Agent]: ...\n\n{classes}\n"
        ),
        PACKAGE / "api" / "__init__.pyi": (
            f"{HEADER}from rl_training.api.agent import Agent as Agent\n{managed}\n"
        ),
        PACKAGE / "__init__.pyi": (
            f"{HEADER}# ruff: noqa: N811, F401\n"
            f"from rl_training._version import __version__ as __version__\n{learners}\n"
            f"{managed}\n{others}\n\nTOP_LEVEL: dict[str, str]\n"
        ),
    }


def main() -> None:
    """Write the stubs, or check them."""
    check = "--check" in sys.argv[1:]
    stale = [
        path for path, text in stubs().items() if not path.is_file() or path.read_text() != text
    ]
    if check and stale:
        sys.exit("stale: " + ", ".join(path.name for path in stale) + "; run this without --check")
    for path in () if check else stale:
        path.write_text(stubs()[path])


if __name__ == "__main__":
    main()

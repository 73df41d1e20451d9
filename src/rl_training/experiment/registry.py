"""Which algorithms there are, found by looking: modules of `algorithms/` that declare a `SPEC`.

Names come from the file names, so listing them imports nothing; `get_algorithm_spec` imports one
module.
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rl_training.errors import ConfigError
from rl_training.validation import suggest

if TYPE_CHECKING:
    from rl_training.algorithms.spec import AlgorithmSpec

_FOLDER = Path(__file__).resolve().parent.parent / "algorithms"


@cache
def algorithm_names() -> tuple[str, ...]:
    """Return the names of all algorithms, sorted, without importing them."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.py") if _declares_spec(p)))


def _declares_spec(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    if "\nSPEC = " not in text:
        return False
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "SPEC" for target in node.targets)
        for node in ast.parse(text).body
    )


def get_algorithm_spec(name: str) -> AlgorithmSpec:
    """Return the declaration of an algorithm.

    Raises:
        ConfigError: For an unknown name, with the nearest match.
    """
    if name not in algorithm_names():
        raise ConfigError(f"algo {name!r} is not an algorithm{suggest(name, algorithm_names())}")
    module = importlib.import_module(f"rl_training.algorithms.{name}")
    spec: AlgorithmSpec = module.SPEC
    return spec


def class_names() -> dict[str, str]:
    """Map the public class name of each algorithm (`SAC`) to its registry name (`sac`)."""
    return {_class_name(name): name for name in algorithm_names()}


@cache
def _class_name(name: str) -> str:
    """Read the learner's class name from the file: the class that `SPEC` names as its learner."""
    tree = ast.parse((_FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "learner":
            return ast.unparse(node.value)
    raise ConfigError(f"algorithms/{name}.py declares a SPEC without a learner")

"""Which algorithms there are, found by looking: modules of `algorithms/` that declare a `SPEC`.

A method is `algorithms/<name>.py`, or `algorithms/<name>/learner.py` where it has its own room, so
listing the names imports nothing; `get_algorithm_spec` imports one module.
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
    return tuple(sorted(_sources()))


@cache
def _sources() -> dict[str, Path]:
    """Map each algorithm to the file that declares it."""
    files = {path.stem: path for path in _FOLDER.glob("*.py")}
    rooms = {path.parent.name: path for path in _FOLDER.glob("*/learner.py")}
    return {name: path for name, path in (files | rooms).items() if _declares_spec(path)}


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
    path = _sources()[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "learner":
            return ast.unparse(node.value)
    raise ConfigError(f"{path.name} of {name} declares a SPEC without a learner")
